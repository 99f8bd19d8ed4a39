"""Packs weights and scales on the GPU: byte for byte what `layout.pack` makes, in two programs.

    tiles    writes everything whose size is known: weights in fragment order, bases, codes, and of each slice
             its mask, its further exceptions and how many words and slots it takes (`sizes`)
    records  writes what is sparse, once the sizes are summed up: exception records and dense tiles

One CTA takes a row block of an expert, one warp a slice of 16 tiles at a time. Arithmetic on scales is done
on four bytes at once (`pack_step`); only where a slice has exceptions are they sorted by the lane that will
use them, lane 4 row + column. All sizes are run-time values: a device needs two programs for compressed
scales, and two for native ones. `packer` is the host's side.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import layout, ptx
from .pack_step import LOADS, LOW, ONES, PLACES, PackConfig, Step, geometry_of, transposed
from .packer import SLOT_SHIFT, TILES

WARPS = 4
THREADS = 32 * WARPS
ROWS_AT_ONCE = 4  # whose bytes a warp counts at a time
BINS = 132  # of bytes 0 .. 127, then one for all others; a multiple of 4
ROW_WORDS = layout.TILE_K // layout.GROUP // 4  # 32-bit words of scales that a row has in a tile
LANE_LIMIT = 1 + layout.MAX_DEPTH
SLICE_LIMIT = layout.SLICE_TILES * layout.TILE_SCALES // layout.DENSE_SHARE


class TilesStep(Step):
    """Host function; compile `__call__` with `cute.compile`."""

    @cute.jit
    def __call__(
        self,
        sizes: cute.Tensor,
        weight: Int64,
        scale: Int64,
        tiles: Int64,
        bases: Int64,
        slices: Int64,
        experts: Int32,
        rows: Int32,
        k_tiles: Int32,
        gated: Int32,
        stream: cuda.CUstream,
    ):
        """sizes: int32 [E * RB * S]; all `Int64` are device addresses."""
        geometry = geometry_of(rows, k_tiles, gated)
        grid = [rows // layout.TILE_ROWS, experts, 1]
        self.scales(scale, tiles, bases, slices, sizes.iterator.toint(), geometry).launch(
            grid=grid, block=[THREADS, 1, 1], stream=stream
        )
        self.weights(weight, tiles, geometry).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    # ---- weights -----------------------------------------------------------------------------------

    @cute.kernel
    def weights(self, weight: Int64, tiles: Int64, geometry: tuple):
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        _, k_tiles, _, fragment_rows, half_rows = geometry
        row_bytes = layout.TILE_K // 2 * k_tiles
        top = weight + self.first_row(geometry, lane // 4) * row_bytes + Int64(lane % 4 * 8)
        out = tiles + self.block_number() * (k_tiles * self.c.tile_bytes) + Int64(lane * 16)
        found = cute.make_rmem_tensor((2, PLACES, 2), Uint32)
        words = cute.make_rmem_tensor(4, Uint32)
        for t in cutlass.range(tid // 32 * 2, k_tiles, 2 * WARPS, unroll=1):
            for i in cutlass.range_constexpr(2):
                tile = cutlass.min(t + i, k_tiles - 1)  # an odd last one twice: the same bytes
                for j in cutlass.range_constexpr(PLACES):
                    row = Int64(j // 2 * fragment_rows + j % 2 * half_rows) * row_bytes
                    found[i, j, 0], found[i, j, 1] = ptx.ldg64_once(
                        top + row + Int64(tile * (layout.TILE_K // 2))
                    )
            for i in cutlass.range_constexpr(2):
                tile = cutlass.min(t + i, k_tiles - 1)
                for f in cutlass.range_constexpr(2):
                    for step in cutlass.range_constexpr(4):
                        upper, lower = found[i, 2 * f, step // 2], found[i, 2 * f + 1, step // 2]
                        words[step] = _fragment_word(upper, lower, step % 2 * 2)
                    ptx.stg128(
                        out + Int64(tile * self.c.tile_bytes + f * 512), *(words[step] for step in range(4))
                    )

    # ---- scales ------------------------------------------------------------------------------------

    @cute.kernel
    def scales(self, scale: Int64, tiles: Int64, bases: Int64, slices: Int64, sizes: Int64, geometry: tuple):
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        warp = tid // 32
        k_tiles = geometry[1]
        block = self.block_number()
        rows = cute.make_rmem_tensor(PLACES, Uint32)
        if cutlass.const_expr(self.c.native):
            for j in cutlass.range_constexpr(PLACES):
                rows[j] = Uint32(layout.LOWEST_CODED * ONES)
        else:
            memory = cutlass.memory.SmemAllocator()
            counts = memory.allocate_array(Uint32, WARPS * ROWS_AT_ONCE * BINS, byte_alignment=16)
            chosen = Int32(memory.allocate_array(Uint32, layout.TILE_ROWS, byte_alignment=16).toint())
            mine = Int32(counts.toint()) + warp * (ROWS_AT_ONCE * BINS * 4)
            self.choose_bases(chosen, mine, scale, geometry, warp, lane)
            cute.arch.sync_threads()
            if tid < 8:
                self.store_bases(chosen, bases + (block * 8 + Int64(tid)) * 4, tid)
            for j in cutlass.range_constexpr(PLACES):
                rows[j] = ptx.lds32(chosen + (j * 8 + lane // 4) * 4) * Uint32(ONES)
        count = (k_tiles + layout.SLICE_TILES - 1) // layout.SLICE_TILES
        out = tiles + block * (k_tiles * self.c.tile_bytes) + Int64(layout.WEIGHT_BYTES)
        for s in cutlass.range(warp, count, WARPS, unroll=1):
            self.pack_slice(rows, scale, out, slices, sizes, block * count + Int64(s), s, geometry, lane)

    @cute.jit
    def choose_bases(
        self, chosen: Int32, counts: Int32, scale: Int64, geometry: tuple, warp: Int32, lane: Int32
    ):
        """Of the eight rows of the warp's fragment and half, as `layout.choose_bases` does."""
        _, k_tiles, _, fragment_rows, half_rows = geometry
        top = self.first_row(geometry, Int32(0)) + Int64(warp // 2 * fragment_rows + warp % 2 * half_rows)
        words = cute.make_rmem_tensor(ROWS_AT_ONCE, Uint32)
        for first in cutlass.range(0, 8, ROWS_AT_ONCE, unroll=1):
            for j in cutlass.range_constexpr(ROWS_AT_ONCE):
                ptx.sts_f32x4(counts + (j * BINS * 4) + lane * 16, 0.0, 0.0, 0.0, 0.0)
            cute.arch.sync_warp()
            for w in cutlass.range(lane, k_tiles * ROW_WORDS, 32, unroll=1):
                for j in cutlass.range_constexpr(ROWS_AT_ONCE):
                    row = (top + Int64(first + j)) * (k_tiles * ROW_WORDS)
                    words[j] = ptx.ldg32(scale + (row + Int64(w)) * 4)
                for j in cutlass.range_constexpr(ROWS_AT_ONCE):
                    for b in cutlass.range_constexpr(4):
                        byte = cutlass.min(Int32((words[j] >> Uint32(8 * b)) & Uint32(255)), 128)
                        ptx.atom_add_shared(counts + (j * BINS * 4) + byte * 4, Uint32(1))
            cute.arch.sync_warp()
            for j in cutlass.range_constexpr(ROWS_AT_ONCE):
                base = self.best_base(counts + (j * BINS * 4), lane)
                if lane == 0:
                    ptx.sts32(chosen + (warp * 8 + first + j) * 4, Uint32(base))
            cute.arch.sync_warp()

    @cute.jit
    def best_base(self, counts: Int32, lane: Int32):
        """The lowest base whose window of 16 holds most bytes; 0 where more of them are zeros."""
        bins = [Int32(word) for word in ptx.lds128(counts + lane * 16)]
        own = bins[0] + bins[1] + bins[2] + bins[3]
        upto = own
        for i in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
            if lane >= (1 << i):
                upto += before
        smaller = upto - own  # how many bytes are smaller than 4 lane
        key = Int32(0)
        for j in cutlass.range_constexpr(4):
            held = cute.arch.shuffle_sync_down(smaller, 4) - smaller
            base = lane * 4 + j
            if base >= layout.LOWEST_CODED and base <= layout.HIGHEST_BASE:
                key = cutlass.max(key, held * 128 + (127 - base))
            smaller = smaller + bins[j]
        for i in cutlass.range_constexpr(5):
            key = cutlass.max(key, cute.arch.shuffle_sync_bfly(key, 1 << i))
        zeros = cute.arch.shuffle_sync(bins[0], 0)
        base = 127 - key % 128
        if zeros > key // 128:
            base = Int32(0)
        return base

    @cute.jit
    def store_bases(self, chosen: Int32, address: Int64, r: Int32):
        """The bases of row `r` of eight, by fragment and half."""
        word = Uint32(0)
        for j in cutlass.range_constexpr(PLACES):
            base = ptx.lds32(chosen + (j * 8 + r) * 4)
            if base != 0:
                word = word | ((base | Uint32(layout.ROW_FLAG)) << Uint32(8 * j))
        ptx.stg32(address, word)

    @cute.jit
    def pack_slice(
        self, rows: cute.Tensor, scale: Int64, out: Int64, slices: Int64, sizes: Int64, number: Int64,
        slice_: Int32, geometry: tuple, lane: Int32,
    ):  # fmt: skip
        """`number`: of the slice, over all experts."""
        words = cute.make_rmem_tensor((LOADS, PLACES), Uint32)
        self.load(words, rows, scale, geometry, slice_, lane)
        low, high = self.exceptions(words, rows, lane)
        count = Int32(cute.arch.popc(low)) + Int32(cute.arch.popc(high))
        mask = Uint32(cute.arch.vote_ballot_sync(count > 0))
        first = Int32(cute.arch.popc(mask))
        total = count
        for i in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        further = total - first
        deep = cute.arch.vote_ballot_sync(count > LANE_LIMIT) != 0
        dense = total > SLICE_LIMIT or further > layout.MAX_FURTHER or deep
        tiles_in = cutlass.min(geometry[1] - slice_ * layout.SLICE_TILES, layout.SLICE_TILES)
        size = first + first % 2 + 2 * further
        info = Uint32(further) << Uint32(24)
        if dense:
            size = tiles_in << SLOT_SHIFT
            mask = Uint32(0)
            info = Uint32(layout.DENSE_FLAG)
        if lane == 0:
            ptx.stg32(sizes + number * 4, Uint32(size))
            ptx.stg64(slices + number * 8, mask, info)
        codes = cute.make_rmem_tensor(PLACES, Uint32)
        for i in cutlass.range_constexpr(LOADS):
            inside = 4 * i + lane % 4
            for j in cutlass.range_constexpr(PLACES):
                codes[j], _ = self.code(words[i, j], rows[j])
                if dense:
                    codes[j] = words[i, j]
                    if cutlass.const_expr(not self.c.native):
                        codes[j] = words[i, j] & Uint32(LOW)
            if inside < tiles_in:
                tile = slice_ * layout.SLICE_TILES + inside
                address = out + Int64(tile * self.c.tile_bytes)
                if cutlass.const_expr(self.c.native):
                    ptx.stg128(address + Int64(lane // 4 * 16), *transposed(codes))
                else:
                    ptx.stg64(address + Int64(lane // 4 * 8), *self.joined(codes))


class RecordsStep(Step):
    """Host function; compile `__call__` with `cute.compile`."""

    @cute.jit
    def __call__(
        self,
        sizes: cute.Tensor,
        scale: Int64,
        bases: Int64,
        slices: Int64,
        starts: Int64,
        records: Int64,
        dense: Int64,
        experts: Int32,
        rows: Int32,
        k_tiles: Int32,
        gated: Int32,
        stream: cuda.CUstream,
    ):
        """As the fields of a `PreparedMatrix`, the second words of `slices` complete."""
        geometry = geometry_of(rows, k_tiles, gated)
        self.kernel(
            scale, bases, slices, sizes.iterator.toint(), starts, records, dense, geometry
        ).launch(
            grid=[rows // layout.TILE_ROWS, experts, 1], block=[THREADS, 1, 1], stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, scale: Int64, bases: Int64, slices: Int64, sizes: Int64, starts: Int64, records: Int64,
        dense: Int64, geometry: tuple,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        _, expert, _ = cute.arch.block_idx()
        lane = tid % 32
        block = self.block_number()
        rows = cute.make_rmem_tensor(PLACES, Uint32)
        if cutlass.const_expr(self.c.native):
            for j in cutlass.range_constexpr(PLACES):
                rows[j] = Uint32(layout.LOWEST_CODED * ONES)
        else:
            found = ptx.ldg32(bases + (block * 8 + Int64(lane // 4)) * 4) & Uint32(0x7F7F7F7F)
            for j in cutlass.range_constexpr(PLACES):
                rows[j] = ((found >> Uint32(8 * j)) & Uint32(255)) * Uint32(ONES)
        record0, _, dense0, _ = ptx.ldg128(starts + Int64(expert) * 16)
        words = cute.make_rmem_tensor((LOADS, PLACES), Uint32)
        count = (geometry[1] + layout.SLICE_TILES - 1) // layout.SLICE_TILES
        for s in cutlass.range(tid // 32, count, WARPS, unroll=1):
            number = block * count + Int64(s)
            if ptx.ldg32(sizes + number * 4) != 0:
                mask, info = ptx.ldg64(slices + number * 8)
                self.load(words, rows, scale, geometry, s, lane)
                if Int32(info) < 0:
                    if cutlass.const_expr(not self.c.native):
                        slot = Int64(dense0) + Int64(info & Uint32(0x7FFFFFFF))
                        self.write_dense(words, dense + slot * layout.CODE_BYTES, s, geometry, lane)
                else:
                    begin = records + (Int64(record0) + Int64(info & Uint32(0xFFFFFF))) * 2
                    low, high = self.exceptions(words, rows, lane)
                    self.write_records(mask, low, high, begin, scale, s, geometry, lane)

    @cute.jit
    def write_dense(self, words: cute.Tensor, out: Int64, slice_: Int32, geometry: tuple, lane: Int32):
        upper = cute.make_rmem_tensor(PLACES, Uint32)
        for i in cutlass.range_constexpr(LOADS):
            inside = 4 * i + lane % 4
            for j in cutlass.range_constexpr(PLACES):
                upper[j] = (words[i, j] >> Uint32(4)) & Uint32(LOW)
            if slice_ * layout.SLICE_TILES + inside < geometry[1]:
                ptx.stg64(out + Int64(inside * layout.CODE_BYTES + lane // 4 * 8), *self.joined(upper))

    @cute.jit
    def write_records(
        self, mask: Uint32, low: Uint32, high: Uint32, begin: Int64, scale: Int64, slice_: Int32,
        geometry: tuple, lane: Int32,
    ):  # fmt: skip
        below = (Uint32(1) << Uint32(lane)) - Uint32(1)
        firsts = Int32(cute.arch.popc(mask))
        if (low | high) != 0:
            place = Int32(32)
            if low != 0:
                place = Int32(ptx.find_first_set(low))
            else:
                place = Int32(32) + Int32(ptx.find_first_set(high))
            at = begin + Int64(Int32(cute.arch.popc(mask & below)) * 2)
            ptx.stg16(at, self.word(place, scale, slice_, geometry, lane))
        if lane == 0 and firsts % 2 != 0:
            ptx.stg16(begin + Int64(firsts * 2), Uint32(0))
        out = begin + Int64((firsts + firsts % 2) * 2)
        rank = Int32(0)  # of the lane's exceptions before the place
        done = Int32(0)  # further ones of the slice before the place
        for place in cutlass.range(0, layout.SLICE_TILES * PLACES, unroll=1):
            bits = low
            if place >= 32:
                bits = high
            here = ((bits >> Uint32(place % 32)) & Uint32(1)) != 0
            others = Uint32(cute.arch.vote_ballot_sync(here and rank > 0))
            if here:
                if rank > 0:
                    index = done + Int32(cute.arch.popc(others & below))
                    head = Uint32((rank - 1) * 32 + lane)
                    word = self.word(place, scale, slice_, geometry, lane)
                    ptx.stg32(out + Int64(index * 4), head | (word << Uint32(16)))
                rank += 1
            done += Int32(cute.arch.popc(others))

    @cute.jit
    def word(self, place: Int32, scale: Int64, slice_: Int32, geometry: tuple, lane: Int32):
        """A record's `place << 8 | byte`, of the scale that the lane will use there."""
        _, k_tiles, _, fragment_rows, half_rows = geometry
        row = self.first_row(geometry, lane // 4) + Int64(
            place % 4 // 2 * fragment_rows + place % 2 * half_rows
        )
        column = (slice_ * layout.SLICE_TILES + place // 4) * 4 + lane % 4
        return (Uint32(place) << Uint32(8)) | ptx.ldg8(scale + row * (k_tiles * 4) + Int64(column))


@cute.jit
def _fragment_word(upper: Uint32, lower: Uint32, byte: cutlass.Constexpr):
    """A packed word, see `layout._NIBBLE_BITS`: bytes `byte` and `byte + 1` of the rows of two halves."""
    first, third = _spread(upper, byte), _spread(upper, byte + 1)
    second, fourth = _spread(lower, byte), _spread(lower, byte + 1)
    both = (first << Uint32(4)) | second
    word = both & Uint32(0x00770077)
    word = ptx.and_or(both << Uint32(6), Uint32(0x22002200), word)
    word = ptx.and_or(third << Uint32(10), Uint32(0x1C001C00), word)
    word = ptx.and_or(ptx.rotate_right(third, 16), Uint32(0x00080008), word)
    word = ptx.and_or(fourth << Uint32(14), Uint32(0x40004000), word)
    word = ptx.and_or(fourth << Uint32(6), Uint32(0x01800180), word)
    return ptx.and_or(fourth << Uint32(12), Uint32(0x80008000), word)


@cute.jit
def _spread(word: Uint32, byte: cutlass.Constexpr):
    """One byte: its low nibble in bits 0 to 3, its high one in bits 16 to 19."""
    twice = ptx.prmt(word, Uint32(0), Uint32(0x4040 | byte << 8 | byte))
    return ptx.and_or(twice >> Uint32(4), Uint32(0x000F0000), twice & Uint32(15))


def compile_pack(config: PackConfig, arch: str, options: str = "--enable-tvm-ffi"):
    """Compiles a program for `arch` (sm_90a, ...); needs no GPU."""
    sizes = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    step, addresses = (TilesStep, 5) if config.step == TILES else (RecordsStep, 6)
    numbers = [Int64(0)] * addresses + [Int32(1)] * 3 + [Int32(0)]
    return cute.compile(step(config), sizes, *numbers, stream, options=f"--gpu-arch {arch} {options}")
