"""From packed FP4 words and compressed scales to bf16 operands, in registers.

A scale is carried as the bf16 pattern of the scale times 2^119: for the E4M3 bytes 8 .. 126 that is
`(byte << 4) + 0x7780`, so base and code add in place. FP4 bits, masked into a bf16, are the value times
2^-126 (bf16 subnormals included). One multiplication gives FP4 x scale x 2^-7, exactly.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import layout, ptx

PAIR_MASK = 0x81C081C0
BIAS2 = 0x77807780
EMPTY = 0xFFFFFFFF  # sorts behind the exceptions of all tiles
QUEUE_BYTES = 4 * layout.MAX_DEPTH  # of one lane


class Dequant:
    """Device functions; `native`: tiles hold whole bytes; `fma`: no bf16 multiply (sm_80 .. sm_89)."""

    def __init__(self, native: bool, fma: bool):
        self.native = native
        self.fma = fma

    # ---- scales ----------------------------------------------------------------------------------

    @cute.jit
    def base_pairs(self, word: Uint32):
        """bf16 patterns of the bases of rows r and r + 8, for both fragments; 0 for rows of zeros."""
        first = Uint32(BIAS2)
        second = Uint32(BIAS2)
        if cutlass.const_expr(not self.native):
            # Bytes 0, 1 and 2, 3 spread over halves; the row flag, replicated, masks rows of zeros.
            first = ptx.prmt(word, Uint32(0), Uint32(0x4140)) * Uint32(16) + Uint32(BIAS2 - 0x08000800)
            second = ptx.prmt(word, Uint32(0), Uint32(0x4342)) * Uint32(16) + Uint32(BIAS2 - 0x08000800)
            first = first & ptx.prmt(word, Uint32(0), Uint32(0x9988))
            second = second & ptx.prmt(word, Uint32(0), Uint32(0xBBAA))
        return first, second

    @cute.jit
    def scales(self, address: Int32, base0: Uint32, base1: Uint32, lane: Int32):
        """The lane's scales in one tile: bf16 pairs (rows r, r + 8) of the two fragments."""
        return self.scales_of(self.codes(address, lane), base0, base1)

    @cute.jit
    def codes(self, address: Int32, lane: Int32):
        """The lane's codes in one tile, as they lie there."""
        codes = address + layout.WEIGHT_BYTES
        if cutlass.const_expr(self.native):
            return ptx.lds32(codes + lane * 4)
        return ptx.lds16(codes + lane * 2)

    @cute.jit
    def scales_of(self, codes: Uint32, base0: Uint32, base1: Uint32):
        if cutlass.const_expr(self.native):
            sv0 = (codes & Uint32(0x00FF00FF)) * Uint32(16) + base0
            sv1 = ((codes >> Uint32(4)) & Uint32(0x0FF00FF0)) + base1
        else:
            word = ptx.prmt(codes, Uint32(0), Uint32(0x4140))
            sv0 = (word & Uint32(0x000F000F)) * Uint32(16) + base0
            sv1 = (word & Uint32(0x00F000F0)) + base1
        return sv0, sv1

    @cute.jit
    def split(self, fragment: Int32):
        """What `scales_of_one` finds a fragment's codes with."""
        if cutlass.const_expr(self.native):
            return Uint32(0x4240) + Uint32(fragment) * Uint32(0x0101), Uint32(16)
        return Uint32(0x000F000F) << Uint32(fragment * 4), Uint32(16) >> Uint32(fragment * 4)

    @cute.jit
    def scales_of_one(self, codes: Uint32, split: tuple, base: Uint32):
        """As `scales_of`, of one fragment, whose base is given."""
        if cutlass.const_expr(self.native):
            word = ptx.prmt(codes, Uint32(0), split[0])
        else:
            word = ptx.prmt(codes, Uint32(0), Uint32(0x4140)) & split[0]
        return word * split[1] + base

    @cute.jit
    def dense_scales(self, address: Int32, lane: Int32, dense_row: Int64, tile: Int32):
        """As `scales`, of a slice that keeps whole bytes: their upper nibbles lie at `dense_row`."""
        codes = address + layout.WEIGHT_BYTES
        if cutlass.const_expr(self.native):
            word = ptx.lds32(codes + lane * 4)
            first = (word & Uint32(0x00FF00FF)) << Uint32(4)
            second = (word >> Uint32(4)) & Uint32(0x0FF00FF0)
        else:
            word = ptx.prmt(ptx.lds16(codes + lane * 2), Uint32(0), Uint32(0x4140))
            above = ptx.ldg16(dense_row + Int64(tile) * layout.CODE_BYTES + Int64(lane * 2))
            above = ptx.prmt(above, Uint32(0), Uint32(0x4140))
            first = ((word & Uint32(0x000F000F)) << Uint32(4)) | ((above & Uint32(0x000F000F)) << Uint32(8))
            second = (word & Uint32(0x00F000F0)) | ((above & Uint32(0x00F000F0)) << Uint32(4))
        return self.any_scales(first), self.any_scales(second)

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

    # ---- exceptions ------------------------------------------------------------------------------

    @cute.jit
    def queue_word(self, word: Uint32):
        """An exception as it waits: tile << 26, fragment << 25, half << 24, scale pattern."""
        return ((word & Uint32(0x3F00)) << Uint32(16)) | self.any_scales((word & Uint32(0xFF)) << Uint32(4))

    @cute.jit
    def queue_exceptions(
        self,
        mask: Uint32,
        further: Int32,
        first: Uint32,
        deep0: Uint32,
        deep1: Uint32,
        table: Int32,
        lane: Int32,
    ):
        """Hands a slice's exceptions to the lanes that use them.

        `first`: the lane's own first one, if `mask` says that it has one; `deep0`, `deep1`: the further
        ones, spread over the lanes; `table`: the warp's queues in shared memory. Returns the lane's head
        of queue, and where its further ones start and end.
        """
        head = Uint32(EMPTY)
        if (mask >> Uint32(lane)) & Uint32(1) != 0:
            head = self.queue_word(first)
        mine = table + lane * QUEUE_BYTES
        end = mine
        if further > 0:
            end = mine + QUEUE_BYTES
            cute.arch.sync_warp()
            for d in cutlass.range_constexpr(layout.MAX_DEPTH):
                ptx.sts32(mine + d * 4, Uint32(EMPTY))
            cute.arch.sync_warp()
            if lane < further:
                self.enqueue(deep0, table)
            if further > 32:
                if lane + 32 < further:
                    self.enqueue(deep1, table)
            cute.arch.sync_warp()
        return head, mine, end

    @cute.jit
    def enqueue(self, record: Uint32, table: Int32):
        owner = Int32(record & Uint32(31))
        depth = Int32((record >> Uint32(5)) & Uint32(7))
        ptx.sts32(table + owner * QUEUE_BYTES + depth * 4, self.queue_word(record >> Uint32(16)))

    @cute.jit
    def advance(self, queue: Int32, end: Int32):
        """The next exception of the lane."""
        head = Uint32(EMPTY)
        if queue < end:
            head = ptx.lds32(queue)
        return head, queue + 4

    @cute.jit
    def skip(self, head: Uint32, queue: Int32, end: Int32, bound: Uint32, further: Int32):
        """Drops the exceptions of tiles before the one where a warp starts."""
        if further > 0:
            more = cute.arch.vote_any_sync(head < bound)
            while more:
                if head < bound:
                    head, queue = self.advance(queue, end)
                more = cute.arch.vote_any_sync(head < bound)
        elif head < bound:
            head = Uint32(EMPTY)
        return head, queue

    @cute.jit
    def pending(
        self, head: Uint32, further: Int32, deep0: Uint32, deep1: Uint32, lane: Int32,
        fragment: Int32 | None = None,
    ):  # fmt: skip
        """Which tiles of a slice have exceptions, in one fragment where it is given, the same word in every
        lane: a bit each, and bit 31 where lanes have further ones in their queues."""
        found = self.tile_bit(head, fragment)
        if further > 0:
            found = found | Uint32(1 << 31)
            if lane < further:
                found = found | self.tile_bit(deep0, fragment)
            if lane + 32 < further:
                found = found | self.tile_bit(deep1, fragment)
        return ptx.warp_or(found)

    @cute.jit
    def tile_bit(self, exception: Uint32, fragment: Int32 | None):
        """A bit for an exception's tile; none for EMPTY, and for the other fragment."""
        tile = exception >> Uint32(26)
        if cutlass.const_expr(fragment is not None):
            tile = tile | (((exception >> Uint32(20)) ^ (Uint32(fragment) << Uint32(5))) & Uint32(32))
        return ptx.bit(tile)

    @cute.jit
    def patch(self, sv0: Uint32, sv1: Uint32, head: Uint32, queue: Int32, end: Int32, bound: Uint32):
        """Replaces scales that are exceptions; each lane takes its own below `bound` in turn."""
        more = cute.arch.vote_any_sync(head < bound)
        while more:
            sv0, sv1, head, after = ptx.patch_pairs(sv0, sv1, head, queue, end, bound)
            queue = Int32(after)
            more = cute.arch.vote_any_sync(head < bound)
        return sv0, sv1, head, queue

    @cute.jit
    def patch_pending(
        self, sv0: Uint32, sv1: Uint32, head: Uint32, queue: Int32, end: Int32, bound: Uint32, pending: Uint32
    ):  # fmt: skip
        """As `patch`, with fewer instructions; to be called where the tile's bit of `pending` is set."""
        sv0, sv1, head, queue = ptx.patch_pairs(sv0, sv1, head, queue, end, bound)
        if Int32(pending) < 0:
            more = cute.arch.vote_any_sync(head < bound)
            while more:
                sv0, sv1, head, queue = ptx.patch_pairs(sv0, sv1, head, queue, end, bound)
                more = cute.arch.vote_any_sync(head < bound)
        return sv0, sv1, head, queue

    # ---- weights ---------------------------------------------------------------------------------

    @cute.jit
    def fragment(self, word: Uint32, scale: Uint32):
        """Eight FP4 values times their rows' scales: one A fragment of m16n8k16 (four words)."""
        last = self.values(word, 3)
        return tuple(self.scaled(last if i == 3 else self.values(word, i), scale, i) for i in range(4))

    @cute.jit
    def values(self, word: Uint32, i: cutlass.Constexpr):
        """The FP4 bits of one of a fragment's words, in their places in bf16."""
        mask = Uint32(PAIR_MASK)
        if cutlass.const_expr(i == 3):
            return ptx.and_or(word >> Uint32(8), Uint32(0x00400040), word & Uint32(0x81808180))
        if cutlass.const_expr(i == 2):
            return ptx.rotate_right(word, 4) & mask
        return (word << Uint32(2 + 4 * i)) & mask

    @cute.jit
    def scaled(self, values: Uint32, scale: Uint32, i: cutlass.Constexpr):
        """What `values` found, times their rows' scale."""
        return ptx.mul_bf16x2_by_half(values, scale, i % 2 == 1, self.fma)
