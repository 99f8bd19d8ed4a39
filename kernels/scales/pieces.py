"""What one warp expands at a time: the scales of a few row blocks in one slice of 16 tiles.

A lane loads eight bytes of a tile's codes: the four columns of one row of each of the four groups of eight
rows in the block. Out of them come four words of four scales; how a lane's loads lie to each other is
chosen so that these words join to whole sectors of the output:

    vectors  rows order: a lane takes four tiles in a row of one block, 16 bytes of each of its four rows
    words    rows order, where rows do not start at multiples of 16 bytes: a warp takes words one after
             the other
    blocked  F8_128x4 order: a lane takes one tile of four blocks that lie 32 rows apart, 16 bytes of the
             output for each of its four rows, in `steps` steps of four tiles

Exceptions are written over the finished rows, byte by byte, by the warp that wrote the rows: so nothing
waits for their records but they themselves.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import layout, ptx
from .planes import BLOCK_BYTES, BLOCKED, Plane

LOADS = 4  # of a lane and step
NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True)
class Work:
    """How the planes of one matrix are shared out. All of it is known when the program is compiled."""

    plane: Plane
    gated: bool

    @property
    def k_tiles(self) -> int:
        return self.plane.column_blocks

    @property
    def slices(self) -> int:
        return -(-self.k_tiles // layout.SLICE_TILES)

    @property
    def tiles(self) -> int:
        """Most tiles of a slice."""
        return min(self.k_tiles, layout.SLICE_TILES)

    @property
    def blocks(self) -> int:
        """Row blocks that hold rows of the plane."""
        return self.plane.rows // layout.TILE_ROWS

    @property
    def stored_blocks(self) -> int:
        """Row blocks of an expert in the prepared form: the width is padded to a tile."""
        return -(-self.blocks // 4) * 4 if self.gated else self.blocks

    @property
    def form(self) -> str:
        if self.plane.order == BLOCKED:
            return "blocked"
        return "vectors" if self.plane.columns % 16 == 0 else "words"

    @property
    def span(self) -> int:
        """Row blocks of a task."""
        if self.form == "blocked":
            return 4
        return max(1, min(4, layout.SLICE_TILES // self.tiles))

    @property
    def steps(self) -> int:
        """Most steps of a task."""
        return -(-self.tiles // 4) if self.form == "blocked" else 1

    @property
    def grain(self) -> int:
        """Bytes that a store of the words form writes."""
        return math.gcd(self.plane.columns, 4)

    @property
    def groups(self) -> int:
        if self.form == "blocked" and self.gated:
            return 2 * -(-self.blocks // 8)
        return -(-self.blocks // self.span)

    @property
    def tasks(self) -> int:
        """Of one expert."""
        return self.groups * self.slices


class Pieces:
    """Device code. `addresses`: tiles, bases, slices, starts, records, dense, output."""

    def __init__(self, work: Work):
        self.w = work

    @cute.jit
    def expand(self, addresses: tuple, expert: Int32, task: Int32, part: Int32, shift: Int32, lane: Int32):
        """A task of an expert; of the blocked form the `part` of 2^shift equal ones."""
        w = self.w
        tiles, bases, slices, starts, records, dense, planes = addresses
        span = cutlass.const_expr(w.span)
        group = task // w.slices
        slice_ = task - group * w.slices
        count = cutlass.min(w.k_tiles - slice_ * layout.SLICE_TILES, layout.SLICE_TILES)
        origin = expert * w.stored_blocks
        out = planes + Int64(expert) * w.plane.nbytes
        where = (group, slice_, count, origin, lane)
        step = Int32(0)
        last = Int32(1)
        if cutlass.const_expr(w.form == "blocked"):
            step = part << (Int32(2) - shift)
            last = cutlass.min(step + (Int32(4) >> shift), (count + 3) // 4)

        codes = cute.make_rmem_tensor(2 * LOADS, Uint32)
        coming = cute.make_rmem_tensor(2 * LOADS, Uint32)
        rows = cute.make_rmem_tensor(LOADS, Uint32)
        info = cute.make_rmem_tensor((2, span), Uint32)
        found = cute.make_rmem_tensor((3, span), Uint32)
        self.load_codes(codes, tiles, where, step)
        record0, _, dense0, _ = ptx.ldg128(starts + Int64(expert) * 16)
        for x in cutlass.range_constexpr(span):
            info[0, x] = Uint32(0)
            info[1, x] = Uint32(0)
            block = self.block(group, Int32(x))
            if block < w.blocks:
                info[0, x], info[1, x] = ptx.ldg64(slices + Int64((origin + block) * w.slices + slice_) * 8)
        self.load_bases(rows, bases, where)
        if cutlass.const_expr(w.steps > 1):
            if step + 1 < last:
                self.load_codes(coming, tiles, where, step + 1)
        self.load_exceptions(found, info, record0, records, lane)
        any_dense = info[1, 0]
        for x in cutlass.range_constexpr(1, span):
            any_dense = any_dense | info[1, x]
        if cutlass.const_expr(w.steps == 1):
            if last > step:
                self.write(codes, rows, info, any_dense, dense, dense0, out, where, step)
        else:
            for s in cutlass.range(step, last, unroll=1):
                self.write(codes, rows, info, any_dense, dense, dense0, out, where, s)
                for i in cutlass.range_constexpr(2 * LOADS):
                    codes[i] = coming[i]
                if s + 2 < last:
                    self.load_codes(coming, tiles, where, s + 2)
        cute.arch.sync_warp()
        self.write_exceptions(found, info, out, where, step * 4, last * 4)

    # ---- where things lie ------------------------------------------------------------------------

    @cute.jit
    def block(self, group: Int32, x: Int32):
        """Row block `x` of a group."""
        w = self.w
        if cutlass.const_expr(w.form == "blocked" and w.gated):
            return (group // 2) * 8 + group % 2 + x * 2
        return group * w.span + x

    @cute.jit
    def item(self, i: cutlass.Constexpr, step: Int32, where: tuple):
        """Of a lane's load `i`: block of the group, tile of the slice, row of eight; whether it exists."""
        w = self.w
        group, _, count, _, lane = where
        if cutlass.const_expr(w.form == "words"):
            place = lane + 32 * i
            tile = place % w.tiles
            rest = place // w.tiles
            row = rest % 8
            x = rest // 8
        elif cutlass.const_expr(w.form == "vectors"):
            quads = w.tiles // 4
            x = lane // 8 // quads
            tile = lane // 8 % quads * 4 + i
            row = lane % 8
        else:
            x = Int32(i)
            tile = step * 4 + lane // 8
            row = lane % 8
        exists = x < w.span and tile < count and self.block(group, x) < w.blocks
        return x, tile, row, exists

    @cute.jit
    def row(self, block: Int32, fragment, half, row: Int32):
        """Row of the plane."""
        if cutlass.const_expr(self.w.gated):
            return half * (self.w.plane.rows // 2) + block * 16 + fragment * 8 + row
        return block * 32 + fragment * 16 + half * 8 + row

    @cute.jit
    def place(self, row: Int32, column: Int32):
        """Offset of a scale in its plane."""
        p = self.w.plane
        if cutlass.const_expr(p.order == BLOCKED):
            tile = row // 128 * p.column_blocks + column // 4
            return Int64(tile) * BLOCK_BYTES + Int64(row % 32 * 16 + row // 32 % 4 * 4 + column % 4)
        return Int64(row) * p.columns + Int64(column)

    # ---- loads -----------------------------------------------------------------------------------

    @cute.jit
    def load_codes(self, codes: cute.Tensor, tiles: Int64, where: tuple, step: Int32):
        w = self.w
        group, slice_, _, origin, _ = where
        tile_bytes = cutlass.const_expr(layout.WEIGHT_BYTES + layout.CODE_BYTES)
        for i in cutlass.range_constexpr(LOADS):
            codes[2 * i] = Uint32(0)
            codes[2 * i + 1] = Uint32(0)
            x, tile, row, exists = self.item(i, step, where)
            if exists:
                block = Int64(origin + self.block(group, x)) * (w.k_tiles * tile_bytes)
                inside = (slice_ * layout.SLICE_TILES + tile) * tile_bytes + layout.WEIGHT_BYTES + row * 8
                address = tiles + block + Int64(inside)
                if cutlass.const_expr(w.form == "words"):
                    codes[2 * i], codes[2 * i + 1] = ptx.ldg64(address)
                else:
                    codes[2 * i], codes[2 * i + 1] = ptx.ldg64_once(address)

    @cute.jit
    def load_bases(self, rows: cute.Tensor, bases: Int64, where: tuple):
        """Of each load the bases of its four rows, by fragment and half."""
        w = self.w
        group, _, _, origin, _ = where
        for i in cutlass.range_constexpr(LOADS):
            if cutlass.const_expr(i > 0 and w.form == "vectors"):
                rows[i] = rows[0]
            else:
                rows[i] = Uint32(0)
                x, _, row, _ = self.item(i, Int32(0), where)
                block = self.block(group, x)
                if x < w.span and block < w.blocks:
                    rows[i] = ptx.ldg32(bases + Int64(origin + block) * 32 + Int64(row * 4))
        for i in cutlass.range_constexpr(LOADS):
            rows[i] = rows[i] & Uint32(0x7F7F7F7F)

    @cute.jit
    def load_exceptions(
        self, found: cute.Tensor, info: cute.Tensor, record0: Uint32, records: Int64, lane: Int32
    ):
        """The lane's first exception of each block, and two of the further ones, whoever they belong to."""
        for x in cutlass.range_constexpr(self.w.span):
            for i in cutlass.range_constexpr(3):
                found[i, x] = Uint32(0)
            mask = info[0, x]
            if mask != 0:
                begin = record0 + (info[1, x] & Uint32(0xFFFFFF))
                if (mask >> Uint32(lane)) & Uint32(1) != 0:
                    below = mask & ((Uint32(1) << Uint32(lane)) - Uint32(1))
                    found[0, x] = ptx.ldg16(records + Int64(begin + cute.arch.popc(below)) * 2)
                further = Int32(info[1, x] >> Uint32(24))
                firsts = cute.arch.popc(mask)
                at = records + Int64(begin + firsts + (firsts & Uint32(1))) * 2 + Int64(lane * 4)
                if lane < further:
                    found[1, x] = ptx.ldg32(at)
                if lane + 32 < further:
                    found[2, x] = ptx.ldg32(at + 128)

    # ---- stores ----------------------------------------------------------------------------------

    @cute.jit
    def write(
        self, codes: cute.Tensor, rows: cute.Tensor, info: cute.Tensor, any_dense: Uint32, dense: Int64,
        dense0: Uint32, out: Int64, where: tuple, step: Int32,
    ):  # fmt: skip
        """Scales of one step. Word (j, i) of `words` holds four columns of load i, fragment j % 2 and half
        j // 2."""
        words = cute.make_rmem_tensor((4, LOADS), Uint32)
        for i in cutlass.range_constexpr(LOADS):
            spread = self.spread(codes[2 * i], codes[2 * i + 1])
            for j in cutlass.range_constexpr(4):
                byte = cutlass.const_expr(2 * (j % 2) + j // 2)
                words[j, i] = spread[j] + ptx.prmt(rows[i], Uint32(0), Uint32(0x1111 * byte))
        if Int32(any_dense) < 0:
            self.complete(words, codes, info, dense, dense0, where, step)
        if cutlass.const_expr(self.w.form == "vectors"):
            self.store_vectors(words, out, where)
        elif cutlass.const_expr(self.w.form == "words"):
            self.store_words(words, out, where)
        else:
            self.store_blocked(words, out, where, step)

    @cute.jit
    def spread(self, low: Uint32, high: Uint32):
        """The nibbles of four codes words, one to a byte: by j as in `write`."""
        first = ptx.prmt(low, high, Uint32(0x6420))
        second = ptx.prmt(low, high, Uint32(0x7531))
        mask = Uint32(NIBBLES)
        return first & mask, (first >> Uint32(4)) & mask, second & mask, (second >> Uint32(4)) & mask

    @cute.jit
    def complete(
        self, words: cute.Tensor, codes: cute.Tensor, info: cute.Tensor, dense: Int64, dense0: Uint32,
        where: tuple, step: Int32,
    ):  # fmt: skip
        """In dense slices a code is the lower nibble of the byte, and the upper ones lie in `dense`."""
        for i in cutlass.range_constexpr(LOADS):
            x, tile, row, exists = self.item(i, step, where)
            word = info[1, 0]
            for k in cutlass.range_constexpr(1, self.w.span):
                if x == k:
                    word = info[1, k]
            if exists and Int32(word) < 0:
                slot = Int64(dense0) + Int64(word & Uint32(0x7FFFFFFF)) + Int64(tile)
                low, high = ptx.ldg64(dense + slot * layout.CODE_BYTES + Int64(row * 8))
                lower = self.spread(codes[2 * i], codes[2 * i + 1])
                upper = self.spread(low, high)
                for j in cutlass.range_constexpr(4):
                    words[j, i] = lower[j] | (upper[j] << Uint32(4))

    @cute.jit
    def store_vectors(self, words: cute.Tensor, out: Int64, where: tuple):
        group, slice_, _, _, _ = where
        x, tile, row, exists = self.item(0, Int32(0), where)
        if exists:
            block = self.block(group, x)
            column = (slice_ * layout.SLICE_TILES + tile) * 4
            for j in cutlass.range_constexpr(4):
                at = out + self.place(self.row(block, j % 2, j // 2, row), column)
                ptx.stg128(at, words[j, 0], words[j, 1], words[j, 2], words[j, 3])

    @cute.jit
    def store_words(self, words: cute.Tensor, out: Int64, where: tuple):
        w = self.w
        group, slice_, _, _, _ = where
        for i in cutlass.range_constexpr(LOADS):
            x, tile, row, exists = self.item(i, Int32(0), where)
            if exists:
                block = self.block(group, x)
                column = (slice_ * layout.SLICE_TILES + tile) * 4
                for j in cutlass.range_constexpr(4):
                    at = out + self.place(self.row(block, j % 2, j // 2, row), column)
                    if cutlass.const_expr(w.grain == 4):
                        ptx.stg32(at, words[j, i])
                    else:
                        for b in cutlass.range_constexpr(0, 4, w.grain):
                            if column + b < w.plane.columns:
                                part = words[j, i] >> Uint32(8 * b)
                                if cutlass.const_expr(w.grain == 2):
                                    ptx.stg16(at + b, part)
                                else:
                                    ptx.stg8(at + b, part)

    @cute.jit
    def store_blocked(self, words: cute.Tensor, out: Int64, where: tuple, step: Int32):
        w = self.w
        group, slice_, count, _, lane = where
        tile = step * 4 + lane // 8
        row = lane % 8
        column = (slice_ * layout.SLICE_TILES + tile) * 4
        if cutlass.const_expr(w.plane.columns % 4):
            if w.plane.columns - column < 4:
                keep = (Uint32(1) << Uint32(8 * (w.plane.columns - column))) - Uint32(1)
                for i in cutlass.range_constexpr(LOADS):
                    for j in cutlass.range_constexpr(4):
                        words[j, i] = words[j, i] & keep
        if tile < count:
            if cutlass.const_expr(w.gated):
                self.store_gated(words, out, group, row, column)
            else:
                for j in cutlass.range_constexpr(4):
                    # Blocks that the last group lacks are the padding: their words are 0.
                    at = out + self.place(self.row(group * 4, j % 2, j // 2, row), column)
                    ptx.stg128(at, words[j, 0], words[j, 1], words[j, 2], words[j, 3])

    @cute.jit
    def store_gated(self, words: cute.Tensor, out: Int64, group: Int32, row: Int32, column: Int32):
        """Rows 32 apart: 16 bytes where they begin a tile of 128 rows, 8 or 4 where up starts within one."""
        w = self.w
        width = cutlass.const_expr(w.plane.rows // 2)
        first = self.block(group, Int32(0))
        whole = first + 6 < w.blocks
        for j in cutlass.range_constexpr(4):
            start = cutlass.const_expr(width * (j // 2) % 128)
            top = self.row(first, j % 2, j // 2, row)
            if cutlass.const_expr(start == 0):
                if whole:
                    at = out + self.place(top, column)
                    ptx.stg128(at, words[j, 0], words[j, 1], words[j, 2], words[j, 3])
            if cutlass.const_expr(start == 64):
                if whole:
                    for i in cutlass.range_constexpr(0, 4, 2):
                        ptx.stg64(out + self.place(top + 32 * i, column), words[j, i], words[j, i + 1])
            if cutlass.const_expr(start % 64 != 0):
                whole = cutlass.Boolean(False)
            if not whole:
                for i in cutlass.range_constexpr(4):
                    if first + 2 * i < w.blocks:
                        ptx.stg32(out + self.place(top + 32 * i, column), words[j, i])
        if cutlass.const_expr(w.plane.rows % 128):
            if group // 2 == (w.blocks - 1) // 8:
                self.pad_rows(out, group, row, column)

    @cute.jit
    def pad_rows(self, out: Int64, group: Int32, row: Int32, column: Int32):
        """Zeros below the last row of a gated plane: the rows that are this lane's among each 32."""
        rows = cutlass.const_expr(self.w.plane.rows)
        for r in cutlass.range_constexpr(rows, -(-rows // 128) * 128, 32):
            for f in cutlass.range_constexpr(2):
                ptx.stg32(out + self.place(r + group % 2 * 16 + f * 8 + row, column), Uint32(0))

    # ---- exceptions ------------------------------------------------------------------------------

    @cute.jit
    def write_exceptions(
        self, found: cute.Tensor, info: cute.Tensor, out: Int64, where: tuple, begin: Int32, end: Int32
    ):
        """Those of the tiles [begin, end) of the slice."""
        group, _, _, _, lane = where
        for x in cutlass.range_constexpr(self.w.span):
            mask = info[0, x]
            if mask != 0:
                block = self.block(group, Int32(x))
                further = Int32(info[1, x] >> Uint32(24))
                if (mask >> Uint32(lane)) & Uint32(1) != 0:
                    self.write_exception(found[0, x], lane, block, out, where, begin, end)
                for i in cutlass.range_constexpr(2):
                    if lane + 32 * i < further:
                        record = found[1 + i, x]
                        owner = Int32(record & Uint32(31))
                        self.write_exception(
                            record >> Uint32(16), owner, block, out, where, begin, end
                        )  # fmt: skip

    @cute.jit
    def write_exception(
        self, record: Uint32, owner: Int32, block: Int32, out: Int64, where: tuple, begin: Int32, end: Int32
    ):
        """`record`: tile of the slice << 10 | fragment << 9 | half << 8 | byte; `owner`: its lane."""
        w = self.w
        _, slice_, _, _, _ = where
        tile = Int32(record >> Uint32(10))
        fragment = Int32((record >> Uint32(9)) & Uint32(1))
        half = Int32((record >> Uint32(8)) & Uint32(1))
        row = self.row(block, fragment, half, owner // 4)
        column = (slice_ * layout.SLICE_TILES + tile) * 4 + owner % 4
        wanted = column < w.plane.columns
        if cutlass.const_expr(w.form == "blocked"):
            wanted = wanted and tile >= begin and tile < end
        if wanted:
            ptx.stg8(out + self.place(row, column), record)
