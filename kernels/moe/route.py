"""Routing: from top-k expert ids to the work tiles of the grouped GEMMs.

A CTA, or several that share the work, counts the pairs (token, k) of each local expert and writes two tables:

    entries  int32 [1 + n, 2]  word 0 of the first row = n; then of each work tile, ordered by expert:
                               expert, first slot << 8 | tokens (<= tile)
    pairs    int32 [slots]     slot -> pair; the slots of an expert are consecutive

For few tokens every CTA of a GEMM does this for itself in shared memory (`shared`), which costs less than
a launch; for many, one launch does it for both GEMMs in global memory.

Ids outside 0 .. experts - 1 and ids whose map entry is negative take no slot. Within an expert slots keep the
order of the pairs: CTAs that route for themselves must agree on which work tile a pair belongs to, and where
K is split, the order in which a token's parts are added depends on its work tile.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import ptx

THREADS = 1024
COUNTERS = 16384  # that many fit into shared memory everywhere
MANY_COUNTERS = 32768  # on Hopper, where several CTAs share the work
MOST_TILE = 255  # tokens; a byte of an entry


@dataclass(frozen=True)
class RouteConfig:
    """`capacity`: upper bound of local experts, a multiple of `threads`. `tile`: most tokens of a work tile.
    `shared_pairs`: most pairs that shared tables hold (below 65536), 0 for tables in global memory.
    `parts`: CTAs that each place a part of the pairs into global tables, after counting all of them.
    `align`: an expert's slots start at a multiple of it. `step`: an expert's tokens are spread evenly over
    its work tiles, in multiples of this, a divisor of `tile`; 0: all tiles but the last are full.

    Raises ValueError for what the tables cannot hold.
    """

    capacity: int
    tile: int
    wide_ids: bool
    mapped: bool
    shared_pairs: int
    threads: int = THREADS
    parts: int = 1
    align: int = 1
    step: int = 0

    def __post_init__(self) -> None:
        if self.capacity % self.threads:
            raise ValueError(f"capacity is {self.capacity}, expected a multiple of {self.threads}")
        if not 0 < self.tile <= MOST_TILE:
            raise ValueError(f"tile is {self.tile}, expected 1 to {MOST_TILE}")
        if self.step and (self.tile % self.step or self.step % self.align):
            raise ValueError(
                f"step is {self.step}, expected a divisor of tile {self.tile} and a multiple of {self.align}"
            )

    @property
    def one_warp(self) -> bool:
        """Whether a warp routes alone, a pair in each lane."""
        return 0 < self.shared_pairs <= 32

    @property
    def batch(self) -> int:
        """Pairs that a thread looks up at a time: all of its own, where tables lie in shared memory."""
        if self.one_warp:
            return 1
        return -(-self.shared_pairs // self.threads) if self.shared else 8

    @property
    def shared(self) -> bool:
        return self.shared_pairs > 0

    @property
    def ranks(self) -> int:
        """Warps that each count and place a run of the pairs, with tables in global memory."""
        counters = COUNTERS if self.parts == 1 else MANY_COUNTERS
        return max(1, min(self.threads // 32, counters // self.capacity))

    @property
    def rows(self) -> int:
        """Counters of an expert: the ranks', and those of the pairs before and behind this CTA's part."""
        return 1 if self.shared else self.ranks + (2 if self.parts > 1 else 0)

    @property
    def counters(self) -> int:
        """One for each expert, and each rank."""
        return self.capacity * self.rows

    @property
    def scratch_bytes(self) -> int:
        """Shared memory while routing: counters, the warps' totals, unordered pairs."""
        if self.one_warp:
            return 0
        return 4 * (self.counters + self.threads // 32 + self.shared_pairs)


@cute.jit
def load_id(ids: Int64, place: Int32, wide: cutlass.Constexpr):
    """An expert id, int64 if `wide`, else int32; -1 for what does not fit into 32 bits."""
    if cutlass.const_expr(wide):
        low, high = ptx.ldg64(ids + Int64(place) * 8)
        expert = Int32(low)
        if high != 0:
            expert = Int32(-1)
        return expert
    return Int32(ptx.ldg32(ids + Int64(place) * 4))


class Route:
    """Device code. `inputs`: ids, pairs in all, expert map, global and local experts."""

    def __init__(self, config: RouteConfig):
        self.c = config

    @cute.jit
    def launch(
        self, inputs: tuple, entries: Int64, pairs: Int64, stream: cuda.CUstream, pdl: cutlass.Constexpr
    ):
        """Enqueues the routing into global memory."""
        ids, count, expert_map, global_experts, experts = inputs
        self.kernel(ids, count, expert_map, global_experts, experts, entries, pairs, pdl).launch(
            grid=[self.c.parts, 1, 1], block=[self.c.threads, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, count: Int32, expert_map: Int64, global_experts: Int32, experts: Int32,
        entries: Int64, pairs: Int64, pdl: cutlass.Constexpr,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        part, _, _ = cute.arch.block_idx()
        words = cutlass.const_expr(self.c.scratch_bytes // 4)
        scratch = Int32(
            cutlass.memory.SmemAllocator().allocate_array(Uint32, words, byte_alignment=16).toint()
        )
        if cutlass.const_expr(pdl):
            ptx.wait_for_predecessor()
            ptx.dependents_may_start()
        self.build((ids, count, expert_map, global_experts, experts), scratch, entries, pairs, tid, part)

    @cute.jit
    def build(self, inputs: tuple, scratch: Int32, entries, pairs, tid: Int32, part: Int32):
        """Fills the tables; called by all threads of a CTA, which must synchronise before they read them.

        `part`: which part of the pairs this CTA places.
        """
        if cutlass.const_expr(self.c.one_warp):
            if tid < 32:
                self.build_by_warp(inputs, entries, pairs, tid)
        else:
            self.build_by_all(inputs, scratch, entries, pairs, tid, part)

    @cute.jit
    def build_by_all(self, inputs: tuple, scratch: Int32, entries, pairs, tid: Int32, part: Int32):
        c = self.c
        if cutlass.const_expr(c.shared):
            # Requested once, while counters are cleared: ids come from far away.
            found = self.local_experts(tid, c.threads, inputs)
        for i in cutlass.range_constexpr(c.counters // c.threads):
            ptx.sts32(scratch + (i * c.threads + tid) * 4, Uint32(0))
        cute.arch.sync_threads()
        if cutlass.const_expr(c.shared):
            self.count_pairs(found, scratch)
        else:
            self.count_runs(inputs, scratch, tid, part)
            if cutlass.const_expr(c.parts > 1):
                self.count_others(inputs, scratch, tid, part)
        cute.arch.sync_threads()
        self.put_entries(scratch, entries, tid, part)
        cute.arch.sync_threads()
        if cutlass.const_expr(c.shared):
            self.place_pairs(found, scratch, pairs, tid)
        else:
            self.place_runs(inputs, scratch, pairs, tid, part)

    @cute.jit
    def build_by_warp(self, inputs: tuple, entries, pairs, lane: Int32):
        """The tables of so few pairs that each lane has one; nobody waits for other warps."""
        c = self.c
        (expert,) = self.local_experts(lane, 32, inputs)
        key = Uint32(0x7FFFFF)  # sorts behind all experts
        if expert >= 0:
            key = Uint32(expert)
        equal = ptx.match_any(key)
        mine = Int32(cute.arch.popc(equal))
        before = Int32(cute.arch.popc(equal & ((Uint32(1) << Uint32(lane)) - Uint32(1))))
        tiles = Int32(0)  # of the expert, in the lane of its first pair
        if expert >= 0 and before == 0:
            tiles = (mine + (c.tile - 1)) // c.tile
        first = Int32(0)
        tile = Int32(0)
        all_tiles = Int32(0)
        word = key << Uint32(8) | Uint32(tiles)
        for other in cutlass.range(cutlass.min(inputs[1], Int32(32)), unroll=1):
            theirs = Uint32(cute.arch.shuffle_sync(word, other))
            size = Int32(theirs & Uint32(255))
            all_tiles += size
            if (theirs >> Uint32(8)) < key:
                first += 1
                tile += size
        if expert >= 0:
            ptx.sts32(pairs + (first + before) * 4, Uint32(lane))
        for t in cutlass.range(tiles, unroll=1):
            size = cutlass.min(mine - t * c.tile, Int32(c.tile))
            self.put2(entries, 1 + tile + t, Uint32(expert), Uint32((first + t * c.tile) << 8 | size))
        if lane == 0:
            self.put2(entries, Int32(0), Uint32(all_tiles), Uint32(0))

    @cute.jit
    def put_entries(self, scratch: Int32, entries, tid: Int32, part: Int32):
        """Work tiles of all experts; counters become the cursors from which pairs take their slots."""
        c = self.c
        totals = scratch + c.counters * 4
        # Each thread owns consecutive experts; exclusive sums of their tokens and of their work tiles.
        share = cutlass.const_expr(c.capacity // c.threads)
        mine = [self.tokens_of(scratch, tid * share + i) for i in range(share)]
        tokens = Int32(0)
        tiles = Int32(0)
        for i in cutlass.range_constexpr(share):
            tokens += self.aligned(mine[i])
            tiles += (mine[i] + (c.tile - 1)) // c.tile
        tokens, _ = self.exclusive_sum(tokens, totals, tid)
        tiles, all_tiles = self.exclusive_sum(tiles, totals, tid)
        for i in cutlass.range_constexpr(share):
            e = tid * share + i
            self.set_cursors(scratch, e, tokens, mine[i])
            count = (mine[i] + (c.tile - 1)) // c.tile
            full = self.full_tile(mine[i], count)
            if part == 0:
                for t in cutlass.range(count, unroll=1):
                    size = cutlass.min(mine[i] - t * full, full)
                    self.put2(entries, 1 + tiles + t, Uint32(e), Uint32((tokens + t * full) << 8 | size))
            tokens += self.aligned(mine[i])
            tiles += (mine[i] + (c.tile - 1)) // c.tile
        if tid == 0 and part == 0:
            self.put2(entries, Int32(0), Uint32(all_tiles), Uint32(0))

    @cute.jit
    def full_tile(self, tokens: Int32, tiles: Int32):
        """Tokens of all of an expert's work tiles but the last."""
        full = Int32(self.c.tile)
        if cutlass.const_expr(self.c.step > 0):
            if tiles > 1:
                steps = tiles * self.c.step
                full = (tokens + (steps - 1)) // steps * self.c.step
        return full

    @cute.jit
    def aligned(self, tokens: Int32):
        return (tokens + (self.c.align - 1)) // self.c.align * self.c.align

    @cute.jit
    def tokens_of(self, scratch: Int32, e: Int32):
        total = Int32(0)
        for r in cutlass.range_constexpr(self.c.rows):
            total += Int32(ptx.lds32(scratch + (r * self.c.capacity + e) * 4))
        return total

    @cute.jit
    def set_cursors(self, scratch: Int32, e: Int32, first: Int32, tokens: Int32):
        if cutlass.const_expr(self.c.shared):
            ptx.sts32(scratch + e * 4, Uint32(tokens << 16 | first))
        else:
            cursor = first
            if cutlass.const_expr(self.c.parts > 1):
                cursor += Int32(ptx.lds32(scratch + (self.c.ranks * self.c.capacity + e) * 4))
            for r in cutlass.range_constexpr(self.c.ranks):
                place = scratch + (r * self.c.capacity + e) * 4
                count = Int32(ptx.lds32(place))
                ptx.sts32(place, Uint32(cursor))
                cursor += count

    # ---- tables in global memory: every rank of every part has a run of consecutive pairs ----------

    @cute.jit
    def run_of(self, count: Int32, run: Int32):
        """Where a run begins and ends; whole batches, but for the last one."""
        batch = cutlass.const_expr(32 * self.c.batch)
        runs = cutlass.const_expr(self.c.ranks * self.c.parts)
        size = (count + (runs * batch - 1)) // (runs * batch) * batch
        return cutlass.min(run * size, count), cutlass.min((run + 1) * size, count)

    @cute.jit
    def count_others(self, inputs: tuple, scratch: Int32, tid: Int32, part: Int32):
        """Counts the pairs of the parts before and behind this one."""
        c = self.c
        begin, _ = self.run_of(inputs[1], part * c.ranks)
        _, end = self.run_of(inputs[1], part * c.ranks + (c.ranks - 1))
        before = scratch + c.ranks * (c.capacity * 4)
        for p in cutlass.range(tid, inputs[1], c.threads * c.batch, unroll=1):
            found = self.local_experts(p, c.threads, inputs)
            for i in cutlass.range_constexpr(c.batch):
                pair = p + i * c.threads
                counters = before
                if pair >= end:
                    counters = before + c.capacity * 4
                if found[i] >= 0 and (pair < begin or pair >= end):
                    ptx.atom_add_shared(counters + found[i] * 4, Uint32(1))

    @cute.jit
    def count_runs(self, inputs: tuple, scratch: Int32, tid: Int32, part: Int32):
        c = self.c
        rank = tid // 32
        if rank < c.ranks:
            begin, end = self.run_of(inputs[1], part * c.ranks + rank)
            mine = scratch + rank * (c.capacity * 4)
            for p in cutlass.range(begin, end, 32 * c.batch, unroll=1):
                found = self.local_experts(p + tid % 32, 32, inputs)
                for i in cutlass.range_constexpr(c.batch):
                    if found[i] >= 0:
                        ptx.atom_add_shared(mine + found[i] * 4, Uint32(1))

    @cute.jit
    def place_runs(self, inputs: tuple, scratch: Int32, pairs, tid: Int32, part: Int32):
        c = self.c
        rank = tid // 32
        lane = tid % 32
        if rank < c.ranks:
            begin, end = self.run_of(inputs[1], part * c.ranks + rank)
            mine = scratch + rank * (c.capacity * 4)
            for p in cutlass.range(begin, end, 32 * c.batch, unroll=1):
                found = self.local_experts(p + lane, 32, inputs)
                for i in cutlass.range_constexpr(c.batch):
                    self.place_together(p + lane + i * 32, found[i], mine, pairs, lane)

    @cute.jit
    def place_together(self, pair: Int32, e: Int32, cursors: Int32, pairs, lane: Int32):
        """Puts the 32 pairs of a warp into the next slots of their experts, in the order of the lanes."""
        equal = ptx.match_any(Uint32(e))
        before = Int32(cute.arch.popc(equal & ((Uint32(1) << Uint32(lane)) - Uint32(1))))
        cursor = Int32(0)
        if e >= 0:
            cursor = Int32(ptx.lds32(cursors + e * 4))
            ptx.stg32(pairs + Int64(cursor + before) * 4, Uint32(pair))
        cute.arch.sync_warp()
        if e >= 0 and before == 0:
            ptx.sts32(cursors + e * 4, Uint32(cursor + Int32(cute.arch.popc(equal))))
        cute.arch.sync_warp()

    # ---- tables in shared memory: in any order first ---------------------------------------------

    @cute.jit
    def count_pairs(self, found: list, scratch: Int32):
        """`found`: the experts of this thread's pairs, see `local_experts`."""
        for i in cutlass.range_constexpr(len(found)):
            if found[i] >= 0:
                ptx.atom_add_shared(scratch + found[i] * 4, Uint32(1))

    @cute.jit
    def place_pairs(self, found: list, scratch: Int32, pairs, tid: Int32):
        c = self.c
        unordered = scratch + (c.counters + c.threads // 32) * 4
        for i in cutlass.range_constexpr(len(found)):
            if found[i] >= 0:
                slot = Int32(ptx.atom_add_shared(scratch + found[i] * 4, Uint32(1)))
                ptx.sts32(unordered + (slot & 0xFFFF) * 4, Uint32(tid + i * c.threads))
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(len(found)):
            if found[i] >= 0:
                pair = tid + i * c.threads
                self.place(pair, Int32(ptx.lds32(scratch + found[i] * 4)), unordered, pairs)

    @cute.jit
    def place(self, pair: Int32, cursor: Int32, unordered: Int32, pairs: Int32):
        """Puts a pair behind the smaller ones of its expert.

        `cursor`: the expert's tokens << 16 | its last slot + 1.
        """
        end = cursor & 0xFFFF
        first = end - (cursor >> 16)
        slot = first
        for s in cutlass.range(first, end, unroll=1):
            if Int32(ptx.lds32(unordered + s * 4)) < pair:
                slot += 1
        ptx.sts32(pairs + slot * 4, Uint32(pair))

    @cute.jit
    def put2(self, table, index: Int32, a: Uint32, b: Uint32):
        if cutlass.const_expr(self.c.shared):
            ptx.sts64(table + index * 8, a, b)
        else:
            ptx.stg64(table + Int64(index) * 8, a, b)

    # ---- reading the tables ----------------------------------------------------------------------

    @cute.jit
    def count(self, entries):
        """Number of work tiles."""
        n, _ = self.entry_words(entries, Int32(0))
        return Int32(n)

    @cute.jit
    def entry(self, entries, index: Int32):
        """Expert, first slot and tokens of a work tile."""
        expert, packed = self.entry_words(entries, index + 1)
        return Int32(expert), Int32(packed >> Uint32(8)), Int32(packed & Uint32(255))

    @cute.jit
    def request(self, entries: Int64, index: Int32, count: Int32, lane: Int32):
        """An entry (in global memory) on its way: a word of it in each lane; see `received`."""
        word = Uint32(0xFFFFFFFF)
        if index < count:
            word = ptx.ldg32(entries + (Int64(index + 1) * 8 + Int64(lane % 2 * 4)))
        return word

    @cute.jit
    def received(self, word: Uint32):
        """What `entry` gives, of `request`'s words; expert -1 behind the last entry. For whole warps."""
        expert = Int32(cute.arch.shuffle_sync(word, 0))
        packed = Uint32(cute.arch.shuffle_sync(word, 1))
        return expert, Int32(packed >> Uint32(8)), Int32(packed & Uint32(255))

    @cute.jit
    def entry_words(self, entries, index: Int32):
        if cutlass.const_expr(self.c.shared):
            a, b = ptx.lds64(entries + index * 8)
        else:
            a, b = ptx.ldg64(entries + Int64(index) * 8)
        return a, b

    @cute.jit
    def pair(self, pairs, slot: Int32):
        """The pair in a slot."""
        if cutlass.const_expr(self.c.shared):
            found = ptx.lds32(pairs + slot * 4)
        else:
            found = ptx.ldg32(pairs + Int64(slot) * 4)
        return Int32(found)

    # ---- parts -----------------------------------------------------------------------------------

    @cute.jit
    def local_expert(self, ids: Int64, pair: Int32, expert_map: Int64, global_experts: Int32, experts: Int32):
        """Local expert of a pair, or -1."""
        return self.local(self.id(ids, pair), expert_map, global_experts, experts)

    @cute.jit
    def id(self, ids: Int64, pair: Int32):
        return load_id(ids, pair, self.c.wide_ids)

    @cute.jit
    def local(self, expert: Int32, expert_map: Int64, global_experts: Int32, experts: Int32):
        found = Int32(-1)
        if expert >= 0 and expert < global_experts:
            found = expert
            if cutlass.const_expr(self.c.mapped):
                found = Int32(ptx.ldg32(expert_map + Int64(expert) * 4))
            if found < 0 or found >= experts:
                found = Int32(-1)
        return found

    @cute.jit
    def local_experts(self, first: Int32, stride: int, inputs: tuple):
        """The local experts of `batch` pairs, `stride` apart, or -1; their ids are requested together."""
        ids, count, expert_map, global_experts, experts = inputs
        pairs = [first + i * stride for i in range(self.c.batch)]
        found = [self.id(ids, cutlass.min(p, count - 1)) for p in pairs]
        return [
            self.local(cutlass.select_(p < count, e, Int32(-1)), expert_map, global_experts, experts)
            for p, e in zip(pairs, found, strict=True)
        ]

    @cute.jit
    def exclusive_sum(self, value: Int32, totals: Int32, tid: Int32):
        """The sum of the values of all threads before this one, and of all threads."""
        warps = cutlass.const_expr(self.c.threads // 32)
        lane = tid % 32
        warp = tid // 32
        inclusive = value
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, 1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                inclusive += other
        cute.arch.sync_threads()  # an earlier sum may still be read
        if lane == 31:
            ptx.sts32(totals + warp * 4, Uint32(inclusive))
        cute.arch.sync_threads()
        mine = Int32(0)
        if lane < warps:
            mine = Int32(ptx.lds32(totals + lane * 4))
        sums = mine
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(sums, 1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                sums += other
        before = cute.arch.shuffle_sync(sums - mine, warp)
        total = cute.arch.shuffle_sync(sums, 31)
        return before + inclusive - value, total
