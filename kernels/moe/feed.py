"""The producers of `wide_gemm`: stages of 64 columns, weights and tokens, in a ring in shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import layout, ptx
from .route import Route

MOST_TOKENS = 128  # of a work tile
GROUPS = 2  # warpgroups of consumers
BLOCKS = 4 * GROUPS  # row blocks of a tile, one a warp
TOKEN_BYTES = 2 * layout.TILE_K  # of one token in a stage
PRODUCERS = 128
ROWS_AT_ONCE = PRODUCERS // 8  # tokens that the producers copy in one go, 16 bytes each


@dataclass(frozen=True)
class FeedConfig:
    """`gated`: tokens are rows of x, `topk` pairs each; else rows are slots."""

    gated: bool
    native: bool
    stages: int
    topk: int
    fence: bool = True

    @property
    def tile_bytes(self) -> int:
        return layout.WEIGHT_BYTES + layout.CODE_BYTES * (2 if self.native else 1)

    @property
    def stage_bytes(self) -> int:
        """Of the weights."""
        return BLOCKS * self.tile_bytes

    @property
    def shared_bytes(self) -> int:
        """Weights, then a full and an empty barrier a stage; tokens lie elsewhere."""
        return self.stages * self.stage_bytes + -(-self.stages * 16 // 128) * 128


class Feed:
    """Device code. `base`: shared memory of `FeedConfig.shared_bytes`."""

    def __init__(self, config: FeedConfig, route: Route):
        self.c = config
        self.route = route

    @cute.jit
    def full(self, base: Int32, slot: Int32):
        return base + self.c.stages * self.c.stage_bytes + slot * 16

    @cute.jit
    def empty(self, base: Int32, slot: Int32):
        return base + self.c.stages * self.c.stage_bytes + slot * 16 + 8

    @cute.jit
    def init_barriers(self, base: Int32, tid: Int32):
        if tid == 0:
            for s in cutlass.range_constexpr(self.c.stages):
                # every producer, and one of them once more with the bytes of the weights
                ptx.mbarrier_init(self.full(base, Int32(s)), PRODUCERS + 1)
                ptx.mbarrier_init(self.empty(base, Int32(s)), 4 * GROUPS)
            ptx.mbarrier_init_fence()

    # ---- consumers -------------------------------------------------------------------------------

    @cute.jit
    def wait(self, base: Int32, slot: Int32, phase: Int32, warp: Int32):
        """Until a stage is full; the address of the warp's weights."""
        ptx.mbarrier_wait(self.full(base, slot), phase)
        if cutlass.const_expr(self.c.fence):
            # The tokens were written by ordinary copies and are read by the tensor cores.
            ptx.fence_async_shared()
        return base + slot * self.c.stage_bytes + warp * self.c.tile_bytes

    @cute.jit
    def release(self, base: Int32, slot: Int32, condition: Uint32):
        """The warp has read a stage; `condition` is not zero in one lane."""
        ptx.mbarrier_arrive_if(self.empty(base, slot), condition)

    @cute.jit
    def skip(self, base: Int32, steps: Int32, k_tiles: Int32, lane: Int32):
        """Passes over a tile that has no rows for this warpgroup."""
        for k in cutlass.range(k_tiles, unroll=1):
            step = steps + k
            slot = step % self.c.stages
            ptx.mbarrier_wait(self.full(base, slot), (step // self.c.stages) & 1)
            cute.arch.sync_warp()
            self.release(base, slot, Uint32(lane == 0))

    # ---- producers -------------------------------------------------------------------------------

    @cute.jit
    def run(
        self, base: Int32, tokens: Int32, x: Int64, x_stride: Int32, tiles: Int64, entries: Int64,
        pairs: Int64, row_blocks: Int32, k_tiles: Int32, m_tiles: Int32, total: Int32, bid: Int32,
        grid: Int32, thread: Int32,
    ):  # fmt: skip
        """Fills the ring for every tile of this CTA; called by all producers."""
        c = self.c
        chunk = thread % 8
        row = thread // 8
        # 16-byte chunks of a row of 128 bytes are exchanged by the row's number in its eight
        place = tokens + row * TOKEN_BYTES + ((chunk ^ (row & 7)) * 16)
        rows = cute.make_rmem_tensor(MOST_TOKENS // ROWS_AT_ONCE, Int32)
        rows.fill(Int32(0))
        slot = Int32(0)
        phase = Int32(1)
        tile = Int32(bid)
        while tile < total:
            entry = tile // m_tiles
            m_tile = tile - entry * m_tiles
            expert, first, count = self.route.entry(entries, entry)
            self.find_rows(rows, x_stride, pairs, first, count, row, chunk)
            blocks = row_blocks - m_tile * BLOCKS
            if blocks > BLOCKS:
                blocks = Int32(BLOCKS)
            block = Int64(expert) * Int64(row_blocks) + Int64(m_tile * BLOCKS + thread)
            weights = tiles + block * (Int64(k_tiles) * c.tile_bytes)
            steps = (count + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE
            for k in cutlass.range(k_tiles, unroll=1):
                ptx.mbarrier_wait(self.empty(base, slot), phase)
                full = self.full(base, slot)
                if thread < 32:
                    if thread == 0:
                        ptx.mbarrier_expect(full, blocks * c.tile_bytes)
                    cute.arch.sync_warp()
                    if thread < blocks:
                        goal = base + slot * c.stage_bytes + thread * c.tile_bytes
                        at = weights + Int64(k * c.tile_bytes)
                        ptx.bulk_load_cached(goal, at, Int32(c.tile_bytes), full)
                target = place + slot * (MOST_TOKENS * TOKEN_BYTES)
                for i in cutlass.range_constexpr(MOST_TOKENS // ROWS_AT_ONCE):
                    if i < steps:
                        source = x + Int64(rows[i] + k * 8) * 16
                        ptx.cp_async16(target + i * (ROWS_AT_ONCE * TOKEN_BYTES), source)
                ptx.cp_async_arrive(full)
                slot += 1
                if slot == c.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
            tile += grid

    @cute.jit
    def find_rows(
        self, rows: cute.Tensor, x_stride: Int32, pairs: Int64, first: Int32, count: Int32, row: Int32,
        chunk: Int32,
    ):  # fmt: skip
        """Places of this thread's chunks of its tokens, in units of 16 bytes."""
        for i in cutlass.range_constexpr(MOST_TOKENS // ROWS_AT_ONCE):
            token = row + i * ROWS_AT_ONCE
            # Columns beyond the work tile repeat its first token; what they give is never stored.
            if token >= count:
                token = Int32(0)
            at = first + token
            if cutlass.const_expr(self.c.gated):
                at = self.route.pair(pairs, at) // self.c.topk
            rows[i] = at * (x_stride // 8) + chunk
