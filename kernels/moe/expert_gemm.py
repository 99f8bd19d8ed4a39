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
from .dequant import QUEUE_BYTES, Dequant

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
    def tile_bytes(self) -> int:
        return layout.WEIGHT_BYTES + layout.CODE_BYTES * (2 if self.native else 1)

    @property
    def units(self) -> int:
        """16 x 8 accumulator fragments of a warp."""
        return 2 * self.blocks * self.n_tiles

    @property
    def slot_bytes(self) -> int:
        return self.blocks * self.chunk_tiles * self.tile_bytes

    @property
    def partial_bytes(self) -> int:
        """Shared memory for the partial sums of one warp."""
        return self.units * 32 * 16 if self.split > 1 else 0

    @property
    def queue_bytes(self) -> int:
        """Shared memory for one warp's exceptions of an item."""
        return self.blocks * 32 * QUEUE_BYTES

    @property
    def shared_bytes(self) -> int:
        return WARPS * (self.stages * (self.slot_bytes + 8) + self.partial_bytes + self.queue_bytes)


class ExpertGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: GemmConfig):
        self.c = config
        self.dequant = Dequant(config.native, config.bf16_fma)

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
        split = cutlass.const_expr(c.split)
        blocks = cutlass.const_expr(c.blocks)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        member = warp % split
        team = warp // split

        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, c.shared_bytes // 4, byte_alignment=128)
        shared_base = Int32(shared.toint())
        ring = shared_base + warp * (c.stages * c.slot_bytes)
        bars = shared_base + WARPS * c.stages * c.slot_bytes + warp * (c.stages * 8)
        partial = shared_base + WARPS * c.stages * (c.slot_bytes + 8) + team * (split * c.partial_bytes)
        queues = shared_base + c.shared_bytes - (warp + 1) * c.queue_bytes
        if cutlass.const_expr(c.bulk):
            if lane == 0:
                for s in cutlass.range_constexpr(c.stages):
                    ptx.mbarrier_init(bars + s * 8, 1)
                ptx.mbarrier_init_fence()
            cute.arch.sync_warp()
            # GEMM1 waits for the routing. GEMM2 starts when every CTA of GEMM1 has seen it, so it may
            # stream weights before GEMM1 ends.
            if cutlass.const_expr(c.gated):
                ptx.wait_for_predecessor()
            ptx.dependents_may_start()

        # ---- which items are ours
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
        block_bytes = Int64(k_tiles) * c.tile_bytes
        policy = Int64(0)
        if cutlass.const_expr(c.bulk):
            policy = ptx.evict_first_policy()

        # ---- fill the ring
        f_left = last - first
        if chunks == 0:
            f_left = Int32(0)
        f_chunk = Int32(0)
        f_entry = first // tile_items
        f_address = Int64(0)
        f_within = Int32(0)
        if f_left > 0:
            index = first - f_entry * tile_items
            f_within = tile_items - index
            f_address = self.stream_start(tiles, entries, f_entry, row_blocks, index, block_bytes, tile0)
        for s in cutlass.range_constexpr(c.stages):
            f_left, f_chunk, f_entry, f_within, f_address = self.fill(
                f_left, f_chunk, f_entry, f_within, f_address, ring + s * c.slot_bytes, bars + s * 8, lane,
                tiles, entries, row_blocks, tile_items, block_bytes, tile0, tile_count, chunks, policy,
            )  # fmt: skip

        acc = cute.make_rmem_tensor((4, c.units), Float32)
        xs = cute.make_rmem_tensor((8, c.n_tiles, 2), Uint32)
        rows = cute.make_rmem_tensor(c.n_tiles, Int64)
        now = cute.make_rmem_tensor(blocks, Uint32)  # slice entries of this item and of the next one
        following = cute.make_rmem_tensor(blocks, Uint32)
        raw = cute.make_rmem_tensor((2, blocks), Uint32)
        records = cute.make_rmem_tensor(blocks, Uint32)
        queue = cute.make_rmem_tensor(blocks, Int32)
        base_words = cute.make_rmem_tensor(blocks, Uint32)
        base_pairs = cute.make_rmem_tensor((2, blocks), Uint32)
        dense_rows = cute.make_rmem_tensor(blocks, Int64)
        weights = cute.make_rmem_tensor((2, c.n_tiles), Float32)
        targets = cute.make_rmem_tensor((2, c.n_tiles), Int64)
        alphas = cute.make_rmem_tensor(2, Float32)
        dense_rows.fill(Int64(0))
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
            top = expert * row_blocks
            slice_at = slices + (Int64(top) * split + Int64(member)) * 4
            base_at = bases + Int64(top) * 32 + Int64(lane // 4 * 4)
            start_words = ptx.ldg128(starts + Int64(expert) * 16)
            position_at = positions + Int64(start_words[0]) * 2
            value_at = values + Int64(start_words[0])
            dense_at = dense + Int64(start_words[2]) * layout.CODE_BYTES
            for b in cutlass.range_constexpr(blocks):
                now[b] = ptx.ldg32(slice_at + Int64((index * blocks + b) * split) * 4)
                following[b] = self.next_entry(slice_at, index + 1, end, b)
                base_words[b] = self.bases_of(base_at, index, end, b)
            for b in cutlass.range_constexpr(blocks):
                self.load_records(raw, b, now[b], position_at, value_at, lane)
            if cutlass.const_expr(c.bulk and not c.gated):
                ptx.wait_for_predecessor()
            self.token_rows(rows, x, x_stride, pairs, Int32(e_first), count, topk, lane, tile0)
            self.load_tokens(xs, 0, rows)
            self.targets_of(
                alphas, weights, targets, alpha, expert, pairs, router, out, out_stride, Int32(e_first), count, lane
            )

            for i in cutlass.range(index, end, unroll=1):
                any_dense = Int32(0)
                for b in cutlass.range_constexpr(blocks):
                    word = now[b]
                    if Int32(word) < 0:
                        any_dense = any_dense | (1 << b)
                        dense_rows[b] = dense_at + Int64(word & Uint32(0x7FFFFFFF)) * layout.CODE_BYTES
                        word = Uint32(0)
                    records[b], queue[b] = self.dequant.queue_records(
                        (raw[0, b], raw[1, b]), Int32(word >> Uint32(24)), queues + b * (32 * QUEUE_BYTES), lane
                    )
                    base_pairs[0, b], base_pairs[1, b] = self.dequant.base_pairs(base_words[b])
                    self.load_records(raw, b, following[b], position_at, value_at, lane)
                    now[b] = following[b]
                    following[b] = self.next_entry(slice_at, i + 2, end, b)
                    base_words[b] = self.bases_of(base_at, i + 1, end, b)
                acc.fill(0.0)

                tile = Int32(0)
                for chunk in cutlass.range(chunks, unroll=1):
                    here = ring + slot * c.slot_bytes
                    bar = bars + slot * 8
                    if cutlass.const_expr(c.bulk):
                        ptx.mbarrier_wait(bar, phase)
                    else:
                        ptx.cp_async_wait(c.stages - 1)
                        cute.arch.sync_warp()
                    if any_dense == 0:
                        for t in cutlass.range_constexpr(c.chunk_tiles):
                            if tile + t < tile_count:
                                self.next_tokens(xs, (t + 1) % 2, rows, tile + t, tile_count)
                                for b in cutlass.range_constexpr(blocks):
                                    address = here + (b * c.chunk_tiles + t) * c.tile_bytes
                                    sv0, sv1 = self.dequant.scales(address, base_pairs[0, b], base_pairs[1, b], lane)
                                    sv0, sv1, records[b], queue[b] = self.dequant.patch(
                                        sv0, sv1, records[b], queue[b],
                                        queues + b * (32 * QUEUE_BYTES) + (lane + 1) * QUEUE_BYTES, tile + t,
                                    )  # fmt: skip
                                    self.multiply(acc, xs, t % 2, b, address, sv0, sv1, lane)
                    else:
                        self.dense_chunk(
                            acc, xs, rows, records, queue, base_pairs, dense_rows, any_dense,
                            here, queues, tile, tile_count, lane,
                        )  # fmt: skip
                    tile += c.chunk_tiles
                    cute.arch.sync_warp()
                    f_left, f_chunk, f_entry, f_within, f_address = self.fill(
                        f_left, f_chunk, f_entry, f_within, f_address, here, bar, lane,
                        tiles, entries, row_blocks, tile_items, block_bytes, tile0, tile_count, chunks, policy,
                    )  # fmt: skip
                    slot += 1
                    if slot == c.stages:
                        slot = Int32(0)
                        phase = phase ^ 1
                if tile_count % 2 == 1:
                    for j in cutlass.range_constexpr(c.n_tiles):
                        for w in cutlass.range_constexpr(8):
                            xs[w, j, 0] = xs[w, j, 1]
                self.finish_item(acc, partial, team, member, lane, i, count, alphas, weights, targets)

    @cute.jit
    def dense_chunk(
        self, acc: cute.Tensor, xs: cute.Tensor, rows: cute.Tensor, records: cute.Tensor, queue: cute.Tensor,
        base_pairs: cute.Tensor, dense_rows: cute.Tensor, any_dense: Int32, here: Int32, queues: Int32,
        tile: Int32, tile_count: Int32, lane: Int32,
    ):  # fmt: skip
        """The chunk of an item with a dense slice; out of the way of the usual loop, and compact."""
        c = self.c
        sv = cute.make_rmem_tensor(2, Uint32)
        for t in cutlass.range_constexpr(c.chunk_tiles):
            if tile + t < tile_count:
                self.next_tokens(xs, (t + 1) % 2, rows, tile + t, tile_count)
                for b in cutlass.range_constexpr(c.blocks):
                    address = here + (b * c.chunk_tiles + t) * c.tile_bytes
                    if (any_dense & (1 << b)) != 0:
                        sv[0], sv[1] = self.dequant.dense_scales(address, lane, dense_rows[b], tile + t)
                    else:
                        sv0, sv1 = self.dequant.scales(address, base_pairs[0, b], base_pairs[1, b], lane)
                        sv[0], sv[1], records[b], queue[b] = self.dequant.patch(
                            sv0, sv1, records[b], queue[b],
                            queues + b * (32 * QUEUE_BYTES) + (lane + 1) * QUEUE_BYTES, tile + t,
                        )  # fmt: skip
                    self.multiply(acc, xs, t % 2, b, address, sv[0], sv[1], lane)

    @cute.jit
    def next_tokens(
        self, xs: cute.Tensor, buffer: cutlass.Constexpr, rows: cute.Tensor, tile: Int32, tile_count: Int32
    ):
        """Requests the tokens of the next tile; after the last, those of the first: the next item's."""
        step = Int64(128)
        if tile + 1 == tile_count:
            step = Int64(128 - 128 * tile_count)
        for j in cutlass.range_constexpr(self.c.n_tiles):
            rows[j] = rows[j] + step
        self.load_tokens(xs, buffer, rows)

    @cute.jit
    def own_items(self, items: Int32, worker: Int32, grid: Int32):
        """The consecutive items [first, last) of one team; few items go to as many CTAs as possible."""
        workers = grid * cutlass.const_expr(WARPS // self.c.split)
        first = worker
        last = worker + 1
        if items > workers:
            first = Int32((Int64(worker) * Int64(items)) // Int64(workers))
            last = Int32((Int64(worker + 1) * Int64(items)) // Int64(workers))
        if last > items:
            last = items
        return first, last

    # ---- the stream of weights -------------------------------------------------------------------

    @cute.jit
    def stream_start(
        self, tiles: Int64, entries: Int64, entry: Int32, row_blocks: Int32, index: Int32, block_bytes: Int64,
        tile0: Int32,
    ):  # fmt: skip
        """Address of this warp's first tile in item `index` of a work tile."""
        expert = Int32(ptx.ldg32(entries + 16 + Int64(entry) * 16))
        block = Int64(expert) * Int64(row_blocks) + Int64(index * self.c.blocks)
        return tiles + block * block_bytes + Int64(tile0 * self.c.tile_bytes)

    @cute.jit
    def fill(
        self, left: Int32, chunk: Int32, entry: Int32, within: Int32, address: Int64, slot: Int32, bar: Int32,
        lane: Int32, tiles: Int64, entries: Int64, row_blocks: Int32, tile_items: Int32, block_bytes: Int64,
        tile0: Int32, tile_count: Int32, chunks: Int32, policy: Int64,
    ):  # fmt: skip
        """Requests the next chunk of this warp's stream into `slot`; returns the stream's new position.

        The position: items left, chunk of the item, work tile and the items left in it, address.
        """
        c = self.c
        if left > 0:
            if within == 0:
                entry += 1
                within = tile_items
                address = self.stream_start(tiles, entries, entry, row_blocks, Int32(0), block_bytes, tile0)
            size = (tile_count - chunk * c.chunk_tiles) * c.tile_bytes
            if size > c.chunk_tiles * c.tile_bytes:
                size = Int32(c.chunk_tiles * c.tile_bytes)
            self.copy_chunk(slot, address, size, block_bytes, bar, lane, policy)
            address += Int64(size)
            chunk += 1
            if chunk == chunks:
                chunk = Int32(0)
                left -= 1
                within -= 1
                address += c.blocks * block_bytes - Int64(tile_count * c.tile_bytes)
        if cutlass.const_expr(not c.bulk):
            ptx.cp_async_commit()
        return left, chunk, entry, within, address

    @cute.jit
    def copy_chunk(
        self, slot: Int32, address: Int64, size: Int32, block_bytes: Int64, bar: Int32, lane: Int32, policy: Int64
    ):
        c = self.c
        if cutlass.const_expr(c.bulk):
            if lane == 0:
                ptx.mbarrier_expect(bar, size * c.blocks)
                for b in cutlass.range_constexpr(c.blocks):
                    target = slot + b * c.chunk_tiles * c.tile_bytes
                    ptx.bulk_load(target, address + b * block_bytes, size, bar, policy)
        else:
            for b in cutlass.range_constexpr(c.blocks):
                target = slot + b * c.chunk_tiles * c.tile_bytes
                source = address + b * block_bytes
                for offset in cutlass.range(lane * 16, size, 32 * 16):
                    ptx.cp_async16(target + offset, source + Int64(offset))

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
    def load_tokens(self, xs: cute.Tensor, buffer: cutlass.Constexpr, rows: cute.Tensor):
        for j in cutlass.range_constexpr(self.c.n_tiles):
            low = ptx.ldg128(rows[j])
            high = ptx.ldg128(rows[j] + 16)
            for i in cutlass.range_constexpr(4):
                xs[i, j, buffer] = low[i]
                xs[4 + i, j, buffer] = high[i]

    # ---- what an item needs beside weights and tokens --------------------------------------------

    @cute.jit
    def next_entry(self, slice_at: Int64, item: Int32, end: Int32, block: cutlass.Constexpr):
        """The slice entry of one row block of an item, 0 beyond the end."""
        found = Uint32(0)
        if item < end:
            found = ptx.ldg32(slice_at + Int64((item * self.c.blocks + block) * self.c.split) * 4)
        return found

    @cute.jit
    def bases_of(self, base_at: Int64, item: Int32, end: Int32, block: cutlass.Constexpr):
        """The bases of the four rows of this lane in one row block, one byte each."""
        found = Uint32(0)
        if cutlass.const_expr(not self.c.native):
            if item < end:
                found = ptx.ldg32(base_at + Int64(item * self.c.blocks + block) * 32)
        return found

    @cute.jit
    def load_records(
        self, raw: cute.Tensor, block: cutlass.Constexpr, entry: Uint32, position_at: Int64, value_at: Int64,
        lane: Int32,
    ):  # fmt: skip
        """Spreads a slice's exceptions over the lanes: position | byte << 16, or all ones."""
        count = Int32(entry >> Uint32(24))
        first = Int64(entry & Uint32(0xFFFFFF))
        for r in cutlass.range_constexpr(2):
            found = Uint32(0xFFFFFFFF)
            index = lane + 32 * r
            if Int32(entry) >= 0 and index < count:
                at = first + Int64(index)
                found = ptx.ldg16(position_at + at * 2) | (ptx.ldg8(value_at + at) << Uint32(16))
            raw[r, block] = found

    # ---- the product -----------------------------------------------------------------------------

    @cute.jit
    def multiply(
        self, acc: cute.Tensor, xs: cute.Tensor, buffer: cutlass.Constexpr, block: cutlass.Constexpr,
        address: Int32, sv0: Uint32, sv1: Uint32, lane: Int32,
    ):  # fmt: skip
        """acc += tile @ tokens: 2 fragments x 4 steps of 16 columns."""
        c = self.c
        for m in cutlass.range_constexpr(2):
            q = ptx.lds128(address + (m * 512) + lane * 16)
            sv = sv0 if cutlass.const_expr(m == 0) else sv1
            for s in cutlass.range_constexpr(4):
                a = self.dequant.fragment(q[s], sv)
                for j in cutlass.range_constexpr(c.n_tiles):
                    u = (block * 2 + m) * c.n_tiles + j
                    before = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                    after = ptx.mma_m16n8k16(before, a, (xs[2 * s, j, buffer], xs[2 * s + 1, j, buffer]))
                    for i in cutlass.range_constexpr(4):
                        acc[i, u] = after[i]

    # ---- the end of an item ----------------------------------------------------------------------

    @cute.jit
    def targets_of(
        self, alphas: cute.Tensor, weights: cute.Tensor, targets: cute.Tensor, alpha: Int64, expert: Int32,
        pairs: Int64, router: Int64, out: Int64, out_stride: Int32, first: Int32, count: Int32, lane: Int32,
    ):  # fmt: skip
        """Scale factors and output rows of the two tokens of each fragment that this lane stores."""
        c = self.c
        if cutlass.const_expr(c.gated):
            alphas[0] = ptx.ldg_f32(alpha + Int64(expert) * 8) * Float32(PRODUCT_FACTOR)
            alphas[1] = ptx.ldg_f32(alpha + Int64(expert) * 8 + 4) * Float32(PRODUCT_FACTOR)
        else:
            alphas[0] = ptx.ldg_f32(alpha + Int64(expert) * 4) * Float32(PRODUCT_FACTOR)
            alphas[1] = alphas[0]
        for j in cutlass.range_constexpr(c.n_tiles):
            for i in cutlass.range_constexpr(2):
                n = j * 8 + lane % 4 * 2 + i
                weights[i, j] = Float32(1.0)
                targets[i, j] = Int64(0)
                if n < count:
                    if cutlass.const_expr(c.gated):
                        targets[i, j] = out + Int64(first + n) * (Int64(out_stride) * 2)
                    else:
                        pair = ptx.ldg32(pairs + Int64(first + n) * 4)
                        weights[i, j] = ptx.ldg_f32(router + Int64(pair) * 4)
                        targets[i, j] = out + Int64(pair) * (Int64(out_stride) * 4)

    @cute.jit
    def finish_item(
        self, acc: cute.Tensor, partial: Int32, team: Int32, member: Int32, lane: Int32, item: Int32,
        count: Int32, alphas: cute.Tensor, weights: cute.Tensor, targets: cute.Tensor,
    ):  # fmt: skip
        """Adds the team's partial sums in the order of the slices and stores the item's outputs."""
        c = self.c
        if cutlass.const_expr(c.split == 1):
            for u in cutlass.range_constexpr(c.units):
                values = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                self.store(u, values, lane, item, count, alphas, weights, targets)
        else:
            threads = cutlass.const_expr(32 * c.split)
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
            for u in cutlass.range_constexpr(c.units):
                mine = partial + (member * c.units + u) * 512 + lane * 16
                ptx.sts_f32x4(mine, acc[0, u], acc[1, u], acc[2, u], acc[3, u])
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
            for u in cutlass.range_constexpr(c.units):
                if member == u % c.split:
                    total = [Float32(0.0) for _ in range(4)]
                    for s in cutlass.range_constexpr(c.split):
                        part = ptx.lds_f32x4(partial + (s * c.units + u) * 512 + lane * 16)
                        total = [a + b for a, b in zip(total, part, strict=True)]
                    self.store(u, tuple(total), lane, item, count, alphas, weights, targets)

    @cute.jit
    def store(
        self, unit: cutlass.Constexpr, values: tuple, lane: Int32, item: Int32, count: Int32,
        alphas: cute.Tensor, weights: cute.Tensor, targets: cute.Tensor,
    ):  # fmt: skip
        """Stores two tokens' values of rows r (the first two) and r + 8 of one fragment."""
        c = self.c
        j = cutlass.const_expr(unit % c.n_tiles)
        fragment = item * (2 * c.blocks) + unit // c.n_tiles
        row = lane // 4
        for i in cutlass.range_constexpr(2):
            if j * 8 + lane % 4 * 2 + i < count:
                low = values[i] * alphas[0]
                high = values[2 + i] * alphas[1]
                if cutlass.const_expr(c.gated):
                    value = self.act(low) * high
                    at = targets[i, j] + Int64(fragment * 8 + row) * 2
                    ptx.stg16(at, ptx.pack_bf16x2(value, value))
                else:
                    at = targets[i, j] + Int64(fragment * 16 + row) * 4
                    ptx.stg_f32(at, low * weights[i, j])
                    ptx.stg_f32(at + 32, high * weights[i, j])

    @cute.jit
    def act(self, v: Float32):
        """SiLU."""
        return v * cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp(-v))
