"""What comes with a slice of weights: scale bases and exceptions, requested ahead and queued by lane."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import layout, ptx
from .dequant import QUEUE_BYTES, Dequant
from .stream import bounds


class Slices:
    """Device code. A visit is the part of a slice (16 tiles of each row block) that a warp takes."""

    def __init__(self, blocks: int, chunk_tiles: int, dequant: Dequant):
        self.blocks = blocks
        self.chunk_tiles = chunk_tiles
        self.dequant = dequant

    @cute.jit
    def next_visit(self, share: tuple, item: Int32, visit: Int32):
        """The slice that a warp comes to after this one."""
        _, end = bounds(share, item)
        visit += 1
        if visit * layout.SLICE_TILES >= end * self.chunk_tiles:
            item -= 1
            begin, _ = bounds(share, item)
            visit = begin * self.chunk_tiles // layout.SLICE_TILES
        return item, visit

    @cute.jit
    def load_info(
        self,
        info: cute.Tensor,
        slices: Int64,
        origin: Int32,
        item: Int32,
        visit: Int32,
        low: Int32,
        k_tiles: Int32,
    ):
        """The two words of a slice of each row block; zeros below the work tile's last item of ours."""
        count = (k_tiles + (layout.SLICE_TILES - 1)) // layout.SLICE_TILES
        for r in cutlass.range_constexpr(self.blocks):
            info[0, r] = Uint32(0)
            info[1, r] = Uint32(0)
            if item >= low and visit < count:
                index = (origin + item * self.blocks + r) * count + visit
                info[0, r], info[1, r] = ptx.ldg64(slices + Int64(index) * 8)

    @cute.jit
    def load_exceptions(
        self, found: cute.Tensor, info: cute.Tensor, record0: Uint32, records: Int64, lane: Int32
    ):
        """The lane's first exception of the slice, and two of the further ones, whoever they belong to."""
        for r in cutlass.range_constexpr(self.blocks):
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
    def load_bases(
        self, words: cute.Tensor, bases: Int64, origin: Int32, item: Int32, low: Int32, lane: Int32
    ):
        """The bases of the four rows of this lane in each row block, one byte each."""
        if cutlass.const_expr(not self.dequant.native):
            if item >= low:
                for r in cutlass.range_constexpr(self.blocks):
                    block = origin + item * self.blocks + r
                    words[r] = ptx.ldg32(bases + Int64(block) * 32 + Int64(lane // 4 * 4))

    @cute.jit
    def start_slice(
        self, info: cute.Tensor, next_info: cute.Tensor, exceptions: cute.Tensor, heads: cute.Tensor,
        queue: cute.Tensor, pending: cute.Tensor | None, dense_rows: cute.Tensor, dense: Int64,
        dense0: Uint32, queues: Int32, slice_tile: Int32, lane: Int32, fragment: Int32 | None = None,
    ):  # fmt: skip
        """Queues the slice's exceptions; returns a bit for each row block that is dense here. `pending`,
        where wanted: of each row block, or one `fragment` of it, see `Dequant.pending`."""
        any_dense = Int32(0)
        for r in cutlass.range_constexpr(self.blocks):
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
            if cutlass.const_expr(pending is not None):
                pending[r] = Uint32(0)
                if mask != 0:
                    pending[r] = self.dequant.pending(
                        heads[r], further, exceptions[1, r], exceptions[2, r], lane, fragment
                    )
            if slice_tile > 0:
                heads[r], queue[0, r] = self.dequant.skip(
                    heads[r], queue[0, r], queue[1, r], Uint32(slice_tile) << Uint32(26), further
                )
        return any_dense
