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
from .dequant import QUEUE_BYTES, Dequant
from .epilogue import Epilogue, EpilogueConfig
from .stream import Stream, StreamConfig

WARPS = 8
THREADS = 32 * WARPS
LEAST_CHUNKS = 4  # of a warp's run, where items are cut


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
    bulk: bool = True
    bf16_fma: bool = False
    min_ctas: int = 0
    activation: str = "silu"

    @property
    def stream(self) -> StreamConfig:
        return StreamConfig(self.native, self.blocks, self.chunk_tiles, self.stages, self.bulk)

    @property
    def epilogue(self) -> EpilogueConfig:
        return EpilogueConfig(self.gated, self.n_tiles, self.blocks, self.split, self.activation)

    @property
    def queue_bytes(self) -> int:
        """Shared memory for one warp's exceptions of a slice."""
        return self.blocks * 32 * QUEUE_BYTES

    @property
    def shared_bytes(self) -> int:
        per_warp = self.stream.shared_bytes + self.queue_bytes + self.epilogue.partial_bytes
        return WARPS * per_warp + WARPS // self.split * self.epilogue.target_bytes


class ExpertGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: GemmConfig):
        self.c = config
        self.dequant = Dequant(config.native, config.bf16_fma)
        self.stream = Stream(config.stream)
        self.epilogue = Epilogue(config.epilogue)

    @cute.jit
    def launch(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, partials: Int64, flags: Int64, row_blocks: Int32, k_tiles: Int32, topk: Int32,
        ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Enqueues the kernel; all `Int64` are device addresses, see `PreparedMatrix` and `route`.

        `partials`: FP32 [8 * ctas, 64 * blocks * n_tiles * 4], `flags`: int32 [8 * ctas], zero.
        """
        self.kernel(
            x, x_stride, tiles, bases, slices, starts, records, dense, alpha, entries, pairs, router, out,
            out_stride, partials, flags, row_blocks, k_tiles, topk,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.c.bulk,
            min_blocks_per_mp=self.c.min_ctas,
            preferred_smem_carveout=100 if self.c.min_ctas else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, partials: Int64, flags: Int64, row_blocks: Int32, k_tiles: Int32, topk: Int32,
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

        # ---- shared memory: rings, their barriers, queues, partial sums, targets
        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, c.shared_bytes // 4, byte_alignment=128)
        base = Int32(shared.toint())
        ring = base + warp * (c.stages * sc.slot_bytes)
        bars = base + WARPS * c.stages * sc.slot_bytes + warp * (c.stages * 8)
        queues = base + WARPS * sc.shared_bytes + warp * c.queue_bytes
        partial = base + WARPS * (sc.shared_bytes + c.queue_bytes) + team * (c.split * c.epilogue.partial_bytes)
        target = base + c.shared_bytes - (team + 1) * c.epilogue.target_bytes
        self.stream.init_barriers(bars, lane)
        if cutlass.const_expr(c.bulk):
            # GEMM1 waits for the routing. GEMM2 starts when every CTA of GEMM1 has seen it, so it may
            # stream weights before GEMM1 ends.
            if cutlass.const_expr(c.gated):
                ptx.wait_for_predecessor()
            ptx.dependents_may_start()

        # ---- what is ours
        tile_items = row_blocks // blocks
        items = Int32(ptx.ldg32(entries)) * tile_items
        chunks = (k_tiles + (c.chunk_tiles - 1)) // c.chunk_tiles
        workers, worker, share = self.share_out(items, chunks, grid, bid, warp, member, team)
        first, last, _, _, _, _ = share
        policy = Int64(0)
        if cutlass.const_expr(c.bulk):
            policy = ptx.evict_first_policy()
        geometry = (tiles, entries, row_blocks, tile_items, k_tiles, Int64(k_tiles) * sc.tile_bytes, policy)
        state = self.stream.begin(geometry, share)
        for s in cutlass.range_constexpr(c.stages):
            state = self.stream.fill(state, geometry, share, ring + s * sc.slot_bytes, bars + s * 8, lane)

        acc = cute.make_rmem_tensor((4, c.epilogue.units), Float32)
        xs = cute.make_rmem_tensor((8, c.n_tiles), Uint32)
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
        while item >= first:
            # ---- a work tile: one expert, its tokens, those of its items that are ours
            entry = item // tile_items
            low = entry * tile_items
            if low < first:
                low = first
            e_expert, e_first, e_count, _ = ptx.ldg128(entries + 16 + Int64(entry) * 16)
            expert = Int32(e_expert)
            count = Int32(e_count)
            origin = expert * row_blocks - entry * (tile_items * blocks)  # row block of item 0, were it here
            start_words = ptx.ldg128(starts + Int64(expert) * 16)
            record0 = start_words[0]
            dense0 = start_words[2]
            a, b = self.stream.bounds(share, item)
            visit_item = item
            visit = a * c.chunk_tiles // layout.SLICE_TILES
            self.load_info(next_info, slices, origin, visit_item, visit, low, k_tiles)
            self.load_exceptions(exceptions, next_info, record0, records, lane)
            visit_item, visit = self.next_visit(share, visit_item, visit)
            self.load_info(after_info, slices, origin, visit_item, visit, low, k_tiles)
            self.load_bases(base_words, bases, origin, item, low, lane)
            if cutlass.const_expr(c.bulk and not c.gated):
                ptx.wait_for_predecessor()
            first_tile = a * c.chunk_tiles
            if a == b:
                first_tile = Int32(0)  # a member without a part of K must not read behind the rows
            self.token_rows(rows, x, x_stride, pairs, Int32(e_first), count, topk, lane, first_tile)
            self.load_tokens(xs, 0, rows)
            targets = self.epilogue.targets_of(target, entry)
            if member == 0:
                self.epilogue.write_targets(targets, pairs, router, out, out_stride, Int32(e_first), count, lane)

            for n in cutlass.range(item - low + 1, unroll=1):
                here = item - n
                a, b = self.stream.bounds(share, here)
                for r in cutlass.range_constexpr(blocks):
                    base_pairs[0, r], base_pairs[1, r] = self.dequant.base_pairs(base_words[r])
                self.load_bases(base_words, bases, origin, here - 1, low, lane)
                acc.fill(0.0)
                tile = a * c.chunk_tiles
                tile_end = b * c.chunk_tiles
                if tile_end > k_tiles:
                    tile_end = k_tiles
                a_next, _ = self.stream.bounds(share, here - 1)
                tile_next = a_next * c.chunk_tiles
                if here == low:
                    tile_next = tile
                while tile < tile_end:
                    # ---- a slice: at most 16 tiles with their exceptions
                    slice_tile = tile % layout.SLICE_TILES
                    stop = tile - slice_tile + layout.SLICE_TILES
                    if stop > tile_end:
                        stop = tile_end
                    any_dense = self.start_slice(
                        info, next_info, exceptions, heads, queue, dense_rows, dense, dense0, queues, slice_tile, lane
                    )
                    for r in cutlass.range_constexpr(blocks):
                        next_info[0, r] = after_info[0, r]
                        next_info[1, r] = after_info[1, r]
                    self.load_exceptions(exceptions, next_info, record0, records, lane)
                    visit_item, visit = self.next_visit(share, visit_item, visit)
                    self.load_info(after_info, slices, origin, visit_item, visit, low, k_tiles)
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
                                    )  # fmt: skip
                        else:
                            for t in cutlass.range_constexpr(c.chunk_tiles):
                                if tile + t < tile_end:
                                    self.tile_step(
                                        acc, xs, rows, heads, queue, base_pairs, dense_rows, any_dense,
                                        at + t * sc.tile_bytes, tile + t, tile_end, tile_next, lane, True,
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
                    self.epilogue.finish_team(acc, partial, targets, team, member, lane, row, expert, count, alpha)
                else:
                    self.epilogue.finish_run(
                        acc, targets, lane, row, expert, count, alpha, partials, flags, worker, workers,
                        here, a, b, chunks, items,
                    )  # fmt: skip
            item = low - 1

    @cute.jit
    def share_out(
        self, items: Int32, chunks: Int32, grid: Int32, bid: Int32, warp: Int32, member: Int32, team: Int32
    ):
        """Workers in all, our number, and our share (see `Stream`); an empty share has last < first."""
        c = self.c
        if cutlass.const_expr(c.split == 1):
            # Neighbours in the sequence are neighbours on an SM: they use the same tokens. A warp only
            # ever waits for lower numbers, that is for CTAs that started before its own.
            total = Int64(items) * Int64(chunks)
            workers = Int64(grid * WARPS)
            if total < workers * LEAST_CHUNKS:
                workers = (total + (LEAST_CHUNKS - 1)) // LEAST_CHUNKS
            active = Int32((workers + Int64(grid - 1)) // Int64(grid))
            worker = bid * active + warp
            if warp >= active:
                worker = Int32(workers)
            first = Int32(0)
            last = Int32(-1)
            a_first = Int32(0)
            b_last = chunks
            if Int64(worker) < workers:
                begin = Int64(worker) * total // workers
                end = Int64(worker + 1) * total // workers
                first = Int32(begin // Int64(chunks))
                last = Int32((end - 1) // Int64(chunks))
                a_first = Int32(begin - Int64(first) * Int64(chunks))
                b_last = Int32(end - Int64(last) * Int64(chunks))
            share = (first, last, a_first, Int32(0), b_last, chunks)
            return Int32(workers), worker, share
        teams = grid * (WARPS // c.split)
        mine = team * grid + bid
        first = mine
        last = mine
        if items > teams:
            first = Int32(Int64(mine) * Int64(items) // Int64(teams))
            last = Int32(Int64(mine + 1) * Int64(items) // Int64(teams)) - 1
        if first >= items:
            last = first - 1
        part = (chunks + (c.split - 1)) // c.split
        a = member * part
        b = a + part
        if a > chunks:
            a = chunks
        if b > chunks:
            b = chunks
        return teams, mine, (first, last, a, a, b, b)

    # ---- tokens ----------------------------------------------------------------------------------

    @cute.jit
    def token_rows(
        self, rows: cute.Tensor, x: Int64, x_stride: Int32, pairs: Int64, first: Int32, count: Int32,
        topk: Int32, lane: Int32, tile: Int32,
    ):  # fmt: skip
        """Byte addresses of this lane's 16 columns of each of its tokens, at the first tile."""
        for j in cutlass.range_constexpr(self.c.n_tiles):
            n = j * 8 + lane // 4
            # Columns beyond the work tile repeat its first token; what they give is never stored.
            if n >= count:
                n = Int32(0)
            row = first + n
            if cutlass.const_expr(self.c.gated):
                row = Int32(ptx.ldg32(pairs + Int64(row) * 4)) // topk
            rows[j] = x + Int64(row) * (Int64(x_stride) * 2) + Int64(tile * 128 + lane % 4 * 32)

    @cute.jit
    def load_tokens(self, xs: cute.Tensor, half: cutlass.Constexpr, rows: cute.Tensor):
        """Eight of the lane's 16 columns: the B fragments of two steps."""
        for j in cutlass.range_constexpr(self.c.n_tiles):
            words = ptx.ldg128(rows[j] + half * 16)
            for i in cutlass.range_constexpr(4):
                xs[half * 4 + i, j] = words[i]

    # ---- what comes with a slice beside weights and tokens ---------------------------------------

    @cute.jit
    def next_visit(self, share: tuple, item: Int32, visit: Int32):
        """The slice that a warp comes to after this one."""
        _, end = self.stream.bounds(share, item)
        visit += 1
        if visit * layout.SLICE_TILES >= end * self.c.chunk_tiles:
            item -= 1
            begin, _ = self.stream.bounds(share, item)
            visit = begin * self.c.chunk_tiles // layout.SLICE_TILES
        return item, visit

    @cute.jit
    def load_info(
        self, info: cute.Tensor, slices: Int64, origin: Int32, item: Int32, visit: Int32, low: Int32, k_tiles: Int32
    ):
        """The two words of a slice of each row block; zeros below the work tile's last item of ours."""
        count = (k_tiles + (layout.SLICE_TILES - 1)) // layout.SLICE_TILES
        for r in cutlass.range_constexpr(self.c.blocks):
            info[0, r] = Uint32(0)
            info[1, r] = Uint32(0)
            if item >= low and visit < count:
                index = (origin + item * self.c.blocks + r) * count + visit
                info[0, r], info[1, r] = ptx.ldg64(slices + Int64(index) * 8)

    @cute.jit
    def load_exceptions(
        self, found: cute.Tensor, info: cute.Tensor, record0: Uint32, records: Int64, lane: Int32
    ):
        """The lane's first exception of the slice, and two of the further ones, whoever they belong to."""
        for r in cutlass.range_constexpr(self.c.blocks):
            mask = info[0, r]
            word = info[1, r]
            if mask != 0:
                begin = record0 + (word & Uint32(0xFFFFFF))
                below = mask & ((Uint32(1) << Uint32(lane)) - Uint32(1))
                # Lanes without one read a neighbour's, within the slice's words.
                place = cute.arch.popc(below)
                if (mask >> Uint32(lane)) & Uint32(1) != 0:
                    found[0, r] = ptx.ldg16(records + Int64(begin + place) * 2)
                further = Int32(word >> Uint32(24))
                if further > 0:
                    firsts = cute.arch.popc(mask)
                    at = records + Int64(begin + firsts + (firsts & Uint32(1))) * 2 + Int64(lane * 4)
                    if lane < further:
                        found[1, r] = ptx.ldg32(at)
                    if lane + 32 < further:
                        found[2, r] = ptx.ldg32(at + 128)

    @cute.jit
    def load_bases(self, words: cute.Tensor, bases: Int64, origin: Int32, item: Int32, low: Int32, lane: Int32):
        """The bases of the four rows of this lane in each row block, one byte each."""
        if cutlass.const_expr(not self.c.native):
            if item >= low:
                for r in cutlass.range_constexpr(self.c.blocks):
                    block = origin + item * self.c.blocks + r
                    words[r] = ptx.ldg32(bases + Int64(block) * 32 + Int64(lane // 4 * 4))

    @cute.jit
    def start_slice(
        self, info: cute.Tensor, next_info: cute.Tensor, exceptions: cute.Tensor, heads: cute.Tensor,
        queue: cute.Tensor, dense_rows: cute.Tensor, dense: Int64, dense0: Uint32, queues: Int32,
        slice_tile: Int32, lane: Int32,
    ):  # fmt: skip
        """Queues the slice's exceptions; returns a bit for each row block that is dense here."""
        any_dense = Int32(0)
        for r in cutlass.range_constexpr(self.c.blocks):
            mask = next_info[0, r]
            word = next_info[1, r]
            further = Int32(word >> Uint32(24))
            if Int32(word) < 0:
                any_dense = any_dense | (1 << r)
                row = Int64(dense0) + Int64(word & Uint32(0x7FFFFFFF))
                dense_rows[r] = dense + row * layout.CODE_BYTES
                further = Int32(0)
            heads[r], queue[0, r], queue[1, r] = self.dequant.queue_exceptions(
                mask, further, exceptions[0, r], exceptions[1, r], exceptions[2, r],
                queues + r * (32 * QUEUE_BYTES), lane,
            )  # fmt: skip
            if slice_tile > 0:
                heads[r], queue[0, r] = self.dequant.skip(
                    heads[r], queue[0, r], queue[1, r], Uint32(slice_tile) << Uint32(26)
                )
        return any_dense

    # ---- the product -----------------------------------------------------------------------------

    @cute.jit
    def tile_step(
        self, acc: cute.Tensor, xs: cute.Tensor, rows: cute.Tensor, heads: cute.Tensor, queue: cute.Tensor,
        base_pairs: cute.Tensor, dense_rows: cute.Tensor, any_dense: Int32, address: Int32, tile: Int32,
        tile_end: Int32, tile_next: Int32, lane: Int32, dense: cutlass.Constexpr,
    ):  # fmt: skip
        """acc += the item's tiles at one place along K times the tokens there.

        On entry the first half of the tokens' columns is in `xs` or on its way; asked for here are the
        second half, and the first half of the tile that comes next, be it the next item's.
        """
        c = self.c
        block_stride = cutlass.const_expr(c.chunk_tiles * c.stream.tile_bytes)
        self.load_tokens(xs, 1, rows)
        step = Int32(128)
        if tile + 1 == tile_end:
            step = (tile_next - tile) * 128
        for j in cutlass.range_constexpr(c.n_tiles):
            rows[j] = rows[j] + Int64(step)
        sv = cute.make_rmem_tensor((2, c.blocks), Uint32)
        place = tile % layout.SLICE_TILES
        bound = Uint32(place + 1) << Uint32(26)
        for r in cutlass.range_constexpr(c.blocks):
            at = address + r * block_stride
            sv[0, r], sv[1, r] = self.dequant.scales(at, base_pairs[0, r], base_pairs[1, r], lane)
            if cutlass.const_expr(dense):
                if (any_dense & (1 << r)) != 0:
                    sv[0, r], sv[1, r] = self.dequant.dense_scales(at, lane, dense_rows[r], place)
        for r in cutlass.range_constexpr(c.blocks):
            sv[0, r], sv[1, r], heads[r], queue[0, r] = self.dequant.patch(
                sv[0, r], sv[1, r], heads[r], queue[0, r], queue[1, r], bound
            )
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(c.blocks):
                for m in cutlass.range_constexpr(2):
                    words = ptx.lds64(address + r * block_stride + m * 512 + half * 8 + lane * 16)
                    self.multiply(acc, xs, (r * 2 + m) * c.n_tiles, half, words, sv[m, r])
            if cutlass.const_expr(half == 0):
                self.load_tokens(xs, 0, rows)

    @cute.jit
    def multiply(
        self, acc: cute.Tensor, xs: cute.Tensor, unit: cutlass.Constexpr, half: cutlass.Constexpr,
        words: tuple, scale: Uint32,
    ):  # fmt: skip
        """Two steps (16 columns each) of one fragment against all tokens."""
        for s in cutlass.range_constexpr(2):
            a = self.dequant.fragment(words[s], scale)
            for j in cutlass.range_constexpr(self.c.n_tiles):
                u = unit + j
                before = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                k = half * 4 + s * 2
                after = ptx.mma_m16n8k16(before, a, (xs[k, j], xs[k + 1, j]))
                for i in cutlass.range_constexpr(4):
                    acc[i, u] = after[i]
