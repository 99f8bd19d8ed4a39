"""Routing: from top-k expert ids to the work tiles of the grouped GEMMs.

One CTA counts the pairs (token, k) of each local expert and writes two tables:

    entries  int32 [1 + n, 2]  word 0 of the first row = n; then of each work tile, ordered by expert:
                               expert, first slot << 8 | tokens (<= tile)
    pairs    int32 [P]         slot -> pair; the slots of an expert are consecutive

For few tokens every CTA of a GEMM does this for itself in shared memory (`shared`), which costs less than
a launch; for many, one launch does it for both GEMMs in global memory.

Ids outside 0 .. experts - 1 and ids whose map entry is negative take no slot. Within an expert the shared
tables keep the order of the pairs, since CTAs must agree on which work tile a pair belongs to. In global
memory the order may differ from run to run; no result depends on it, since a token's column of an MMA is
computed from that column alone and everything else is indexed by pair.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import ptx

THREADS = 1024


@dataclass(frozen=True)
class RouteConfig:
    """`capacity`: upper bound of local experts, a multiple of `threads`. `tile`: most tokens of a work tile.
    `shared_pairs`: most pairs that shared tables hold (below 65536), 0 for tables in global memory."""

    capacity: int
    tile: int
    wide_ids: bool
    mapped: bool
    shared_pairs: int
    threads: int = THREADS

    @property
    def batch(self) -> int:
        """Pairs that a thread looks up at a time."""
        return 1 if self.shared else 8

    @property
    def shared(self) -> bool:
        return self.shared_pairs > 0

    @property
    def scratch_bytes(self) -> int:
        """Shared memory while routing: a counter for each expert, the warps' totals, unordered pairs."""
        return 4 * (self.capacity + self.threads // 32 + self.shared_pairs)


class Route:
    """Device code. `inputs`: ids, pairs in all, expert map, global and local experts."""

    def __init__(self, config: RouteConfig):
        if config.capacity % config.threads:
            raise ValueError(f"capacity is {config.capacity}; expected a multiple of {config.threads}")
        self.c = config

    @cute.jit
    def launch(
        self, inputs: tuple, entries: Int64, pairs: Int64, stream: cuda.CUstream, pdl: cutlass.Constexpr
    ):
        """Enqueues the routing into global memory."""
        ids, count, expert_map, global_experts, experts = inputs
        self.kernel(ids, count, expert_map, global_experts, experts, entries, pairs, pdl).launch(
            grid=[1, 1, 1], block=[self.c.threads, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, count: Int32, expert_map: Int64, global_experts: Int32, experts: Int32,
        entries: Int64, pairs: Int64, pdl: cutlass.Constexpr,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        words = cutlass.const_expr(self.c.scratch_bytes // 4)
        scratch = Int32(
            cutlass.memory.SmemAllocator().allocate_array(Uint32, words, byte_alignment=16).toint()
        )
        if cutlass.const_expr(pdl):
            ptx.wait_for_predecessor()
            ptx.dependents_may_start()
        self.build((ids, count, expert_map, global_experts, experts), scratch, entries, pairs, tid)

    @cute.jit
    def build(self, inputs: tuple, scratch: Int32, entries, pairs, tid: Int32):
        """Fills the tables; called by all threads of a CTA, which must synchronise before they read them."""
        c = self.c
        ids, count, expert_map, global_experts, experts = inputs
        totals = scratch + c.capacity * 4
        for e in cutlass.range_constexpr(c.capacity // c.threads):
            ptx.sts32(scratch + (e * c.threads + tid) * 4, Uint32(0))
        cute.arch.sync_threads()
        for p in cutlass.range(tid, count, c.threads * c.batch, unroll=1):
            found = self.local_experts(p, inputs)
            for i in cutlass.range_constexpr(c.batch):
                if found[i] >= 0:
                    ptx.atom_add_shared(scratch + found[i] * 4, Uint32(1))
        cute.arch.sync_threads()

        # Each thread owns consecutive experts; exclusive sums of their tokens and of their work tiles.
        share = cutlass.const_expr(c.capacity // c.threads)
        mine = [Int32(ptx.lds32(scratch + (tid * share + i) * 4)) for i in range(share)]
        tokens = Int32(0)
        tiles = Int32(0)
        for i in cutlass.range_constexpr(share):
            tokens += mine[i]
            tiles += (mine[i] + (c.tile - 1)) // c.tile
        tokens, _ = self.exclusive_sum(tokens, totals, tid)
        tiles, all_tiles = self.exclusive_sum(tiles, totals, tid)
        for i in cutlass.range_constexpr(share):
            e = tid * share + i
            # The count becomes the cursor from which the expert's pairs take their slots.
            cursor = tokens
            if cutlass.const_expr(c.shared):
                cursor = mine[i] << 16 | tokens
            ptx.sts32(scratch + e * 4, Uint32(cursor))
            for t in cutlass.range((mine[i] + (c.tile - 1)) // c.tile, unroll=1):
                size = mine[i] - t * c.tile
                if size > c.tile:
                    size = Int32(c.tile)
                self.put2(entries, 1 + tiles + t, Uint32(e), Uint32((tokens + t * c.tile) << 8 | size))
            tokens += mine[i]
            tiles += (mine[i] + (c.tile - 1)) // c.tile
        if tid == 0:
            self.put2(entries, Int32(0), Uint32(all_tiles), Uint32(0))
        cute.arch.sync_threads()
        unordered = totals + c.threads // 32 * 4
        for p in cutlass.range(tid, count, c.threads * c.batch, unroll=1):
            found = self.local_experts(p, inputs)
            for i in cutlass.range_constexpr(c.batch):
                if found[i] >= 0:
                    slot = Int32(ptx.atom_add_shared(scratch + found[i] * 4, Uint32(1)))
                    if cutlass.const_expr(c.shared):
                        ptx.sts32(unordered + (slot & 0xFFFF) * 4, Uint32(p + i * c.threads))
                    else:
                        ptx.stg32(pairs + Int64(slot) * 4, Uint32(p + i * c.threads))
        if cutlass.const_expr(c.shared):
            cute.arch.sync_threads()
            for p in cutlass.range(tid, count, c.threads, unroll=1):
                e = self.local_expert(ids, p, expert_map, global_experts, experts)
                if e >= 0:
                    self.place(p, Int32(ptx.lds32(scratch + e * 4)), unordered, pairs)

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
        """The id of a pair; -1 for what does not fit into 32 bits."""
        if cutlass.const_expr(self.c.wide_ids):
            low, high = ptx.ldg64(ids + Int64(pair) * 8)
            expert = Int32(low)
            if high != 0:
                expert = Int32(-1)
            return expert
        return Int32(ptx.ldg32(ids + Int64(pair) * 4))

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
    def local_experts(self, first: Int32, inputs: tuple):
        """The local experts of `batch` pairs, `threads` apart, or -1; their ids are requested together."""
        ids, count, expert_map, global_experts, experts = inputs
        pairs = [first + i * self.c.threads for i in range(self.c.batch)]
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
