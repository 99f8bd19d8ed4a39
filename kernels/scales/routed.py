"""Which experts are routed: every CTA finds out for itself, with one bit of shared memory for each."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import ptx
from ..moe.route import load_id

BATCH = 4  # ids that a thread looks up at a time where there are many


@dataclass(frozen=True)
class RoutedConfig:
    """`capacity`: upper bound of experts, a multiple of 1024."""

    capacity: int
    wide_ids: bool
    threads: int

    @property
    def words(self) -> int:
        """Words of the bitmap; those of a lane follow each other."""
        return self.capacity // 32

    @property
    def lane_words(self) -> int:
        return self.words // 32


class Routed:
    """Device code."""

    def __init__(self, config: RoutedConfig):
        if config.capacity % 1024:
            raise ValueError(f"capacity is {config.capacity}; expected a multiple of 1024")
        self.c = config

    @cute.jit
    def clear(self, bitmap: Int32, tid: Int32):
        for w in cutlass.range(tid, self.c.words, self.c.threads, unroll=1):
            ptx.sts32(bitmap + w * 4, Uint32(0))

    @cute.jit
    def mark(self, bitmap: Int32, ids: Int64, count: Int32, experts: Int32, tid: Int32):
        """Sets the bits of `count` ids, one or more; those outside 0 .. experts - 1 have none."""
        threads = cutlass.const_expr(self.c.threads)
        first = load_id(
            ids, cutlass.min(tid, count - 1), self.c.wide_ids
        )  # more threads than ids: the last one again
        cute.arch.sync_threads()  # behind `clear`
        self.set(bitmap, first, experts)
        for p in cutlass.range(tid + threads, count, threads * BATCH, unroll=1):
            found = [
                load_id(ids, cutlass.min(p + i * threads, count - 1), self.c.wide_ids) for i in range(BATCH)
            ]
            for i in cutlass.range_constexpr(BATCH):
                self.set(bitmap, found[i], experts)
        cute.arch.sync_threads()

    @cute.jit
    def set(self, bitmap: Int32, expert: Int32, experts: Int32):
        if expert >= 0 and expert < experts:
            ptx.or_shared(bitmap + expert // 32 * 4, Uint32(1) << Uint32(expert % 32))

    @cute.jit
    def count(self, bitmap: Int32, words: cute.Tensor, lane: Int32):
        """Fills the lane's words; returns how many experts stand before them, and how many there are."""
        mine = Int32(0)
        for w in cutlass.range_constexpr(self.c.lane_words):
            words[w] = ptx.lds32(bitmap + (lane * self.c.lane_words + w) * 4)
            mine += Int32(cute.arch.popc(words[w]))
        upto = mine
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                upto += other
        return upto - mine, cute.arch.shuffle_sync(upto, 31)

    @cute.jit
    def expert(self, words: cute.Tensor, before: Int32, rank: Int32, lane: Int32):
        """The expert with `rank` smaller ones, rank < count."""
        # The last lane before whose words no more than `rank` experts stand has it.
        owner = Int32(31) - Int32(cute.arch.clz(cute.arch.vote_ballot_sync(before <= rank)))
        left = rank - cute.arch.shuffle_sync(before, owner)
        word = Uint32(cute.arch.shuffle_sync(words[0], owner))
        number = Int32(0)
        for w in cutlass.range_constexpr(1, self.c.lane_words):
            further = Uint32(cute.arch.shuffle_sync(words[w], owner))
            held = Int32(cute.arch.popc(word))
            if number == w - 1 and left >= held:
                left -= held
                number += 1
                word = further
        below = word & ((Uint32(1) << Uint32(lane)) - Uint32(1))
        mine = ((word >> Uint32(lane)) & Uint32(1)) != 0 and Int32(cute.arch.popc(below)) == left
        bit = Int32(31) - Int32(cute.arch.clz(cute.arch.vote_ballot_sync(mine)))
        return (owner * self.c.lane_words + number) * 32 + bit
