"""The producers of `wide_gemm`: stages of 128 columns, weights and tokens, in a ring in shared memory.

A tile of K of a work tile's tokens lies in shared memory as rows of 128 bytes, whose 16-byte chunks are
exchanged by the row's number in its eight. The tokens of the first product are gathered row by row. Those of
the second one (`h`) lie in global memory in the very same way, [K / 64, slots / 8, 8, 64], so that one bulk
copy brings all of them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import layout, ptx
from .route import Route

GROUPS = 2  # warpgroups of consumers
DEPTH = 2  # tiles of K in a stage
BARRIERS = 16  # bytes of a stage's two
TOKEN_BYTES = 2 * layout.TILE_K  # of one token and one tile of K
ROWS = 8  # tokens that lie together; an expert's slots start at a multiple of it
ROWS_BYTES = ROWS * TOKEN_BYTES
PRODUCERS = 128
ROWS_AT_ONCE = PRODUCERS // 8  # tokens that the producers copy in one go, 16 bytes each


@dataclass(frozen=True)
class FeedConfig:
    """`tokens`: most of a work tile. `gated`: tokens are rows of x, `topk` pairs each; else slots of h.
    `fragments`: of 16 rows that a warp of the consumers takes."""

    gated: bool
    native: bool
    topk: int
    tokens: int
    stages: int
    fragments: int = 2

    @property
    def blocks(self) -> int:
        """Row blocks of a tile of the CTA's."""
        return 2 * GROUPS * self.fragments

    def part(self, warp: Any) -> tuple:
        """A consumer warp's row block of the CTA's, and the first of its fragments, numbers or the device's.

        One fragment of each of four blocks is what a warpgroup needs for whole chunks of `h`; both fragments
        of two are more bytes of y in a row.
        """
        if self.fragments == 2:
            return warp, 0
        return (warp % 4, warp // 4) if self.gated else (warp // 2, warp % 2)

    @property
    def tile_bytes(self) -> int:
        return layout.WEIGHT_BYTES + layout.CODE_BYTES * (2 if self.native else 1)

    @property
    def weight_bytes(self) -> int:
        """Of one stage."""
        return self.blocks * DEPTH * self.tile_bytes

    @property
    def rows_bytes(self) -> int:
        """Of the tokens of one tile of K."""
        return self.tokens * TOKEN_BYTES

    @property
    def tokens_bytes(self) -> int:
        """Of the tokens of one stage."""
        return DEPTH * self.rows_bytes

    @property
    def shared_bytes(self) -> int:
        """Tokens, weights, then a full and an empty barrier a stage."""
        return self.barriers + -(-self.stages * BARRIERS // 128) * 128

    @property
    def barriers(self) -> int:
        return self.stages * (self.tokens_bytes + self.weight_bytes)


class Feed:
    """Device code. `base`: shared memory of `FeedConfig.shared_bytes`, at a multiple of 1024."""

    def __init__(self, config: FeedConfig, route: Route):
        self.c = config
        self.route = route

    @cute.jit
    def token_rows(self, base: Int32, slot: Int32, inside):
        """Where a stage's tokens lie for one of its tiles of K."""
        return base + slot * self.c.tokens_bytes + inside * self.c.rows_bytes

    @cute.jit
    def weights(self, base: Int32, slot: Int32, block: Int32):
        """Where the tiles of one of the row blocks lie, one behind the other."""
        first = base + self.c.stages * self.c.tokens_bytes
        return first + slot * self.c.weight_bytes + block * (DEPTH * self.c.tile_bytes)

    @cute.jit
    def full(self, base: Int32, slot: Int32):
        return base + self.c.barriers + slot * BARRIERS

    @cute.jit
    def empty(self, base: Int32, slot: Int32):
        return self.full(base, slot) + 8

    @cute.jit
    def init_barriers(self, base: Int32, tid: Int32):
        if tid == 0:
            for s in cutlass.range_constexpr(self.c.stages):
                # one producer with the bytes of bulk copies, and where tokens are gathered, all of them
                ptx.mbarrier_init(self.full(base, Int32(s)), 1 + (PRODUCERS if self.c.gated else 0))
                ptx.mbarrier_init(self.empty(base, Int32(s)), 4 * GROUPS)
            ptx.mbarrier_init_fence()

    # ---- consumers -------------------------------------------------------------------------------

    @cute.jit
    def wait(self, full: Int32, phase: Int32):
        """Until a stage is full."""
        ptx.mbarrier_wait(full, phase)
        # Gathered tokens were written by ordinary copies and are read by the tensor cores.
        if cutlass.const_expr(self.c.gated):
            ptx.fence_async_shared()

    @cute.jit
    def release_at(self, full: Int32, condition: Uint32):
        """The warp has read the stage of this barrier; `condition` is not zero in one lane."""
        ptx.mbarrier_arrive_if(full + 8, condition)

    @cute.jit
    def skip(self, base: Int32, first: Int32, count: Int32, lane: Int32):
        """Passes over the stages of a tile that has no rows for this warpgroup."""
        for i in cutlass.range(count, unroll=1):
            stage = first + i
            slot = stage % self.c.stages
            ptx.mbarrier_wait(self.full(base, slot), (stage // self.c.stages) & 1)
            cute.arch.sync_warp()
            self.release_at(self.full(base, slot), Uint32(lane == 0))

    # ---- producers -------------------------------------------------------------------------------

    @cute.jit
    def run(
        self, base: Int32, x: Int64, x_stride: Int32, tiles: Int64, entries: Int64, pairs: Int64,
        row_blocks: Int32, k_tiles: Int32, m_tiles: Int32, total: Int32, bid: Int32, grid: Int32,
        thread: Int32,
    ):  # fmt: skip
        """Fills the ring for every tile of this CTA, tokens gathered; called by all producers."""
        chunk = thread % 8
        row = thread // 8
        # 16-byte chunks of a row of 128 bytes are exchanged by the row's number in its eight
        place = row * TOKEN_BYTES + ((chunk ^ (row & 7)) * 16)
        rows = cute.make_rmem_tensor(self.c.tokens // ROWS_AT_ONCE, Int64)
        rows.fill(Int64(0))
        slot = Int32(0)
        phase = Int32(1)
        tile = Int32(bid)
        while tile < total:
            entry = tile // m_tiles
            m_tile = tile - entry * m_tiles
            expert, first, count = self.route.entry(entries, entry)
            self.find_rows(rows, x, x_stride, pairs, first, count, row, chunk)
            blocks = cutlass.min(row_blocks - m_tile * self.c.blocks, Int32(self.c.blocks))
            block = Int64(expert) * Int64(row_blocks) + Int64(m_tile * self.c.blocks + thread)
            source = tiles + block * (Int64(k_tiles) * self.c.tile_bytes)
            steps = (count + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE
            for k in cutlass.range(0, k_tiles, DEPTH, unroll=1):
                ptx.mbarrier_wait(self.empty(base, slot), phase)
                self.copy_weights(base, slot, source, k, k_tiles, blocks, Int32(0), thread)
                for inside in cutlass.range_constexpr(DEPTH):
                    if k + inside < k_tiles:
                        self.copy_tokens(rows, steps, inside, self.token_rows(base, slot, inside) + place)
                for i in cutlass.range_constexpr(self.c.tokens // ROWS_AT_ONCE):
                    rows[i] = rows[i] + Int64(DEPTH * TOKEN_BYTES)
                ptx.cp_async_arrive(self.full(base, slot))
                slot += 1
                if slot == self.c.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
            tile += grid
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)

    @cute.jit
    def run_bulk(
        self, base: Int32, h: Int64, groups: Int32, tiles: Int64, entries: Int64, row_blocks: Int32,
        k_tiles: Int32, m_tiles: Int32, total: Int32, bid: Int32, grid: Int32, lane: Int32,
    ):  # fmt: skip
        """As `run`, of tokens that lie in groups of `ROWS`; called by one warp. `groups`: of a tile of K."""
        slot = Int32(0)
        phase = Int32(1)
        tile = Int32(bid)
        while tile < total:
            entry = tile // m_tiles
            m_tile = tile - entry * m_tiles
            expert, first, count = self.route.entry(entries, entry)
            blocks = cutlass.min(row_blocks - m_tile * self.c.blocks, Int32(self.c.blocks))
            block = Int64(expert) * Int64(row_blocks) + Int64(m_tile * self.c.blocks + lane)
            source = tiles + block * (Int64(k_tiles) * self.c.tile_bytes)
            size = (count + (ROWS - 1)) // ROWS * ROWS_BYTES
            for k in cutlass.range(0, k_tiles, DEPTH, unroll=1):
                ptx.mbarrier_wait(self.empty(base, slot), phase)
                tokens = cutlass.min(k_tiles - k, Int32(DEPTH)) * size
                self.copy_weights(base, slot, source, k, k_tiles, blocks, tokens, lane)
                inside = lane - self.c.blocks
                if inside >= 0 and inside < DEPTH and k + inside < k_tiles:
                    at = h + (Int64(k + inside) * Int64(groups) + Int64(first // ROWS)) * ROWS_BYTES
                    ptx.bulk_load_cached(self.token_rows(base, slot, inside), at, size, self.full(base, slot))
                slot += 1
                if slot == self.c.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
            tile += grid

    @cute.jit
    def copy_weights(
        self, base: Int32, slot: Int32, source: Int64, k: Int32, k_tiles: Int32, blocks: Int32, more: Int32,
        thread: Int32,
    ):  # fmt: skip
        """`more`: bytes of other bulk copies into the stage."""
        full = self.full(base, slot)
        size = cutlass.min(k_tiles - k, Int32(DEPTH)) * self.c.tile_bytes
        if thread < 32:
            if thread == 0:
                ptx.mbarrier_expect(full, blocks * size + more)
            cute.arch.sync_warp()
            if thread < blocks:
                at = source + Int64(k * self.c.tile_bytes)
                ptx.bulk_load_cached(self.weights(base, slot, thread), at, size, full)

    @cute.jit
    def copy_tokens(self, rows: cute.Tensor, steps: Int32, inside: cutlass.Constexpr, target: Int32):
        for i in cutlass.range_constexpr(self.c.tokens // ROWS_AT_ONCE):
            if i < steps:
                ptx.cp_async16(target + i * (ROWS_AT_ONCE * TOKEN_BYTES), rows[i] + inside * TOKEN_BYTES)

    @cute.jit
    def find_rows(
        self, rows: cute.Tensor, x: Int64, x_stride: Int32, pairs: Int64, first: Int32, count: Int32,
        row: Int32, chunk: Int32,
    ):  # fmt: skip
        """Addresses of this thread's chunks of its tokens."""
        for i in cutlass.range_constexpr(self.c.tokens // ROWS_AT_ONCE):
            token = row + i * ROWS_AT_ONCE
            # Columns beyond the work tile repeat its first token; what they give is never stored.
            if token >= count:
                token = Int32(0)
            at = self.route.pair(pairs, first + token) // self.c.topk
            rows[i] = x + (Int64(at) * Int64(x_stride) * 2 + Int64(chunk * 16))
