"""One grouped GEMM of the expert layer for few tokens: weights stream past, tokens stay.

Computes for every work tile (expert, up to 8 * n_tiles tokens) of the routing, with the weights as the
A operand of `mma.sync.m16n8k16` (output channels are M, tokens are N):

    gated:   h[slot, i]  = act(alpha_gate * (W13 x)[i]) * (alpha_up * (W13 x)[I + i])      bf16
    else:    y[pair, o]  = router_weight[pair] * alpha * (W2 h)[o]                          FP32

A work item is `blocks` row blocks (32 rows each) of one work tile. A team of `split` warps shares an
item: each takes one slice of K. A warp owns a ring of shared-memory slots and fills it by itself, with
bulk copies (sm_90 on) or cp.async, so the stream runs on across items and no warp waits for another
until the partial sums of an item are added, in the fixed order of the slices. Everything else that an
item needs is requested one item ahead.

The scale of a row and group is rebuilt in the lane that multiplies by it: base + code in the bf16
pattern's own position (one addition for two rows), exceptions patched by the lane that owns them.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import layout, ptx
from .dequant import Dequant
from .stream import Stream, StreamConfig

WARPS = 8
THREADS = 32 * WARPS
# FP4 bits read as bf16 are the value times 2^-126; with scales times 2^119 the products are 2^-7 too small
PRODUCT_FACTOR = 128.0


@dataclass(frozen=True)
class GemmConfig:
    """What one compiled program of this kernel depends on."""

    gated: bool
    native: bool
    n_tiles: int
    split: int
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
    def teams(self) -> int:
        return WARPS // self.split

    @property
    def units(self) -> int:
        """16 x 8 accumulator fragments of a warp."""
        return 2 * self.blocks * self.n_tiles

    @property
    def partial_bytes(self) -> int:
        """Shared memory for the partial sums of one warp."""
        return self.units * 32 * 16 if self.split > 1 else 0

    @property
    def queue_bytes(self) -> int:
        """Shared memory for one warp's exceptions of an item."""
        return self.blocks * 32 * Dequant(self.native, self.bf16_fma).queue_bytes

    @property
    def target_bytes(self) -> int:
        """Shared memory for where one team's outputs go, of two work tiles."""
        return 2 * 8 * self.n_tiles * 16

    @property
    def shared_bytes(self) -> int:
        per_warp = self.stream.shared_bytes + self.partial_bytes + self.queue_bytes
        return WARPS * per_warp + self.teams * self.target_bytes


class ExpertGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: GemmConfig):
        self.c = config
        self.dequant = Dequant(config.native, config.bf16_fma)
        self.stream = Stream(config.stream)

    @cute.jit
    def launch(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        positions: Int64, values: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64,
        router: Int64, out: Int64, out_stride: Int32, row_blocks: Int32, k_tiles: Int32, topk: Int32,
        ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Enqueues the kernel; all `Int64` are device addresses, see `PreparedMatrix` and `route`."""
        self.kernel(
            x, x_stride, tiles, bases, slices, starts, positions, values, dense, alpha, entries, pairs,
            router, out, out_stride, row_blocks, k_tiles, topk,
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
        positions: Int64, values: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64,
        router: Int64, out: Int64, out_stride: Int32, row_blocks: Int32, k_tiles: Int32, topk: Int32,
    ):  # fmt: skip
        c = self.c
        sc = c.stream
        split = cutlass.const_expr(c.split)
        blocks = cutlass.const_expr(c.blocks)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        member = warp % split
        team = warp // split

        # ---- shared memory: rings, their barriers, partial sums, queues, targets
        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, c.shared_bytes // 4, byte_alignment=128)
        shared_base = Int32(shared.toint())
        ring = shared_base + warp * (c.stages * sc.slot_bytes)
        bars = shared_base + WARPS * c.stages * sc.slot_bytes + warp * (c.stages * 8)
        partial = shared_base + WARPS * sc.shared_bytes + team * (split * c.partial_bytes)
        queues = shared_base + WARPS * (sc.shared_bytes + c.partial_bytes) + warp * c.queue_bytes
        target = shared_base + c.shared_bytes - (team + 1) * c.target_bytes
        self.stream.init_barriers(bars, lane)
        if cutlass.const_expr(c.bulk):
            # GEMM1 waits for the routing. GEMM2 starts when every CTA of GEMM1 has seen it, so it may
            # stream weights before GEMM1 ends.
            if cutlass.const_expr(c.gated):
                ptx.wait_for_predecessor()
            ptx.dependents_may_start()

        # ---- which items are ours, and which slice of them
        tile_items = row_blocks // blocks
        first, last = self.own_items(Int32(ptx.ldg32(entries)) * tile_items, team * grid + bid, grid)
        slice_tiles = (k_tiles + (split - 1)) // split
        tile0 = member * slice_tiles
        tile_count = k_tiles - tile0
        if tile_count > slice_tiles:
            tile_count = slice_tiles
        if tile_count <= 0:
            tile_count = Int32(0)
            tile0 = Int32(0)
        chunks = (tile_count + (c.chunk_tiles - 1)) // c.chunk_tiles

        # ---- fill the ring
        policy = Int64(0)
        if cutlass.const_expr(c.bulk):
            policy = ptx.evict_first_policy()
        full = cutlass.const_expr(c.chunk_tiles * sc.tile_bytes)
        block_bytes = Int64(k_tiles) * sc.tile_bytes
        geometry = (
            tiles, entries, row_blocks, tile_items, block_bytes, tile0, chunks,
            tile_count * sc.tile_bytes - (chunks - 1) * full, blocks * block_bytes - Int64(chunks * full), policy,
        )  # fmt: skip
        todo = Int32(0)
        entry = first // tile_items
        index = first - entry * tile_items
        address = Int64(0)
        if first < last:
            todo = (last - first) * chunks
            address = self.stream.start(geometry, entry, index)
        state = (todo, chunks, entry, tile_items - index, address)
        for s in cutlass.range_constexpr(c.stages):
            state = self.stream.fill(state, geometry, ring + s * sc.slot_bytes, bars + s * 8, lane)

        acc = cute.make_rmem_tensor((4, c.units), Float32)
        xs = cute.make_rmem_tensor((8, c.n_tiles), Uint32)
        rows = cute.make_rmem_tensor(c.n_tiles, Int64)
        entry_words = cute.make_rmem_tensor((blocks, 2), Uint32)  # slice entries of this item and the next
        base_words = cute.make_rmem_tensor(blocks, Uint32)
        record_words = cute.make_rmem_tensor((2, 2, blocks), Uint32)  # positions and bytes, of the next item
        records = cute.make_rmem_tensor(blocks, Uint32)
        queue = cute.make_rmem_tensor(blocks, Int32)
        base_pairs = cute.make_rmem_tensor((2, blocks), Uint32)
        dense_rows = cute.make_rmem_tensor(blocks, Int64)
        dense_rows.fill(Int64(0))
        record_words.fill(Uint32(0))
        slot = Int32(0)
        phase = Int32(0)
        item = first
        while item < last:
            # ---- a work tile: one expert, its tokens, the row blocks that are ours
            entry = item // tile_items
            index = item - entry * tile_items
            end = last - item + index
            if end > tile_items:
                end = tile_items
            item += end - index
            e_expert, e_first, e_count, _ = ptx.ldg128(entries + 16 + Int64(entry) * 16)
            expert = Int32(e_expert)
            count = Int32(e_count)
            block0 = expert * row_blocks
            slices_at = slices + Int64(block0 * split + member) * 4
            bases_at = bases + Int64(block0) * 32 + Int64(lane // 4 * 4)
            start_words = ptx.ldg128(starts + Int64(expert) * 16)
            record0 = start_words[0]
            dense0 = start_words[2]
            for b in cutlass.range_constexpr(blocks):
                entry_words[b, 0] = self.slice_entry(slices_at, index, end, b)
                entry_words[b, 1] = self.slice_entry(slices_at, index + 1, end, b)
                base_words[b] = self.bases_of(bases_at, index, end, b)
            for b in cutlass.range_constexpr(blocks):
                self.load_records(record_words, b, entry_words[b, 0], record0, positions, values, lane)
            if cutlass.const_expr(c.bulk and not c.gated):
                ptx.wait_for_predecessor()
            self.token_rows(rows, x, x_stride, pairs, Int32(e_first), count, topk, lane, tile0)
            self.load_tokens(xs, 0, rows)
            targets = target + (entry & 1) * (8 * c.n_tiles * 16)
            if member == 0:
                self.write_targets(targets, pairs, router, out, out_stride, Int32(e_first), count, lane)

            for i in cutlass.range(index, end, unroll=1):
                any_dense = Int32(0)
                for b in cutlass.range_constexpr(blocks):
                    word = entry_words[b, 0]
                    if Int32(word) < 0:
                        any_dense = any_dense | (1 << b)
                        row = Int64(dense0) + Int64(word & Uint32(0x7FFFFFFF))
                        dense_rows[b] = dense + row * layout.CODE_BYTES
                        word = Uint32(0)
                    records[b], queue[b] = self.dequant.queue_records(
                        record_words, b, Int32(word >> Uint32(24)), queues + b * (32 * self.dequant.queue_bytes), lane
                    )
                    base_pairs[0, b], base_pairs[1, b] = self.dequant.base_pairs(base_words[b])
                    self.load_records(record_words, b, entry_words[b, 1], record0, positions, values, lane)
                    entry_words[b, 0] = entry_words[b, 1]
                    entry_words[b, 1] = self.slice_entry(slices_at, i + 2, end, b)
                    base_words[b] = self.bases_of(bases_at, i + 1, end, b)
                acc.fill(0.0)

                tile = Int32(0)
                for _ in cutlass.range(chunks, unroll=1):
                    here = ring + slot * sc.slot_bytes
                    bar = bars + slot * 8
                    self.stream.wait(bar, phase)
                    if any_dense == 0:
                        for t in cutlass.range_constexpr(c.chunk_tiles):
                            if tile + t < tile_count:
                                self.tile_step(
                                    acc, xs, rows, records, queue, base_pairs, dense_rows, 0,
                                    here + t * sc.tile_bytes, queues, tile + t, tile_count, lane, False,
                                )  # fmt: skip
                    else:
                        for t in cutlass.range_constexpr(c.chunk_tiles):
                            if tile + t < tile_count:
                                self.tile_step(
                                    acc, xs, rows, records, queue, base_pairs, dense_rows, any_dense,
                                    here + t * sc.tile_bytes, queues, tile + t, tile_count, lane, True,
                                )  # fmt: skip
                    tile += c.chunk_tiles
                    cute.arch.sync_warp()
                    state = self.stream.fill(state, geometry, here, bar, lane)
                    slot += 1
                    if slot == c.stages:
                        slot = Int32(0)
                        phase = phase ^ 1
                self.finish_item(acc, partial, targets, team, member, lane, i, expert, count, alpha)

    @cute.jit
    def own_items(self, items: Int32, worker: Int32, grid: Int32):
        """The consecutive items [first, last) of one team; few items go to as many CTAs as possible."""
        workers = grid * cutlass.const_expr(self.c.teams)
        first = worker
        last = worker + 1
        if items > workers:
            first = Int32((Int64(worker) * Int64(items)) // Int64(workers))
            last = Int32((Int64(worker + 1) * Int64(items)) // Int64(workers))
        if last > items:
            last = items
        return first, last

    # ---- tokens ----------------------------------------------------------------------------------

    @cute.jit
    def token_rows(
        self, rows: cute.Tensor, x: Int64, x_stride: Int32, pairs: Int64, first: Int32, count: Int32,
        topk: Int32, lane: Int32, tile0: Int32,
    ):  # fmt: skip
        """Byte addresses of this lane's 16 columns of each of its tokens, at the slice's first tile."""
        for j in cutlass.range_constexpr(self.c.n_tiles):
            n = j * 8 + lane // 4
            # Columns beyond the work tile repeat its first token; what they give is never stored.
            if n >= count:
                n = Int32(0)
            row = first + n
            if cutlass.const_expr(self.c.gated):
                row = Int32(ptx.ldg32(pairs + Int64(row) * 4)) // topk
            rows[j] = x + Int64(row) * (Int64(x_stride) * 2) + Int64(tile0 * 128 + lane % 4 * 32)

    @cute.jit
    def load_tokens(self, xs: cute.Tensor, half: cutlass.Constexpr, rows: cute.Tensor):
        """Eight of the lane's 16 columns: the B fragments of two steps."""
        for j in cutlass.range_constexpr(self.c.n_tiles):
            words = ptx.ldg128(rows[j] + half * 16)
            for i in cutlass.range_constexpr(4):
                xs[half * 4 + i, j] = words[i]

    # ---- what an item needs beside weights and tokens --------------------------------------------

    @cute.jit
    def slice_entry(self, slices_at: Int64, item: Int32, end: Int32, block: cutlass.Constexpr):
        """The slice entry of one row block of an item, 0 beyond the end."""
        found = Uint32(0)
        if item < end:
            found = ptx.ldg32(slices_at + Int64((item * self.c.blocks + block) * self.c.split) * 4)
        return found

    @cute.jit
    def bases_of(self, bases_at: Int64, item: Int32, end: Int32, block: cutlass.Constexpr):
        """The bases of the four rows of this lane in one row block, one byte each."""
        found = Uint32(0)
        if cutlass.const_expr(not self.c.native):
            if item < end:
                found = ptx.ldg32(bases_at + Int64(item * self.c.blocks + block) * 32)
        return found

    @cute.jit
    def load_records(
        self, found: cute.Tensor, block: cutlass.Constexpr, entry: Uint32, record0: Uint32, positions: Int64,
        values: Int64, lane: Int32,
    ):  # fmt: skip
        """Spreads a slice's exception records over the lanes, two a lane at most.

        Position and byte stay apart until they are used, so that nothing waits for the loads here.
        """
        count = Int32(entry >> Uint32(24))
        if Int32(entry) < 0:
            count = Int32(0)
        at = Int64(record0 + (entry & Uint32(0xFFFFFF)) + Uint32(lane))
        if lane < count:
            found[0, 0, block] = ptx.ldg16(positions + at * 2)
            found[1, 0, block] = ptx.ldg8(values + at)
        if count > 32:
            if lane + 32 < count:
                found[0, 1, block] = ptx.ldg16(positions + at * 2 + 64)
                found[1, 1, block] = ptx.ldg8(values + at + 32)

    # ---- the product -----------------------------------------------------------------------------

    @cute.jit
    def tile_step(
        self, acc: cute.Tensor, xs: cute.Tensor, rows: cute.Tensor, records: cute.Tensor, queue: cute.Tensor,
        base_pairs: cute.Tensor, dense_rows: cute.Tensor, any_dense: Int32, address: Int32, queues: Int32,
        tile: Int32, tile_count: Int32, lane: Int32, dense: cutlass.Constexpr,
    ):  # fmt: skip
        """acc += the item's tiles at one place along K times the tokens there.

        On entry the first half of the tokens' columns is in `xs` or on its way; the second half is asked
        for here, and the first half of the next tile (after the last tile: of the first, for the next item).
        """
        c = self.c
        block_stride = cutlass.const_expr(c.chunk_tiles * c.stream.tile_bytes)
        self.load_tokens(xs, 1, rows)
        step = Int64(128)
        if tile + 1 == tile_count:
            step = Int64(128 - 128 * tile_count)
        for j in cutlass.range_constexpr(c.n_tiles):
            rows[j] = rows[j] + step
        sv = cute.make_rmem_tensor((2, c.blocks), Uint32)
        bound = Uint32(tile + 1) << Uint32(26)
        for b in cutlass.range_constexpr(c.blocks):
            at = address + b * block_stride
            sv[0, b], sv[1, b] = self.dequant.scales(at, base_pairs[0, b], base_pairs[1, b], lane)
            if cutlass.const_expr(dense):
                if (any_dense & (1 << b)) != 0:
                    sv[0, b], sv[1, b] = self.dequant.dense_scales(at, lane, dense_rows[b], tile)
        for b in cutlass.range_constexpr(c.blocks):
            end = queues + b * (32 * self.dequant.queue_bytes) + (lane + 1) * self.dequant.queue_bytes
            sv[0, b], sv[1, b], records[b], queue[b] = self.dequant.patch(
                sv[0, b], sv[1, b], records[b], queue[b], end, bound
            )
        for half in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(c.blocks):
                for m in cutlass.range_constexpr(2):
                    words = ptx.lds64(address + b * block_stride + m * 512 + half * 8 + lane * 16)
                    self.multiply(acc, xs, (b * 2 + m) * c.n_tiles, half, words, sv[m, b])
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

    # ---- the end of an item ----------------------------------------------------------------------

    @cute.jit
    def write_targets(
        self, targets: Int32, pairs: Int64, router: Int64, out: Int64, out_stride: Int32, first: Int32,
        count: Int32, lane: Int32,
    ):  # fmt: skip
        """Where each token of the work tile is stored and with which weight, one lane a token."""
        c = self.c
        if lane < count and lane < 8 * c.n_tiles:
            weight = Float32(1.0)
            if cutlass.const_expr(c.gated):
                at = out + Int64(first + lane) * (Int64(out_stride) * 2)
            else:
                pair = Int64(ptx.ldg32(pairs + Int64(first + lane) * 4))
                weight = ptx.ldg_f32(router + pair * 4)
                at = out + pair * (Int64(out_stride) * 4)
            ptx.sts_target(targets + lane * 16, at, weight)
        cute.arch.sync_warp()

    @cute.jit
    def finish_item(
        self, acc: cute.Tensor, partial: Int32, targets: Int32, team: Int32, member: Int32, lane: Int32,
        item: Int32, expert: Int32, count: Int32, alpha: Int64,
    ):  # fmt: skip
        """Adds the team's partial sums in the order of the slices and stores the item's outputs."""
        c = self.c
        if cutlass.const_expr(c.split == 1):
            alphas = self.alphas(alpha, expert)
            for u in cutlass.range_constexpr(c.units):
                values = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                self.store(u, values, targets, lane, item, count, alphas)
        else:
            threads = cutlass.const_expr(32 * c.split)
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
            for u in cutlass.range_constexpr(c.units):
                mine = partial + (member * c.units + u) * 512 + lane * 16
                ptx.sts_f32x4(mine, acc[0, u], acc[1, u], acc[2, u], acc[3, u])
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
            for u in cutlass.range_constexpr(c.units):
                if member == u % c.split:
                    alphas = self.alphas(alpha, expert)
                    total = [Float32(0.0) for _ in range(4)]
                    for s in cutlass.range_constexpr(c.split):
                        part = ptx.lds_f32x4(partial + (s * c.units + u) * 512 + lane * 16)
                        total = [a + b for a, b in zip(total, part, strict=True)]
                    self.store(u, tuple(total), targets, lane, item, count, alphas)

    @cute.jit
    def store(
        self, unit: cutlass.Constexpr, values: tuple, targets: Int32, lane: Int32, item: Int32, count: Int32,
        alphas: tuple,
    ):  # fmt: skip
        """Stores two tokens' values of rows r (the first two) and r + 8 of one fragment."""
        c = self.c
        fragment = item * (2 * c.blocks) + unit // c.n_tiles
        row = lane // 4
        token = cutlass.const_expr(unit % c.n_tiles) * 8 + lane % 4 * 2
        for i in cutlass.range_constexpr(2):
            if token + i < count:
                at, weight = ptx.lds_target(targets + (token + i) * 16)
                low = values[i] * alphas[0]
                high = values[2 + i] * alphas[1]
                if cutlass.const_expr(c.gated):
                    value = self.act(low) * high
                    ptx.stg16(at + Int64(fragment * 8 + row) * 2, ptx.pack_bf16x2(value, value))
                else:
                    at = at + Int64(fragment * 16 + row) * 4
                    ptx.stg_f32(at, low * weight)
                    ptx.stg_f32(at + 32, high * weight)

    @cute.jit
    def alphas(self, alpha: Int64, expert: Int32):
        """Global scales of rows r and r + 8 (gate and up where gated), with the products' power of two."""
        if cutlass.const_expr(self.c.gated):
            first = ptx.ldg_f32(alpha + Int64(expert) * 8) * Float32(PRODUCT_FACTOR)
            second = ptx.ldg_f32(alpha + Int64(expert) * 8 + 4) * Float32(PRODUCT_FACTOR)
        else:
            first = ptx.ldg_f32(alpha + Int64(expert) * 4) * Float32(PRODUCT_FACTOR)
            second = first
        return first, second

    @cute.jit
    def act(self, v: Float32):
        """SiLU."""
        return v * cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp(-v))
