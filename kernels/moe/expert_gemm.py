"""One grouped GEMM of the expert layer for few tokens: weights stream past, tokens stay.

Computes for every work tile (expert, up to 8 * n_tiles tokens) of the routing, with the weights as the
A operand of `mma.sync.m16n8k16` (output channels are M, tokens are N):

    gated:   h[slot, i]  = act(alpha_gate * (W13 x)[i]) * (alpha_up * (W13 x)[I + i])      bf16
    else:    y[pair, o]  = router_weight[pair] * alpha * (W2 h)[o]                          FP32

A work item is `blocks` row blocks (32 rows each) of one work tile. How items are shared out (`split`):

    split = 1   all chunks of all items form one sequence, cut into equal runs, one a warp. An item that
                a cut goes through is added up by the warp with its end, from partial sums in memory, in
                the order along K: no warp idles, and the result depends on sizes only.
    split > 1   a team of `split` warps shares each item, each takes one part of K, and the partial sums
                are added in shared memory: lowest latency where there are few items.

Everything that a warp needs beside weights (scale bases, exceptions, tokens) is requested ahead.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import layout, ptx
from ..activation import SILU, Activation
from .dequant import QUEUE_BYTES, Dequant
from .epilogue import Epilogue, EpilogueConfig
from .route import THREADS as ROUTE_THREADS
from .route import Route, RouteConfig
from .slices import Slices
from .stream import Stream, StreamConfig, bounds

LEAST_TILES = 8  # of a warp's run, where items are cut


@dataclass(frozen=True)
class GemmConfig:
    """What one compiled program of this kernel depends on."""

    gated: bool
    native: bool
    n_tiles: int
    split: int = 1
    blocks: int = 2
    chunk_tiles: int = 2
    stages: int = 2
    warps: int = 8
    bulk: bool = True
    bf16_fma: bool = False
    min_ctas: int = 0
    activation: Activation = SILU
    capacity: int = 1024
    wide_ids: bool = False
    mapped: bool = False
    own_pairs: int = 0  # up to so many pairs a CTA routes for itself; 0: the tables come from a launch

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    @property
    def tokens_ahead(self) -> int:
        """Tiles of K whose tokens are requested ahead of their use. A warp of a team has registers to spare,
        and few others to hide behind while it waits."""
        return self.chunk_tiles if self.split > 1 and self.n_tiles == 1 else 1

    @property
    def stream(self) -> StreamConfig:
        return StreamConfig(self.native, self.blocks, self.chunk_tiles, self.stages, self.bulk)

    @property
    def epilogue(self) -> EpilogueConfig:
        return EpilogueConfig(self.gated, self.n_tiles, self.blocks, self.split, self.activation)

    @property
    def route(self) -> RouteConfig:
        threads = self.threads if self.own_pairs else ROUTE_THREADS
        return RouteConfig(
            self.capacity, 8 * self.n_tiles, self.wide_ids, self.mapped, self.own_pairs, threads
        )

    @property
    def table_bytes(self) -> int:
        """Shared memory for work tiles (no more than pairs) and pairs."""
        return 8 * (1 + self.own_pairs) + 4 * self.own_pairs + 4 if self.own_pairs else 0

    @property
    def queue_bytes(self) -> int:
        """Shared memory for one warp's exceptions of a slice."""
        return self.blocks * 32 * QUEUE_BYTES

    @property
    def shared_bytes(self) -> int:
        per_warp = self.stream.shared_bytes + self.queue_bytes + self.epilogue.partial_bytes
        working = self.warps * per_warp + self.warps // self.split * self.epilogue.target_bytes
        return max(working, self.route.scratch_bytes) + -(-self.table_bytes // 16) * 16


class ExpertGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: GemmConfig):
        self.c = config
        self.dequant = Dequant(config.native, config.bf16_fma)
        self.route = Route(config.route)
        self.stream = Stream(config.stream, self.route)
        self.slices = Slices(config.blocks, config.chunk_tiles, self.dequant)
        self.epilogue = Epilogue(config.epilogue, self.route)

    @cute.jit
    def launch(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, inputs: tuple, entries: Int64, pairs: Int64,
        router: Int64, out: Int64, out_stride: Int32, partials: Int64, flags: Int64, row_blocks: Int32,
        k_tiles: Int32, topk: Int32,
        ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Enqueues the kernel; all `Int64` are device addresses, see `PreparedMatrix` and `route`.

        `partials`: FP32 [warps * ctas, units * 128]; `flags`: int32 [warps * ctas], zero before and after.
        """
        self.kernel(
            x, x_stride, tiles, bases, slices, starts, records, dense, alpha, inputs, entries, pairs, router,
            out, out_stride, partials, flags, row_blocks, k_tiles, topk,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.c.threads, 1, 1],
            stream=stream,
            use_pdl=self.c.bulk,
            min_blocks_per_mp=self.c.min_ctas,
            preferred_smem_carveout=100 if self.c.min_ctas else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, inputs: tuple, entries: Int64, pairs: Int64,
        router: Int64, out: Int64, out_stride: Int32, partials: Int64, flags: Int64, row_blocks: Int32,
        k_tiles: Int32, topk: Int32,
    ):  # fmt: skip
        c = self.c
        sc = c.stream
        blocks = cutlass.const_expr(c.blocks)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        member = warp % c.split
        team = warp // c.split

        # ---- shared memory: rings, their barriers, queues, partial sums, targets, tables of the routing
        shared = cutlass.memory.SmemAllocator().allocate_array(
            Uint32, c.shared_bytes // 4, byte_alignment=128
        )
        base = Int32(shared.toint())
        ring = base + warp * (c.stages * sc.slot_bytes)
        bars = base + c.warps * c.stages * sc.slot_bytes + warp * (c.stages * 8)
        queues = base + c.warps * sc.shared_bytes + warp * c.queue_bytes
        partial = (
            base + c.warps * (sc.shared_bytes + c.queue_bytes) + team * (c.split * c.epilogue.partial_bytes)
        )
        tables = base + c.shared_bytes - cutlass.const_expr(-(-c.table_bytes // 16) * 16)
        target = tables - (team + 1) * c.epilogue.target_bytes
        if cutlass.const_expr(c.bulk):
            # GEMM1 waits for what its tokens and ids come from. GEMM2 starts when every CTA of GEMM1 has
            # seen that, so it may route and stream weights before GEMM1 ends.
            if cutlass.const_expr(c.gated):
                ptx.wait_for_predecessor()
            ptx.dependents_may_start()
        if cutlass.const_expr(c.own_pairs > 0):
            entries = tables
            pairs = tables + 8 * (1 + c.own_pairs)
            self.route.build(inputs, base, entries, pairs, tid, Int32(0))
            cute.arch.sync_threads()
        self.stream.init_barriers(bars, lane)

        # ---- what is ours
        tile_items = row_blocks // blocks
        items = self.route.count(entries) * tile_items
        chunks = (k_tiles + (c.chunk_tiles - 1)) // c.chunk_tiles
        runs, worker, share = self.share_out(items, chunks, grid, bid, warp, member, team)
        first, last, _, _, _, _ = share
        policy = Int64(0)
        if cutlass.const_expr(c.bulk):
            policy = ptx.evict_first_policy()
        geometry = (tiles, entries, row_blocks, tile_items, k_tiles, Int64(k_tiles) * sc.tile_bytes, policy)
        state = self.stream.begin(geometry, share)

        acc = cute.make_rmem_tensor((4, c.epilogue.units), Float32)
        xs = cute.make_rmem_tensor((8 * c.tokens_ahead, c.n_tiles), Uint32)
        rows = cute.make_rmem_tensor(c.n_tiles, Int64)
        base_words = cute.make_rmem_tensor(blocks, Uint32)
        base_pairs = cute.make_rmem_tensor((2, blocks), Uint32)
        info = cute.make_rmem_tensor((2, blocks), Uint32)  # of this slice: mask and word 1
        next_info = cute.make_rmem_tensor((2, blocks), Uint32)
        after_info = cute.make_rmem_tensor((2, blocks), Uint32)
        exceptions = cute.make_rmem_tensor((3, blocks), Uint32)  # of the next slice
        heads = cute.make_rmem_tensor(blocks, Uint32)
        queue = cute.make_rmem_tensor((2, blocks), Int32)
        dense_rows = cute.make_rmem_tensor(blocks, Int64)
        dense_rows.fill(Int64(0))
        exceptions.fill(Uint32(0))
        slot = Int32(0)
        phase = Int32(0)
        item = last
        primed = Int32(0)
        while item >= first:
            # ---- a work tile: one expert, its tokens, those of its items that are ours
            entry = item // tile_items
            low = entry * tile_items
            if low < first:
                low = first
            expert, first_slot, count = self.route.entry(entries, entry)
            origin = expert * row_blocks - entry * (tile_items * blocks)  # row block of item 0, were it here
            # Requests that depend on nothing come first, before the weights: those behind them arrive late.
            start_words = ptx.ldg128(starts + Int64(expert) * 16)
            record0 = start_words[0]
            dense0 = start_words[2]
            stored = self.epilogue.stored_alphas(alpha, expert)
            a, b = bounds(share, item)
            visit_item = item
            visit = a * c.chunk_tiles // layout.SLICE_TILES
            self.slices.load_info(next_info, slices, origin, visit_item, visit, low, k_tiles)
            visit_item, visit = self.slices.next_visit(share, visit_item, visit)
            self.slices.load_info(after_info, slices, origin, visit_item, visit, low, k_tiles)
            self.slices.load_bases(base_words, bases, origin, item, low, lane)
            span = self.span(a, b, k_tiles)
            if cutlass.const_expr(c.gated):
                self.token_rows(rows, x, x_stride, pairs, first_slot, count, topk, lane, span[0])
                self.load_first_tokens(xs, rows, span)
            if primed == 0:
                state = self.stream.fill(state, geometry, share, ring, bars, lane)
            self.slices.load_exceptions(exceptions, next_info, record0, records, lane)
            if primed == 0:
                primed = Int32(1)
                for s in cutlass.range_constexpr(1, c.stages):
                    state = self.stream.fill(
                        state, geometry, share, ring + s * sc.slot_bytes, bars + s * 8, lane
                    )
            if cutlass.const_expr(not c.gated):
                if cutlass.const_expr(c.bulk):
                    ptx.wait_for_predecessor()
                self.token_rows(rows, x, x_stride, pairs, first_slot, count, topk, lane, span[0])
                self.load_first_tokens(xs, rows, span)
            targets = self.epilogue.targets_of(target, entry)
            if member == 0:
                self.epilogue.write_targets(targets, pairs, router, out, out_stride, first_slot, count, lane)

            for n in cutlass.range(item - low + 1, unroll=1):
                here = item - n
                a, b = bounds(share, here)
                for r in cutlass.range_constexpr(blocks):
                    base_pairs[0, r], base_pairs[1, r] = self.dequant.base_pairs(base_words[r])
                self.slices.load_bases(base_words, bases, origin, here - 1, low, lane)
                acc.fill(0.0)
                tile = a * c.chunk_tiles
                tile_end = b * c.chunk_tiles
                if tile_end > k_tiles:
                    tile_end = k_tiles
                a_next, _ = bounds(share, here - 1)
                tile_next = a_next * c.chunk_tiles
                if here == low:
                    tile_next = tile
                while tile < tile_end:
                    # ---- a slice: at most 16 tiles with their exceptions
                    slice_tile = tile % layout.SLICE_TILES
                    stop = tile - slice_tile + layout.SLICE_TILES
                    if stop > tile_end:
                        stop = tile_end
                    any_dense = self.slices.start_slice(
                        info,
                        next_info,
                        exceptions,
                        heads,
                        queue,
                        None,
                        dense_rows,
                        dense,
                        dense0,
                        queues,
                        slice_tile,
                        lane,
                    )
                    for r in cutlass.range_constexpr(blocks):
                        next_info[0, r] = after_info[0, r]
                        next_info[1, r] = after_info[1, r]
                    self.slices.load_exceptions(exceptions, next_info, record0, records, lane)
                    visit_item, visit = self.slices.next_visit(share, visit_item, visit)
                    self.slices.load_info(after_info, slices, origin, visit_item, visit, low, k_tiles)
                    while tile < stop:
                        at = ring + slot * sc.slot_bytes
                        bar = bars + slot * 8
                        self.stream.wait(bar, phase)
                        if any_dense == 0:
                            for t in cutlass.range_constexpr(c.chunk_tiles):
                                if tile + t < tile_end:
                                    self.tile_step(
                                        acc, xs, rows, heads, queue, base_pairs, dense_rows, 0,
                                        at + t * sc.tile_bytes, tile + t, tile_end, tile_next, lane, False,
                                        t, span,
                                    )  # fmt: skip
                        else:
                            for t in cutlass.range_constexpr(c.chunk_tiles):
                                if tile + t < tile_end:
                                    self.tile_step(
                                        acc, xs, rows, heads, queue, base_pairs, dense_rows, any_dense,
                                        at + t * sc.tile_bytes, tile + t, tile_end, tile_next, lane, True,
                                        t, span,
                                    )  # fmt: skip
                        tile += c.chunk_tiles
                        cute.arch.sync_warp()
                        state = self.stream.fill(state, geometry, share, at, bar, lane)
                        slot += 1
                        if slot == c.stages:
                            slot = Int32(0)
                            phase = phase ^ 1
                row = here - entry * tile_items
                if cutlass.const_expr(c.split > 1):
                    self.epilogue.finish_team(acc, partial, targets, team, member, lane, row, count, stored)
                else:
                    self.epilogue.finish_run(
                        acc, targets, lane, row, count, stored, partials, flags, worker, runs,
                        here, a, b, chunks,
                    )  # fmt: skip
            item = low - 1

    @cute.jit
    def share_out(
        self, items: Int32, chunks: Int32, grid: Int32, bid: Int32, warp: Int32, member: Int32, team: Int32
    ):
        """How the sequence is cut (`run`, `longer`: the first `longer` runs are one chunk longer than `run`),
        our number, and our share (see `Stream`); an empty share has last < first."""
        c = self.c
        if cutlass.const_expr(c.split == 1):
            # Neighbours in the sequence are neighbours on an SM: they use the same tokens. A warp only
            # ever waits for lower numbers, that is for CTAs that started before its own.
            total = items * chunks
            workers = grid * c.warps
            least = cutlass.const_expr(max(1, LEAST_TILES // c.chunk_tiles))
            if total < workers * least:
                workers = (total + (least - 1)) // least
            active = (workers + grid - 1) // grid
            worker = bid * active + warp
            first = Int32(0)
            last = Int32(-1)
            a_first = Int32(0)
            b_last = chunks
            run = Int32(0)
            longer = Int32(0)
            if warp < active and worker < workers:
                run = total // workers
                longer = total - run * workers
                begin = worker * run + cutlass.min(worker, longer)
                end = (worker + 1) * run + cutlass.min(worker + 1, longer)
                first = begin // chunks
                last = (end - 1) // chunks
                a_first = begin - first * chunks
                b_last = end - last * chunks
            return (run, longer), worker, (first, last, a_first, Int32(0), b_last, chunks)
        teams = grid * (c.warps // c.split)
        mine = team * grid + bid
        each = items // teams
        more = items - each * teams
        first = mine * each + cutlass.min(mine, more)
        last = (mine + 1) * each + cutlass.min(mine + 1, more) - 1
        part = (chunks + (c.split - 1)) // c.split
        a = cutlass.min(member * part, chunks)
        b = cutlass.min(member * part + part, chunks)
        return (Int32(0), Int32(0)), mine, (first, last, a, a, b, b)

    # ---- tokens ----------------------------------------------------------------------------------

    @cute.jit
    def token_rows(
        self, rows: cute.Tensor, x: Int64, x_stride: Int32, pairs, first: Int32, count: Int32, topk: Int32,
        lane: Int32, tile: Int32,
    ):  # fmt: skip
        """Byte addresses of this lane's 16 columns of each of its tokens, at the first tile."""
        for j in cutlass.range_constexpr(self.c.n_tiles):
            n = j * 8 + lane // 4
            # Columns beyond the work tile repeat its first token; what they give is never stored.
            if n >= count:
                n = Int32(0)
            row = self.route.pair(pairs, first + n)
            if cutlass.const_expr(self.c.gated):
                row = row // topk
            rows[j] = x + Int64(row) * (Int64(x_stride) * 2) + Int64(tile * 128 + lane % 4 * 32)

    @cute.jit
    def load_tokens(self, xs: cute.Tensor, half: cutlass.Constexpr, rows: cute.Tensor, offset=0, slot=0):
        """Eight of the lane's 16 columns: the B fragments of two steps. `offset`: bytes from where `rows`
        point; `slot`: which of the tiles kept ahead."""
        for j in cutlass.range_constexpr(self.c.n_tiles):
            words = ptx.ldg128(rows[j] + (offset + half * 16))
            for i in cutlass.range_constexpr(4):
                xs[slot * 8 + half * 4 + i, j] = words[i]

    @cute.jit
    def span(self, a: Int32, b: Int32, k_tiles: Int32):
        """First tile and number of tiles of a warp's chunks [a, b) of an item; no chunks are tile 0: a member
        without a part of K must not read behind the rows."""
        first = a * self.c.chunk_tiles
        tiles = cutlass.min(b * self.c.chunk_tiles, k_tiles) - first
        if a == b:
            first = Int32(0)
            tiles = Int32(1)
        return first, tiles

    @cute.jit
    def load_first_tokens(self, xs: cute.Tensor, rows: cute.Tensor, span: tuple):
        """What `tile_step` expects to be under way when the work tile begins."""
        if cutlass.const_expr(self.c.tokens_ahead == 1):
            self.load_tokens(xs, 0, rows)
        else:
            for t in cutlass.range_constexpr(self.c.tokens_ahead):
                offset = cutlass.min(Int32(t), span[1] - 1) * 128
                for half in cutlass.range_constexpr(2):
                    self.load_tokens(xs, half, rows, offset, t)

    # ---- the product -----------------------------------------------------------------------------

    @cute.jit
    def tile_step(
        self, acc: cute.Tensor, xs: cute.Tensor, rows: cute.Tensor, heads: cute.Tensor, queue: cute.Tensor,
        base_pairs: cute.Tensor, dense_rows: cute.Tensor, any_dense: Int32, address: Int32, tile: Int32,
        tile_end: Int32, tile_next: Int32, lane: Int32, dense: cutlass.Constexpr, place: cutlass.Constexpr,
        span: tuple,
    ):  # fmt: skip
        """acc += the item's tiles at one place along K times the tokens there.

        On entry the first half of the tokens' columns is in `xs` or on its way; asked for here are the
        second half, and the first half of the tile that comes next, be it the next item's. Where tiles are
        kept ahead, `place` (of the tile in its chunk) is where this one is kept, and what is asked for is the
        tile that is kept there next: a chunk further, or in the next item, which a team cuts as this one.
        """
        c = self.c
        block_stride = cutlass.const_expr(c.chunk_tiles * c.stream.tile_bytes)
        slot = cutlass.const_expr(place if c.tokens_ahead > 1 else 0)
        further = Int32(0)
        if cutlass.const_expr(c.tokens_ahead == 1):
            self.load_tokens(xs, 1, rows)
            step = Int32(128)
            if tile + 1 == tile_end:
                step = (tile_next - tile) * 128
            for j in cutlass.range_constexpr(c.n_tiles):
                rows[j] = rows[j] + Int64(step)
        else:
            further = tile - span[0] + c.tokens_ahead
            if further >= span[1]:
                further = cutlass.min(Int32(place), span[1] - 1)
            further = further * 128
        sv = cute.make_rmem_tensor((2, c.blocks), Uint32)
        inside = tile % layout.SLICE_TILES
        bound = Uint32(inside + 1) << Uint32(26)
        for r in cutlass.range_constexpr(c.blocks):
            at = address + r * block_stride
            sv[0, r], sv[1, r] = self.dequant.scales(at, base_pairs[0, r], base_pairs[1, r], lane)
            if cutlass.const_expr(dense):
                if (any_dense & (1 << r)) != 0:
                    sv[0, r], sv[1, r] = self.dequant.dense_scales(at, lane, dense_rows[r], inside)
        for r in cutlass.range_constexpr(c.blocks):
            sv[0, r], sv[1, r], heads[r], queue[0, r] = self.dequant.patch(
                sv[0, r], sv[1, r], heads[r], queue[0, r], queue[1, r], bound
            )
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(c.blocks):
                for m in cutlass.range_constexpr(2):
                    words = ptx.lds64(address + r * block_stride + m * 512 + half * 8 + lane * 16)
                    self.multiply(acc, xs, (r * 2 + m) * c.n_tiles, half, words, sv[m, r], slot)
            if cutlass.const_expr(c.tokens_ahead > 1):
                self.load_tokens(xs, half, rows, further, slot)
            elif cutlass.const_expr(half == 0):
                self.load_tokens(xs, 0, rows)

    @cute.jit
    def multiply(
        self, acc: cute.Tensor, xs: cute.Tensor, unit: cutlass.Constexpr, half: cutlass.Constexpr,
        words: tuple, scale: Uint32, slot: cutlass.Constexpr,
    ):  # fmt: skip
        """Two steps (16 columns each) of one fragment against all tokens."""
        for s in cutlass.range_constexpr(2):
            a = self.dequant.fragment(words[s], scale)
            for j in cutlass.range_constexpr(self.c.n_tiles):
                u = unit + j
                before = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                k = slot * 8 + half * 4 + s * 2
                after = ptx.mma_m16n8k16(before, a, (xs[k, j], xs[k + 1, j]))
                for i in cutlass.range_constexpr(4):
                    acc[i, u] = after[i]
