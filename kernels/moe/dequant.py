"""From packed FP4 words and compressed scales to bf16 operands, in registers.

A scale is carried as the bf16 pattern of the scale times 2^119: for the E4M3 bytes 8 .. 126 that is
`(byte << 4) + 0x7780`, so base and code add in place. FP4 bits, masked into a bf16, are the value times
2^-126 (bf16 subnormals included). One multiplication gives FP4 x scale x 2^-7, exactly.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import layout, ptx

PAIR_MASK = 0x81C081C0
BIAS = 0x7780
BIAS2 = 0x77807780


class Dequant:
    """Device functions; `native`: tiles hold whole bytes; `fma`: no bf16 multiply (sm_80 .. sm_89)."""

    def __init__(self, native: bool, fma: bool):
        self.native = native
        self.fma = fma

    @cute.jit
    def record(self, raw: Uint32):
        """An exception record's byte (bits 16 .. 23) to its scale pattern; all ones stay an empty record."""
        byte = (raw >> Uint32(16)) & Uint32(0xFF)
        magnitude = byte & Uint32(0x7F)
        bits = (magnitude << Uint32(4)) + Uint32(BIAS)
        if magnitude < 8:
            # magnitude * 2^-9 * 2^119
            bits = ptx.float_bits(Float32(Int32(magnitude)) * Float32(2.0**110)) >> Uint32(16)
        if magnitude == 0x7F:
            bits = Uint32(0x7FC0)
        bits = bits | ((byte & Uint32(0x80)) << Uint32(8))
        return (raw & Uint32(0xFFFF)) | (bits << Uint32(16))

    @cute.jit
    def tiles_hit(self, first: Uint32, second: Uint32):
        """Bit t % 32 is set where tile t of the slice has an exception among the warp's raw records."""
        mine = Uint32(0)
        for raw in (first, second):
            if raw != 0xFFFFFFFF:
                mine = mine | (Uint32(1) << ((raw >> Uint32(7)) & Uint32(31)))
        return Uint32(ptx.reduce_or(mine))

    @cute.jit
    def base_pairs(self, word: Uint32):
        """bf16 patterns of the bases of rows r and r + 8, for both fragments; 0 for rows of zeros."""
        first = Uint32(BIAS2)
        second = Uint32(BIAS2)
        if cutlass.const_expr(not self.native):
            halves = []
            for i in cutlass.range_constexpr(4):
                base = (word >> Uint32(8 * i)) & Uint32(0xFF)
                bits = (base << Uint32(4)) + Uint32(BIAS)
                if base == 0:
                    bits = Uint32(0)
                halves.append(bits)
            first = halves[0] | (halves[1] << Uint32(16))
            second = halves[2] | (halves[3] << Uint32(16))
        return first, second

    @cute.jit
    def scales(self, address: Int32, base0: Uint32, base1: Uint32, lane: Int32, is_dense: Int32, dense_row: Int64, tile: Int32):
        """The lane's scales in one tile: bf16 pairs (rows r, r + 8) of the two fragments."""
        codes = address + layout.WEIGHT_BYTES
        if cutlass.const_expr(self.native):
            word = ptx.lds32(codes + lane * 4)
            sv0 = (word & Uint32(0x00FF00FF)) * Uint32(16) + base0
            sv1 = ((word >> Uint32(4)) & Uint32(0x0FF00FF0)) + base1
            if is_dense != 0:
                sv0 = self.any_scales((word & Uint32(0x00FF00FF)) << Uint32(4))
                sv1 = self.any_scales((word >> Uint32(4)) & Uint32(0x0FF00FF0))
        else:
            word = ptx.prmt(ptx.lds16(codes + lane * 2), Uint32(0), Uint32(0x4140))
            sv0 = (word & Uint32(0x000F000F)) * Uint32(16) + base0
            sv1 = (word & Uint32(0x00F000F0)) + base1
            if is_dense != 0:
                above = ptx.ldg16(dense_row + Int64(tile) * layout.CODE_BYTES + Int64(lane * 2))
                above = ptx.prmt(above, Uint32(0), Uint32(0x4140))
                low = (word & Uint32(0x000F000F)) << Uint32(4)
                sv0 = self.any_scales(low | ((above & Uint32(0x000F000F)) << Uint32(8)))
                low = word & Uint32(0x00F000F0)
                sv1 = self.any_scales(low | ((above & Uint32(0x00F000F0)) << Uint32(4)))
        return sv0, sv1

    @cute.jit
    def any_scales(self, bits: Uint32):
        """Two E4M3 bytes, each shifted left by 4 in its half, to scale patterns."""
        magnitude = bits & Uint32(0x07F007F0)
        value = ptx.mul_bf16x2(magnitude, Uint32(0x7B807B80), self.fma)  # 2^120
        value = ptx.mul_bf16x2(value, Uint32(0x7B007B00), self.fma)  # 2^119
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

    @cute.jit
    def fragment(self, word: Uint32, scale: Uint32):
        """Eight FP4 values times their rows' scales: one A fragment of m16n8k16 (four words)."""
        mask = Uint32(PAIR_MASK)
        last = ptx.and_or(word >> Uint32(8), Uint32(0x00400040), word & Uint32(0x81808180))
        return (
            ptx.mul_bf16x2_by_half((word << Uint32(2)) & mask, scale, False, self.fma),
            ptx.mul_bf16x2_by_half((word << Uint32(6)) & mask, scale, True, self.fma),
            ptx.mul_bf16x2_by_half(ptx.rotate_right(word, 4) & mask, scale, False, self.fma),
            ptx.mul_bf16x2_by_half(last, scale, True, self.fma),
        )
