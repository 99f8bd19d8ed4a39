"""Routing: from top-k expert ids to work tiles of the grouped GEMMs.

One CTA counts the pairs (token, k) of each local expert, and writes

    entries  int32 [1 + n, 4]  word 0 = n; then expert, first slot, tokens (<= tile), 0 of each work tile,
                               ordered by expert
    pairs    int32 [P]         slot -> pair; the slots of an expert are consecutive
    slots    int32 [P]         pair -> slot, -1 where no local expert takes the pair

Ids outside 0 .. experts - 1 and ids whose map entry is negative take no slot. Which slot a pair gets
within its expert may differ from run to run; no result depends on it, since a token's column of an MMA
is computed from that column alone.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import ptx

THREADS = 1024
WARPS = THREADS // 32


@dataclass(frozen=True)
class RouteConfig:
    """`capacity`: upper bound of local experts, a multiple of 1024. `tile`: most tokens of a work tile."""

    capacity: int
    tile: int
    wide_ids: bool
    mapped: bool
    pdl: bool = True


class Route:
    """Device code of one routing program."""

    def __init__(self, config: RouteConfig):
        self.c = config

    @cute.jit
    def launch(
        self, ids: Int64, count: Int32, expert_map: Int64, global_experts: Int32, experts: Int32,
        entries: Int64, pairs: Int64, slots: Int64, flags: Int64, flag_count: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """`flags`: int32 [flag_count], set to zero for the GEMMs."""
        self.kernel(
            ids, count, expert_map, global_experts, experts, entries, pairs, slots, flags, flag_count
        ).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.c.pdl
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, count: Int32, expert_map: Int64, global_experts: Int32, experts: Int32,
        entries: Int64, pairs: Int64, slots: Int64, flags: Int64, flag_count: Int32,
    ):  # fmt: skip
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, c.capacity + 2 * WARPS, byte_alignment=16)
        counts = Int32(shared.toint())
        totals = counts + c.capacity * 4
        if cutlass.const_expr(c.pdl):
            ptx.wait_for_predecessor()
            ptx.dependents_may_start()
        for f in cutlass.range(tid, flag_count, THREADS):
            ptx.stg32(flags + Int64(f) * 4, Uint32(0))
        for e in cutlass.range(tid, c.capacity, THREADS):
            ptx.sts32(counts + e * 4, Uint32(0))
        cute.arch.sync_threads()
        for p in cutlass.range(tid, count, THREADS):
            e = self.local_expert(ids, p, expert_map, global_experts, experts)
            if e >= 0:
                ptx.atom_add_shared(counts + e * 4, Uint32(1))
        cute.arch.sync_threads()

        # Each thread owns consecutive experts; exclusive sums of their tokens and of their work tiles.
        share = cutlass.const_expr(c.capacity // THREADS)
        tokens = Int32(0)
        tiles = Int32(0)
        for i in cutlass.range_constexpr(share):
            n = Int32(ptx.lds32(counts + (tid * share + i) * 4))
            tokens += n
            tiles += (n + (c.tile - 1)) // c.tile
        before_tokens, _ = self.exclusive_sum(tokens, totals, tid)
        before_tiles, all_tiles = self.exclusive_sum(tiles, totals + WARPS * 4, tid)
        for i in cutlass.range_constexpr(share):
            e = tid * share + i
            n = Int32(ptx.lds32(counts + e * 4))
            # The count becomes the cursor from which the expert's pairs take their slots.
            ptx.sts32(counts + e * 4, Uint32(before_tokens))
            for t in cutlass.range((n + (c.tile - 1)) // c.tile, unroll=1):
                size = n - t * c.tile
                if size > c.tile:
                    size = Int32(c.tile)
                address = entries + 16 + Int64(before_tiles + t) * 16
                ptx.stg128(address, Uint32(e), Uint32(before_tokens + t * c.tile), Uint32(size), Uint32(0))
            before_tokens += n
            before_tiles += (n + (c.tile - 1)) // c.tile
        if tid == 0:
            ptx.stg128(entries, Uint32(all_tiles), Uint32(0), Uint32(0), Uint32(0))
        cute.arch.sync_threads()
        for p in cutlass.range(tid, count, THREADS):
            e = self.local_expert(ids, p, expert_map, global_experts, experts)
            slot = Int32(-1)
            if e >= 0:
                slot = Int32(ptx.atom_add_shared(counts + e * 4, Uint32(1)))
                ptx.stg32(pairs + Int64(slot) * 4, Uint32(p))
            ptx.stg32(slots + Int64(p) * 4, Uint32(slot))

    @cute.jit
    def local_expert(self, ids: Int64, pair: Int32, expert_map: Int64, global_experts: Int32, experts: Int32):
        """Local expert of a pair, or -1."""
        valid = cutlass.Boolean(True)
        expert = Int32(0)
        if cutlass.const_expr(self.c.wide_ids):
            low, high = ptx.ldg64(ids + Int64(pair) * 8)
            expert = Int32(low)
            valid = high == 0
        else:
            expert = Int32(ptx.ldg32(ids + Int64(pair) * 4))
        if expert < 0 or expert >= global_experts:
            valid = cutlass.Boolean(False)
        found = Int32(-1)
        if valid:
            found = expert
            if cutlass.const_expr(self.c.mapped):
                found = Int32(ptx.ldg32(expert_map + Int64(expert) * 4))
            if found < 0 or found >= experts:
                found = Int32(-1)
        return found

    @cute.jit
    def exclusive_sum(self, value: Int32, totals: Int32, tid: Int32):
        """The sum of the values of all threads before this one, and of all threads."""
        lane = tid % 32
        warp = tid // 32
        inclusive = value
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, 1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                inclusive += other
        if lane == 31:
            ptx.sts32(totals + warp * 4, Uint32(inclusive))
        cute.arch.sync_threads()
        mine = Int32(ptx.lds32(totals + lane * 4))
        sums = mine
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(sums, 1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                sums += other
        before = cute.arch.shuffle_sync(sums - mine, warp)
        total = cute.arch.shuffle_sync(sums, 31)
        return before + inclusive - value, total
