"""What the packing programs share: where a CTA's rows lie, and four scales at a time.

A lane holds the scales of four tiles of a slice, four columns each, as one word for each of its four rows, in
the order of `PLACES`: (fragment 0, half 0), (0, 1), (1, 0), (1, 1). Byte c of a word is column c of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import layout, ptx
from .packer import STEPS

LOADS = 4  # tiles of a slice that a lane takes
PLACES = 4  # fragment, half: rows of a lane
LOW, ONES = 0x0F0F0F0F, 0x01010101


@dataclass(frozen=True)
class PackConfig:
    step: str
    native: bool = False

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise ValueError(f"step is {self.step!r}; expected one of {', '.join(STEPS)}")

    @property
    def tile_bytes(self) -> int:
        return layout.WEIGHT_BYTES + layout.CODE_BYTES * (2 if self.native else 1)


class Step:
    """What both programs share. `geometry`: rows and tiles along K of a matrix, and how far apart, in source
    rows, row blocks, fragments and halves lie."""

    def __init__(self, config: PackConfig):
        self.c = config

    @cute.jit
    def first_row(self, geometry: tuple, r: Int32):
        """Source row, counted over all experts, of fragment 0, half 0 and row `r` of this CTA's block."""
        rows, _, block_rows, _, _ = geometry
        block, expert, _ = cute.arch.block_idx()
        return Int64(expert) * rows + Int64(block * block_rows + r)

    @cute.jit
    def block_number(self):
        """Of this CTA's row block, over all experts."""
        block, expert, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return Int64(expert) * blocks + Int64(block)

    @cute.jit
    def load(
        self, words: cute.Tensor, rows: cute.Tensor, scale: Int64, geometry: tuple, slice_: Int32, lane: Int32
    ):
        """words [LOADS, PLACES]: the lane's scales, and in place of tiles that the slice lacks its bases, of
        which codes are made without exceptions."""
        _, k_tiles, _, fragment_rows, half_rows = geometry
        top = self.first_row(geometry, lane // 4)
        for j in cutlass.range_constexpr(PLACES):
            row = top + Int64(j // 2 * fragment_rows + j % 2 * half_rows)
            for i in cutlass.range_constexpr(LOADS):
                tile = slice_ * layout.SLICE_TILES + 4 * i + lane % 4
                there = cutlass.min(tile, k_tiles - 1)  # no branch around a load
                words[i, j] = ptx.ldg32(scale + (row * k_tiles + Int64(there)) * 4)
                if tile >= k_tiles:
                    words[i, j] = rows[j]

    @cute.jit
    def code(self, word: Uint32, base: Uint32):
        """Codes of four scales (native: the bytes), 0 for exceptions, and 1 in the bytes of these.

        base: of the row, in all four bytes.
        """
        sign = Uint32(0x80808080)
        if cutlass.const_expr(self.c.native):
            low = word & Uint32(0x7F7F7F7F)
            above = (low + Uint32((127 - layout.HIGHEST_CODED) * ONES)) | word
            below = (low + Uint32((128 - layout.LOWEST_CODED) * ONES)) ^ sign
            odd = ((above | below) >> Uint32(7)) & Uint32(ONES)
            return word & ((odd * Uint32(255)) ^ Uint32(0xFFFFFFFF)), odd
        # Bytewise word - base: no byte of a base has its upper bit.
        code = ((word | sign) - base) ^ ((word & sign) ^ sign)
        beyond = (code >> Uint32(4)) & Uint32(LOW)
        if base == 0:
            beyond = beyond | (code & Uint32(LOW))  # in a row of zeros only they have a code
        odd = ((beyond + Uint32(LOW)) >> Uint32(4)) & Uint32(ONES)
        return code & Uint32(LOW) & ((odd * Uint32(15)) ^ Uint32(0xFFFFFFFF)), odd

    @cute.jit
    def exceptions(self, words: cute.Tensor, rows: cute.Tensor, lane: Int32):
        """Of the lane 4 row + column: one bit for each exception in the slice, in the order of their places
        (tile, fragment, half): two words."""
        packed = cute.make_rmem_tensor(2, Uint32)
        found = cute.make_rmem_tensor(2, Uint32)
        for half in cutlass.range_constexpr(2):
            packed[half] = Uint32(0)
            found[half] = Uint32(0)
            for i in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(PLACES):
                    _, odd = self.code(words[2 * half + i, j], rows[j])
                    packed[half] = packed[half] | (odd << Uint32(4 * i + j))
        if cute.arch.vote_ballot_sync((packed[0] | packed[1]) != 0) != 0:
            # Byte c of a lane's words is column c, which belongs to the lane c of its four.
            for x in cutlass.range_constexpr(4):
                for half in cutlass.range_constexpr(2):
                    other = Uint32(cute.arch.shuffle_sync(packed[half], (lane // 4) * 4 + x))
                    mine = (other >> Uint32(lane % 4 * 8)) & Uint32(255)
                    places = ((mine & Uint32(15)) | ((mine >> Uint32(4)) << Uint32(16))) << Uint32(4 * x)
                    found[half] = found[half] | places
        return found[0], found[1]

    @cute.jit
    def joined(self, codes: cute.Tensor):
        """Of codes [PLACES] the four 16-bit words of four lanes: two words."""
        first = codes[0] | (codes[2] << Uint32(4))
        second = codes[1] | (codes[3] << Uint32(4))
        return ptx.prmt(first, second, Uint32(0x5140)), ptx.prmt(first, second, Uint32(0x7362))


@cute.jit
def geometry_of(rows: Int32, k_tiles: Int32, gated: Int32):
    """See `Step`."""
    block_rows = Int32(layout.TILE_ROWS)
    fragment_rows = Int32(16)
    half_rows = Int32(8)
    if gated != 0:
        block_rows = Int32(16)
        fragment_rows = Int32(8)
        half_rows = rows // 2
    return rows, k_tiles, block_rows, fragment_rows, half_rows


@cute.jit
def transposed(codes: cute.Tensor):
    """Of native bytes [PLACES] of four columns: a word for each column, by half, then fragment."""
    first = ptx.prmt(codes[0], codes[2], Uint32(0x5140)), ptx.prmt(codes[1], codes[3], Uint32(0x5140))
    second = ptx.prmt(codes[0], codes[2], Uint32(0x7362)), ptx.prmt(codes[1], codes[3], Uint32(0x7362))
    return (
        ptx.prmt(*first, Uint32(0x5410)),
        ptx.prmt(*first, Uint32(0x7632)),
        ptx.prmt(*second, Uint32(0x5410)),
        ptx.prmt(*second, Uint32(0x7632)),
    )
