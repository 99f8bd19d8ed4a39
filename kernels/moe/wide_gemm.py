"""One grouped GEMM of the expert layer for many tokens, at the rate of Hopper's tensor cores.

Computes for every work tile (expert, up to 128 tokens) of the routing, with the weights as the A operand
of `wgmma` from registers (output channels are M, tokens are N):

    gated:   h[slot, i]  = act(alpha_gate * (W13 x)[i]) * (alpha_up * (W13 x)[I + i])      bf16
    else:    y[pair, o]  = router_weight[pair] * alpha * (W2 h)[o]                          bf16

A persistent CTA takes tiles of 256 prepared rows of one work tile. A warpgroup of producers brings stages
of 64 columns into a ring: weights by bulk copies, the rows of the tokens by 16-byte copies from wherever
they lie. Two warpgroups of consumers take 128 rows each: a warp owns a block of 32 rows, rebuilds its
scales and weights in registers, and hands them to the tensor cores as two 64-row operands in turn, so
that one is multiplied while the other is rebuilt. The consumers do not wait for each other: one stores
its results while the other still multiplies.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from .. import layout, ptx
from ..activation import SILU, Activation
from .dequant import QUEUE_BYTES, Dequant
from .feed import BLOCKS, GROUPS, MOST_TOKENS, TOKEN_BYTES, Feed, FeedConfig
from .route import Route, RouteConfig
from .slices import Slices
from .wide_epilogue import WideEpilogue, WideEpilogueConfig

THREADS = 128 * (GROUPS + 1)
STEPS = 8  # products of a warpgroup in a stage: four along K for each of its two 64-row operands
FLYING = 3  # products under way while the next operand is rebuilt
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


@dataclass(frozen=True)
class WideConfig:
    """What one compiled program of this kernel depends on."""

    gated: bool
    native: bool
    topk: int
    stages: int = 7
    activation: Activation = SILU
    capacity: int = 1024
    wide_ids: bool = False
    mapped: bool = False
    fence: bool = True

    @property
    def route(self) -> RouteConfig:
        return RouteConfig(self.capacity, MOST_TOKENS, self.wide_ids, self.mapped, 0)

    @property
    def feed(self) -> FeedConfig:
        return FeedConfig(self.gated, self.native, self.stages, self.topk, self.fence)

    @property
    def epilogue(self) -> WideEpilogueConfig:
        return WideEpilogueConfig(self.gated, self.activation)

    @property
    def shared_bytes(self) -> int:
        """Beside the tokens: weights, barriers, queues of exceptions, what the epilogue needs."""
        queues = 4 * GROUPS * 32 * QUEUE_BYTES
        return self.feed.shared_bytes + queues + GROUPS * self.epilogue.shared_bytes


class WideGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: WideConfig):
        self.c = config
        self.route = Route(config.route)
        self.feed = Feed(config.feed, self.route)
        self.dequant = Dequant(config.native, False)
        self.slices = Slices(1, 1, self.dequant)
        self.epilogue = WideEpilogue(config.epilogue, self.route)

    @cute.jit
    def launch(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, row_blocks: Int32, k_tiles: Int32, ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Enqueues the kernel; all `Int64` are device addresses, see `PreparedMatrix` and `route`."""
        self.kernel(
            x, x_stride, tiles, bases, slices, starts, records, dense, alpha, entries, pairs, router, out,
            out_stride, row_blocks, k_tiles,
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, row_blocks: Int32, k_tiles: Int32,
    ):  # fmt: skip
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        memory = cutlass.memory.SmemAllocator()
        held = memory.allocate_array(Uint32, c.stages * MOST_TOKENS * TOKEN_BYTES // 4, byte_alignment=1024)
        tokens = Int32(held.toint())
        base = Int32(memory.allocate_array(Uint32, c.shared_bytes // 4, byte_alignment=128).toint())
        self.feed.init_barriers(base, tid)
        cute.arch.sync_threads()
        if cutlass.const_expr(c.gated):
            ptx.wait_for_predecessor()
        ptx.dependents_may_start()

        m_tiles = (row_blocks + (BLOCKS - 1)) // BLOCKS
        total = self.route.count(entries) * m_tiles
        if warp >= 4 * GROUPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if cutlass.const_expr(not c.gated):
                ptx.wait_for_predecessor()
            self.feed.run(
                base, tokens, x, x_stride, tiles, entries, pairs, row_blocks, k_tiles,
                m_tiles, total, bid, grid, tid - 128 * GROUPS,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            weights = (bases, slices, starts, records, dense, alpha, row_blocks, k_tiles)
            target = (pairs, router, out, out_stride)
            self.consume(base, tokens, entries, weights, target, m_tiles, total, bid, grid, warp, lane)

    # ---- consumers -------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self, base: Int32, tokens: Int32, entries: Int64, weights: tuple, target: tuple, m_tiles: Int32,
        total: Int32, bid: Int32, grid: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        c = self.c
        bases, slices, starts, records, dense, alpha, row_blocks, k_tiles = weights
        group = warp // 4
        queues = base + c.feed.shared_bytes + warp * (32 * QUEUE_BYTES)
        room = base + c.feed.shared_bytes + 4 * GROUPS * 32 * QUEUE_BYTES + group * c.epilogue.shared_bytes
        ahead = self.ahead()
        tile = Int32(bid)
        self.look_ahead(ahead, entries, weights, m_tiles, total, tile, warp, lane)
        self.slices.load_exceptions(ahead[2], ahead[0], ahead[3][0], records, lane)
        steps = Int32(0)
        while tile < total:
            entry = tile // m_tiles
            m_tile = tile - entry * m_tiles
            expert, first, count = self.route.entry(entries, entry)
            now = self.ahead()
            for mine, theirs in zip(now, ahead, strict=True):
                for i in cutlass.range_constexpr(cute.size(mine)):
                    mine[i] = theirs[i]
            tile += grid
            self.look_ahead(ahead, entries, weights, m_tiles, total, tile, warp, lane)
            block = m_tile * BLOCKS + warp
            if block >= row_blocks:
                block = Int32(-1)
            if m_tile * BLOCKS + group * 4 < row_blocks:
                place = (expert, block, first, count, m_tile, group, warp, lane)
                self.tile(base, tokens, weights, target, queues, room, now, ahead, place, steps)
            else:
                self.feed.skip(base, steps, k_tiles, lane)
                self.slices.load_exceptions(ahead[2], ahead[0], ahead[3][0], records, lane)
            steps += k_tiles

    def ahead(self) -> tuple:
        """What is known of a tile before it starts: first slice, its bases, exceptions, expert's origins."""
        return (
            cute.make_rmem_tensor((2, 1), Uint32),
            cute.make_rmem_tensor(1, Uint32),
            cute.make_rmem_tensor((3, 1), Uint32),
            cute.make_rmem_tensor(2, Uint32),
        )

    @cute.jit
    def look_ahead(
        self, ahead: tuple, entries: Int64, weights: tuple, m_tiles: Int32, total: Int32, tile: Int32,
        warp: Int32, lane: Int32,
    ):  # fmt: skip
        """Requests what the warp needs of a tile, but for the exceptions, which depend on it."""
        info, base_words, exceptions, origins = ahead
        bases, slices, starts, records, dense, alpha, row_blocks, k_tiles = weights
        info.fill(Uint32(0))
        exceptions.fill(Uint32(0))
        base_words.fill(Uint32(0))
        if tile < total:
            entry = tile // m_tiles
            block = (tile - entry * m_tiles) * BLOCKS + warp
            if block < row_blocks:
                expert, _, _ = self.route.entry(entries, entry)
                words = ptx.ldg128(starts + Int64(expert) * 16)
                origins[0] = words[0]
                origins[1] = words[2]
                origin = expert * row_blocks
                self.slices.load_info(info, slices, origin, block, Int32(0), Int32(0), k_tiles)
                self.slices.load_bases(base_words, bases, origin, block, Int32(0), lane)

    @cute.jit
    def tile(
        self, base: Int32, tokens: Int32, weights: tuple, target: tuple,
        queues: Int32, room: Int32, now: tuple, ahead: tuple, place: tuple, steps: Int32,
    ):  # fmt: skip
        """One tile of products from the ring to memory."""
        c = self.c
        bases, slices, starts, records, dense, alpha, row_blocks, k_tiles = weights
        expert, block, first, count, m_tile, group, warp, lane = place
        width = (count + (ptx.STEP - 1)) // ptx.STEP
        acc = tuple(cute.make_rmem_tensor(MOST_TOKENS // 2, Float32) for _ in range(2))
        for m in cutlass.range_constexpr(2):
            acc[m].fill(0.0)
        addressed = self.epilogue.address(target, first, count, group, warp, lane)
        alphas = self.epilogue.alphas(alpha, expert)
        info, base_words, exceptions, origins = now
        bases2 = self.dequant.base_pairs(base_words[0])
        next_info = cute.make_rmem_tensor((2, 1), Uint32)
        heads = cute.make_rmem_tensor(1, Uint32)
        queue = cute.make_rmem_tensor((2, 1), Int32)
        dense_rows = cute.make_rmem_tensor(1, Int64)
        dense_rows.fill(Int64(0))
        heads.fill(Uint32(0))
        queue.fill(Int32(0))
        any_dense = cute.make_rmem_tensor(1, Int32)
        any_dense.fill(Int32(0))
        self.slices.load_info(next_info, slices, expert * row_blocks, block, Int32(1), Int32(0), k_tiles)
        exceptional = (info, next_info, exceptions, heads, queue, dense_rows, any_dense)
        fixed = (
            base,
            slices,
            records,
            dense,
            origins,
            expert * row_blocks,
            block,
            k_tiles,
            queues,
            warp,
            lane,
        )
        slot = steps % c.stages
        phase = (steps // c.stages) & 1
        before = slot
        leader = Uint32(lane == 0)
        for k in cutlass.range(k_tiles, unroll=1):
            scales, words = self.bring(k, slot, phase, bases2, exceptional, fixed)
            b = ptx.rows_descriptor(tokens + slot * (MOST_TOKENS * TOKEN_BYTES))
            for m in cutlass.range_constexpr(2):
                warpgroup.wait_group(1)
                if cutlass.const_expr(m == 1):
                    self.feed.release(base, before, leader & Uint32(k > 0))
                a = []
                for s in cutlass.range_constexpr(4):
                    a.extend(self.dequant.fragment(words[m][s], scales[m]))
                warpgroup.fence()
                after = ptx.products_of_64(
                    [acc[m][i] for i in range(MOST_TOKENS // 2)], a, b, width, MOST_TOKENS // ptx.STEP
                )
                for i in cutlass.range_constexpr(MOST_TOKENS // 2):
                    acc[m][i] = after[i]
            before = slot
            slot += 1
            if slot == c.stages:
                slot = Int32(0)
                phase = phase ^ 1
        self.slices.load_exceptions(ahead[2], ahead[0], ahead[3][0], records, lane)
        warpgroup.wait_group(0)
        self.feed.release(base, before, leader)
        self.epilogue.store(
            acc, width, alphas, addressed, target, room, first, count, m_tile, group, row_blocks, warp, lane
        )

    @cute.jit
    def bring(self, k: Int32, slot: Int32, phase: Int32, bases2: tuple, exceptional: tuple, fixed: tuple):
        """From the ring: the warp's scales and packed weights of step k."""
        info, next_info, exceptions, heads, queue, dense_rows, any_dense = exceptional
        base, slices, records, dense, origins, origin, block, k_tiles, queues, warp, lane = fixed
        inside = k % layout.SLICE_TILES
        if inside == 0:
            any_dense[0] = self.slices.start_slice(
                info, info, exceptions, heads, queue, dense_rows, dense, origins[1], queues, Int32(0), lane
            )
            for i in cutlass.range_constexpr(2):
                info[i] = next_info[i]
            self.slices.load_exceptions(exceptions, info, origins[0], records, lane)
            visit = k // layout.SLICE_TILES + 2
            self.slices.load_info(next_info, slices, origin, block, visit, Int32(0), k_tiles)
        at = self.feed.wait(base, slot, phase, warp)
        sv0, sv1 = self.dequant.scales(at, bases2[0], bases2[1], lane)
        if any_dense[0] != 0:
            sv0, sv1 = self.dequant.dense_scales(at, lane, dense_rows[0], inside)
        bound = Uint32(inside + 1) << Uint32(26)
        sv0, sv1, heads[0], queue[0, 0] = self.dequant.patch(
            sv0, sv1, heads[0], queue[0, 0], queue[1, 0], bound
        )
        words = (ptx.lds128(at + lane * 16), ptx.lds128(at + 512 + lane * 16))
        return (sv0, sv1), words
