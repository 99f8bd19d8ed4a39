"""One grouped GEMM of the expert layer for few tokens: weights stream past, tokens stay.

Computes for every work tile (expert, up to 8 * n_tiles tokens) of the routing, with the weights as the
A operand of `mma.sync.m16n8k16` (output channels are M, tokens are N):

    gated:   h[slot, i]  = act(alpha_gate * (W13 x)[i]) * (alpha_up * (W13 x)[I + i])      bf16
    else:    y[pair, o]  = router_weight[pair] * alpha * (W2 h)[o]                          FP32

A work item is one row block (32 rows) of one work tile. A team of `split` warps shares an item: each
takes one slice of K. A warp owns a ring of shared-memory slots and fills it by itself, with bulk copies
(sm_90 on) or cp.async, so the stream runs on across items and no warp waits for another until the
partial sums of an item are added, in the fixed order of the slices.

The scale of a row and group is rebuilt in the lane that multiplies by it: base + code in the bf16
pattern's own position (one addition for two rows), exceptions patched by the lane that owns them.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import layout, ptx

WARPS = 8
THREADS = 32 * WARPS
PAIR_MASK = 0x81C081C0
# bf16 exponent bits that turn E4M3 bits, shifted left by 4, into the scale times 2^119 (two halves)
SCALE_BIAS = 0x7780
SCALE_BIAS2 = 0x77807780
# FP4 bits read as bf16 are the value times 2^-126; with the scale at 2^119 products are 2^-7 too small
PRODUCT_FACTOR = 128.0


@dataclass(frozen=True)
class GemmConfig:
    """What one compiled program of this kernel depends on."""

    gated: bool
    native: bool
    n_tiles: int
    split: int
    chunk_tiles: int
    stages: int
    bulk: bool = True
    bf16_fma: bool = False
    activation: str = "silu"

    @property
    def tile_bytes(self) -> int:
        return layout.WEIGHT_BYTES + layout.CODE_BYTES * (2 if self.native else 1)

    @property
    def slot_bytes(self) -> int:
        return self.chunk_tiles * self.tile_bytes

    @property
    def partial_bytes(self) -> int:
        """Shared memory for the partial sums of one warp."""
        return 2 * self.n_tiles * 32 * 16 if self.split > 1 else 0

    @property
    def shared_bytes(self) -> int:
        return WARPS * (self.stages * (self.slot_bytes + 8) + self.partial_bytes)


class ExpertGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: GemmConfig):
        self.c = config

    @cute.jit
    def launch(
        self,
        x: Int64,
        x_stride: Int32,
        tiles: Int64,
        bases: Int64,
        slices: Int64,
        starts: Int64,
        positions: Int64,
        values: Int64,
        dense: Int64,
        alpha: Int64,
        entries: Int64,
        pairs: Int64,
        router: Int64,
        out: Int64,
        out_stride: Int32,
        row_blocks: Int32,
        k_tiles: Int32,
        topk: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Enqueues the kernel; all `Int64` are device addresses, see `PreparedMatrix` and `route`."""
        self.kernel(
            x, x_stride, tiles, bases, slices, starts, positions, values, dense, alpha, entries, pairs,
            router, out, out_stride, row_blocks, k_tiles, topk,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.c.bulk,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_stride: Int32,
        tiles: Int64,
        bases: Int64,
        slices: Int64,
        starts: Int64,
        positions: Int64,
        values: Int64,
        dense: Int64,
        alpha: Int64,
        entries: Int64,
        pairs: Int64,
        router: Int64,
        out: Int64,
        out_stride: Int32,
        row_blocks: Int32,
        k_tiles: Int32,
        topk: Int32,
    ):
        c = self.c
        split = cutlass.const_expr(c.split)
        teams = cutlass.const_expr(WARPS // c.split)
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
        if cutlass.const_expr(c.bulk):
            if lane == 0:
                for s in cutlass.range_constexpr(c.stages):
                    ptx.mbarrier_init(bars + s * 8, 1)
                ptx.mbarrier_init_fence()
            cute.arch.sync_warp()
            # The routing is complete when GEMM1 may start; GEMM2 streams weights before GEMM1 ends.
            if cutlass.const_expr(c.gated):
                ptx.wait_for_predecessor()
            ptx.dependents_may_start()

        # ---- which items are ours
        entry_count = Int32(ptx.ldg32(entries))
        item_count = entry_count * row_blocks
        workers = grid * teams
        worker = team * grid + bid
        first = worker
        last = worker + 1
        if item_count > workers:
            first = Int32((Int64(worker) * Int64(item_count)) // Int64(workers))
            last = Int32((Int64(worker + 1) * Int64(item_count)) // Int64(workers))
        if last > item_count:
            last = item_count
        slice_tiles = (k_tiles + (split - 1)) // split
        tile0 = member * slice_tiles
        tile_count = k_tiles - tile0
        if tile_count > slice_tiles:
            tile_count = slice_tiles
        if tile_count < 0:
            tile_count = Int32(0)
        chunks = (tile_count + (c.chunk_tiles - 1)) // c.chunk_tiles
        policy = Int64(0)
        if cutlass.const_expr(c.bulk):
            policy = ptx.evict_first_policy()

        # ---- fill the ring
        f_item = first
        f_chunk = Int32(0)
        f_address = Int64(0)
        if chunks == 0:
            f_item = last
        for s in cutlass.range_constexpr(c.stages):
            f_item, f_chunk, f_address = self.fill(
                f_item, f_chunk, f_address, last, ring + s * c.slot_bytes, bars + s * 8, lane,
                tiles, entries, row_blocks, k_tiles, tile0, tile_count, chunks, policy,
            )  # fmt: skip

        # ---- what the first items need beside weights
        meta = cute.make_rmem_tensor(4, Uint32)  # entry now, bases now, entry of the next item, expert
        records = cute.make_rmem_tensor(6, Uint32)  # three a lane for this item, three for the next
        for i in cutlass.range_constexpr(6):
            records[i] = Uint32(0xFFFFFFFF)
        for i in cutlass.range_constexpr(4):
            meta[i] = Uint32(0)
        meta[0] = self.slice_entry(first, last, entries, slices, row_blocks, member)
        meta[2] = self.slice_entry(first + 1, last, entries, slices, row_blocks, member)
        self.load_records(records, 0, meta[0], first, last, entries, row_blocks, starts, positions, values, lane)
        meta[1] = self.load_bases(first, last, entries, bases, row_blocks, lane)
        if cutlass.const_expr(c.bulk and not c.gated):
            ptx.wait_for_predecessor()

        acc = cute.make_rmem_tensor((4, 2 * c.n_tiles), Float32)
        xs = cute.make_rmem_tensor((8, c.n_tiles), Uint32)
        xn = cute.make_rmem_tensor((8, c.n_tiles), Uint32)
        rows = cute.make_rmem_tensor(c.n_tiles, Int64)
        slot = Int32(0)
        phase = Int32(0)
        for item in cutlass.range(first, last, unroll=1):
            entry = item // row_blocks
            block = item % row_blocks
            entry_address = entries + 16 + Int64(entry) * 16
            e_expert, e_first, e_count, e_unused = ptx.ldg128(entry_address)
            self.token_rows(rows, x, x_stride, pairs, Int32(e_first), Int32(e_count), topk, lane, tile0)
            self.load_tokens(xs, rows)
            now = meta[0]
            base_word = meta[1]
            following = meta[2]
            self.load_records(
                records, 3, following, item + 1, last, entries, row_blocks, starts, positions, values, lane
            )
            meta[1] = self.load_bases(item + 1, last, entries, bases, row_blocks, lane)
            meta[2] = self.slice_entry(item + 2, last, entries, slices, row_blocks, member)
            is_dense = Int32(now) < 0
            record_count = Int32(0)
            dense_row = Int64(0)
            if is_dense:
                first_slot = Int64(ptx.ldg64(starts + Int64(e_expert) * 16 + 8)[0])
                dense_row = dense + (first_slot + Int64(now & Uint32(0x7FFFFFFF))) * layout.CODE_BYTES
            else:
                record_count = Int32(now >> Uint32(24))
            base0, base1 = self.base_pairs(base_word)
            for i in cutlass.range_constexpr(4):
                for j in cutlass.range_constexpr(2 * c.n_tiles):
                    acc[i, j] = Float32(0.0)

            tile = Int32(0)
            for chunk in cutlass.range(chunks, unroll=1):
                here = ring + slot * c.slot_bytes
                bar = bars + slot * 8
                if cutlass.const_expr(c.bulk):
                    ptx.mbarrier_wait(bar, phase)
                else:
                    ptx.cp_async_wait(c.stages - 1)
                    cute.arch.sync_warp()
                end = tile + c.chunk_tiles
                if end > tile_count:
                    end = tile_count
                address = here
                for t in cutlass.range(tile, end, unroll=1):
                    step = Int64(128)
                    if t + 1 >= tile_count:
                        step = Int64(0)
                    for j in cutlass.range_constexpr(c.n_tiles):
                        rows[j] = rows[j] + step
                    self.load_tokens(xn, rows)
                    sv0, sv1 = self.scales(address, base0, base1, lane, is_dense, dense_row, t)
                    if record_count > 0:
                        for r in cutlass.range_constexpr(3):
                            if record_count > 32 * r:
                                sv0, sv1 = self.patch(sv0, sv1, records[r], t, lane)
                    self.multiply(acc, xs, address, sv0, sv1, lane)
                    for j in cutlass.range_constexpr(c.n_tiles):
                        for i in cutlass.range_constexpr(8):
                            xs[i, j] = xn[i, j]
                    address += c.tile_bytes
                tile = end
                cute.arch.sync_warp()
                f_item, f_chunk, f_address = self.fill(
                    f_item, f_chunk, f_address, last, here, bar, lane,
                    tiles, entries, row_blocks, k_tiles, tile0, tile_count, chunks, policy,
                )  # fmt: skip
                slot += 1
                if slot == c.stages:
                    slot = Int32(0)
                    phase = phase ^ 1

            self.finish_item(
                acc, partial, team, member, lane, block, Int32(e_expert), Int32(e_first), Int32(e_count),
                alpha, pairs, router, out, out_stride, topk,
            )  # fmt: skip
            meta[0] = following
            for i in cutlass.range_constexpr(3):
                records[i] = records[3 + i]

    # ---- the stream of weights -------------------------------------------------------------------

    @cute.jit
    def fill(
        self, item: Int32, chunk: Int32, address: Int64, last: Int32, slot: Int32, bar: Int32, lane: Int32,
        tiles: Int64, entries: Int64, row_blocks: Int32, k_tiles: Int32, tile0: Int32, tile_count: Int32,
        chunks: Int32, policy: Int64,
    ):  # fmt: skip
        """Requests the next chunk of this warp's stream into `slot`; returns the stream's new position."""
        c = self.c
        if item < last:
            if chunk == 0:
                expert = Int32(ptx.ldg32(entries + 16 + Int64(item // row_blocks) * 16))
                row_block = Int64(expert) * Int64(row_blocks) + Int64(item % row_blocks)
                address = tiles + (row_block * Int64(k_tiles) + Int64(tile0)) * c.tile_bytes
            count = tile_count - chunk * c.chunk_tiles
            if count > c.chunk_tiles:
                count = Int32(c.chunk_tiles)
            size = count * c.tile_bytes
            if cutlass.const_expr(c.bulk):
                if lane == 0:
                    ptx.mbarrier_expect(bar, size)
                    ptx.bulk_load(slot, address, size, bar, policy)
            else:
                for offset in cutlass.range(lane * 16, size, 32 * 16):
                    ptx.cp_async16(slot + offset, address + Int64(offset))
            address += Int64(size)
            chunk += 1
            if chunk == chunks:
                chunk = Int32(0)
                item += 1
        if cutlass.const_expr(not c.bulk):
            ptx.cp_async_commit()
        return item, chunk, address

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
    def load_tokens(self, xs: cute.Tensor, rows: cute.Tensor):
        for j in cutlass.range_constexpr(self.c.n_tiles):
            low = ptx.ldg128(rows[j])
            high = ptx.ldg128(rows[j] + 16)
            for i in cutlass.range_constexpr(4):
                xs[i, j] = low[i]
                xs[4 + i, j] = high[i]

    # ---- scales ----------------------------------------------------------------------------------

    @cute.jit
    def slice_entry(self, item: Int32, last: Int32, entries: Int64, slices: Int64, row_blocks: Int32, member: Int32):
        """The slice entry (see the prepared form) of an item, 0 beyond the last."""
        found = Uint32(0)
        if item < last:
            expert = Int32(ptx.ldg32(entries + 16 + Int64(item // row_blocks) * 16))
            index = (expert * row_blocks + item % row_blocks) * self.c.split + member
            found = ptx.ldg32(slices + Int64(index) * 4)
        return found

    @cute.jit
    def load_bases(self, item: Int32, last: Int32, entries: Int64, bases: Int64, row_blocks: Int32, lane: Int32):
        """The bases of the four rows of this lane, one byte each."""
        found = Uint32(0)
        if cutlass.const_expr(not self.c.native):
            if item < last:
                expert = Int32(ptx.ldg32(entries + 16 + Int64(item // row_blocks) * 16))
                index = expert * row_blocks + item % row_blocks
                found = ptx.ldg32(bases + Int64(index) * 32 + Int64(lane // 4 * 4))
        return found

    @cute.jit
    def load_records(
        self, records: cute.Tensor, at: cutlass.Constexpr, entry: Uint32, item: Int32, last: Int32,
        entries: Int64, row_blocks: Int32, starts: Int64, positions: Int64, values: Int64, lane: Int32,
    ):  # fmt: skip
        """Spreads the slice's exceptions over the lanes: position | bf16 scale << 16, or all ones."""
        for r in cutlass.range_constexpr(3):
            records[at + r] = Uint32(0xFFFFFFFF)
        count = Int32(entry >> Uint32(24))
        if Int32(entry) > 0 and count > 0:
            expert = Int32(ptx.ldg32(entries + 16 + Int64(item // row_blocks) * 16))
            start = Int64(ptx.ldg64(starts + Int64(expert) * 16)[0]) + Int64(entry & Uint32(0xFFFFFF))
            for r in cutlass.range_constexpr(3):
                index = lane + 32 * r
                if index < count:
                    position = ptx.ldg16(positions + (start + Int64(index)) * 2)
                    value = ptx.ldg8(values + start + Int64(index))
                    records[at + r] = position | (self.scale_pattern(value) << Uint32(16))

    @cute.jit
    def scale_pattern(self, byte: Uint32):
        """bf16 bits of any E4M3 byte times 2^119: subnormals, zeros, signs and NaN included."""
        magnitude = byte & Uint32(0x7F)
        bits = (magnitude << Uint32(4)) + Uint32(SCALE_BIAS)
        if magnitude < 8:
            # magnitude * 2^-9 * 2^119
            bits = ptx.float_bits(Float32(Int32(magnitude)) * Float32(2.0**110)) >> Uint32(16)
        if magnitude == 0x7F:
            bits = Uint32(0x7FC0)
        return bits | ((byte & Uint32(0x80)) << Uint32(8))

    @cute.jit
    def base_pairs(self, word: Uint32):
        """bf16 patterns of the bases of rows r and r + 8, for both fragments; 0 for rows of zeros."""
        first = Uint32(SCALE_BIAS2)
        second = Uint32(SCALE_BIAS2)
        if cutlass.const_expr(not self.c.native):
            halves = []
            for i in cutlass.range_constexpr(4):
                base = (word >> Uint32(8 * i)) & Uint32(0xFF)
                bits = (base << Uint32(4)) + Uint32(SCALE_BIAS)
                if base == 0:
                    bits = Uint32(0)
                halves.append(bits)
            first = halves[0] | (halves[1] << Uint32(16))
            second = halves[2] | (halves[3] << Uint32(16))
        return first, second

    @cute.jit
    def scales(
        self, address: Int32, base0: Uint32, base1: Uint32, lane: Int32, is_dense: cutlass.Boolean,
        dense_row: Int64, tile: Int32,
    ):  # fmt: skip
        """The lane's scales in one tile: bf16 pairs (rows r, r + 8) of the two fragments."""
        c = self.c
        codes = address + layout.WEIGHT_BYTES
        if cutlass.const_expr(c.native):
            word = ptx.lds32(codes + lane * 4)
            sv0 = (word & Uint32(0x00FF00FF)) * Uint32(16) + base0
            sv1 = ((word >> Uint32(4)) & Uint32(0x0FF00FF0)) + base1
            if is_dense:
                sv0 = self.any_scales((word & Uint32(0x00FF00FF)) << Uint32(4))
                sv1 = self.any_scales((word >> Uint32(4)) & Uint32(0x0FF00FF0))
        else:
            word = ptx.prmt(ptx.lds16(codes + lane * 2), Uint32(0), Uint32(0x4140))
            sv0 = (word & Uint32(0x000F000F)) * Uint32(16) + base0
            sv1 = (word & Uint32(0x00F000F0)) + base1
            if is_dense:
                above = ptx.ldg16(dense_row + Int64(tile) * layout.CODE_BYTES + Int64(lane * 2))
                above = ptx.prmt(above, Uint32(0), Uint32(0x4140))
                low = (word & Uint32(0x000F000F)) << Uint32(4)
                sv0 = self.any_scales(low | ((above & Uint32(0x000F000F)) << Uint32(8)))
                low = word & Uint32(0x00F000F0)
                sv1 = self.any_scales(low | ((above & Uint32(0x00F000F0)) << Uint32(4)))
        return sv0, sv1

    @cute.jit
    def any_scales(self, bits: Uint32):
        """Two E4M3 bytes, each shifted left by 4 in its half, to bf16 patterns of the scale times 2^119."""
        magnitude = bits & Uint32(0x07F007F0)
        value = ptx.mul_bf16x2(magnitude, Uint32(0x7B807B80), self.c.bf16_fma)  # 2^120
        value = ptx.mul_bf16x2(value, Uint32(0x7B007B00), self.c.bf16_fma)  # 2^119
        if (magnitude & Uint32(0xFFFF)) == 0x07F0:
            value = (value & Uint32(0xFFFF0000)) | Uint32(0x7FC0)
        if (magnitude >> Uint32(16)) == 0x07F0:
            value = (value & Uint32(0x0000FFFF)) | Uint32(0x7FC00000)
        return value | ((bits & Uint32(0x08000800)) << Uint32(4))

    @cute.jit
    def patch(self, sv0: Uint32, sv1: Uint32, record: Uint32, tile: Int32, lane: Int32):
        """Replaces the scales of this tile that are exceptions, in the lanes that hold them."""
        hits = Uint32(cute.arch.vote_ballot_sync(Int32((record >> Uint32(7)) & Uint32(0x1FF)) == tile))
        while hits != 0:
            source = ptx.find_first_set(hits)
            hits = hits & (hits - Uint32(1))
            found = Uint32(cute.arch.shuffle_sync(record, Int32(source)))
            if Int32(found & Uint32(31)) == lane:
                value = found >> Uint32(16)
                selector = Uint32(0x3254)
                if (found & Uint32(32)) != 0:
                    selector = Uint32(0x5410)
                if (found & Uint32(64)) != 0:
                    sv1 = ptx.prmt(sv1, value, selector)
                else:
                    sv0 = ptx.prmt(sv0, value, selector)
        return sv0, sv1

    # ---- the product -----------------------------------------------------------------------------

    @cute.jit
    def multiply(self, acc: cute.Tensor, xs: cute.Tensor, address: Int32, sv0: Uint32, sv1: Uint32, lane: Int32):
        """acc += tile @ tokens: 2 fragments x 4 steps of 16 columns."""
        c = self.c
        fma = cutlass.const_expr(c.bf16_fma)
        for m in cutlass.range_constexpr(2):
            q = ptx.lds128(address + (m * 512) + lane * 16)
            sv = sv0 if cutlass.const_expr(m == 0) else sv1
            for s in cutlass.range_constexpr(4):
                w = q[s]
                mask = Uint32(PAIR_MASK)
                last = ptx.and_or(w >> Uint32(8), Uint32(0x00400040), w & Uint32(0x81808180))
                a = (
                    ptx.mul_bf16x2_by_half((w << Uint32(2)) & mask, sv, False, fma),
                    ptx.mul_bf16x2_by_half((w << Uint32(6)) & mask, sv, True, fma),
                    ptx.mul_bf16x2_by_half(ptx.rotate_right(w, 4) & mask, sv, False, fma),
                    ptx.mul_bf16x2_by_half(last, sv, True, fma),
                )
                for j in cutlass.range_constexpr(c.n_tiles):
                    u = m * c.n_tiles + j
                    before = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                    after = ptx.mma_m16n8k16(before, a, (xs[2 * s, j], xs[2 * s + 1, j]))
                    for i in cutlass.range_constexpr(4):
                        acc[i, u] = after[i]

    # ---- the end of an item ----------------------------------------------------------------------

    @cute.jit
    def finish_item(
        self, acc: cute.Tensor, partial: Int32, team: Int32, member: Int32, lane: Int32, block: Int32,
        expert: Int32, first: Int32, count: Int32, alpha: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, topk: Int32,
    ):  # fmt: skip
        """Adds the team's partial sums in the order of the slices and stores the item's outputs."""
        c = self.c
        units = cutlass.const_expr(2 * c.n_tiles)
        if cutlass.const_expr(c.split == 1):
            for u in cutlass.range_constexpr(units):
                self.store(
                    u, acc[0, u], acc[1, u], acc[2, u], acc[3, u],
                    lane, block, expert, first, count, alpha, pairs, router, out, out_stride, topk,
                )  # fmt: skip
        else:
            threads = cutlass.const_expr(32 * c.split)
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
            for u in cutlass.range_constexpr(units):
                mine = partial + (member * units + u) * 512 + lane * 16
                ptx.sts_f32x4(mine, acc[0, u], acc[1, u], acc[2, u], acc[3, u])
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
            for u in cutlass.range_constexpr(units):
                if member == u % c.split:
                    total = cute.make_rmem_tensor(4, Float32)
                    for i in cutlass.range_constexpr(4):
                        total[i] = Float32(0.0)
                    for s in cutlass.range_constexpr(c.split):
                        part = ptx.lds_f32x4(partial + (s * units + u) * 512 + lane * 16)
                        for i in cutlass.range_constexpr(4):
                            total[i] = total[i] + part[i]
                    self.store(
                        u, total[0], total[1], total[2], total[3],
                        lane, block, expert, first, count, alpha, pairs, router, out, out_stride, topk,
                    )  # fmt: skip

    @cute.jit
    def store(
        self, unit: cutlass.Constexpr, v0: Float32, v1: Float32, v2: Float32, v3: Float32, lane: Int32,
        block: Int32, expert: Int32, first: Int32, count: Int32, alpha: Int64, pairs: Int64, router: Int64,
        out: Int64, out_stride: Int32, topk: Int32,
    ):  # fmt: skip
        """Stores two tokens' values of rows r (v0, v1) and r + 8 (v2, v3) of one fragment."""
        c = self.c
        m = cutlass.const_expr(unit // c.n_tiles)
        n = cutlass.const_expr(unit % c.n_tiles) * 8 + lane % 4 * 2
        row = lane // 4
        low = (v0, v1)
        high = (v2, v3)
        if cutlass.const_expr(c.gated):
            gate_alpha, up_alpha = self.alphas(alpha, expert, 2)
            channel = block * 16 + m * 8 + row
            for i in cutlass.range_constexpr(2):
                if n + i < count:
                    value = self.act(low[i] * gate_alpha) * (high[i] * up_alpha)
                    address = out + (Int64(first + n + i) * Int64(out_stride) + Int64(channel)) * 2
                    ptx.stg16(address, ptx.pack_bf16x2(value, value))
        else:
            scale = ptx.ldg_f32(alpha + Int64(expert) * 4) * Float32(PRODUCT_FACTOR)
            channel = block * 32 + m * 16 + row
            for i in cutlass.range_constexpr(2):
                if n + i < count:
                    pair = ptx.ldg32(pairs + Int64(first + n + i) * 4)
                    weight = ptx.ldg_f32(router + Int64(pair) * 4) * scale
                    address = out + (Int64(pair) * Int64(out_stride) + Int64(channel)) * 4
                    ptx.stg_f32(address, low[i] * weight)
                    ptx.stg_f32(address + 32, high[i] * weight)

    @cute.jit
    def alphas(self, alpha: Int64, expert: Int32, count: cutlass.Constexpr):
        gate = ptx.ldg_f32(alpha + Int64(expert) * 8) * Float32(PRODUCT_FACTOR)
        up = ptx.ldg_f32(alpha + Int64(expert) * 8 + 4) * Float32(PRODUCT_FACTOR)
        return gate, up

    @cute.jit
    def act(self, v: Float32):
        """SiLU."""
        return v * cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp(-v))
