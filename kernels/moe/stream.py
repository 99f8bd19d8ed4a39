"""The stream of one warp: its slice of the weights of consecutive work items, through a ring of slots.

A warp fills its ring by itself (bulk copies from sm_90 on, cp.async before), runs ahead of its own use by
`stages` chunks and never waits for another warp. A chunk is `chunk_tiles` tiles of each row block of an
item. The state of a stream are five numbers: chunks left of all and of the current item, work tile, items
left in the work tile, address.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import layout, ptx


@dataclass(frozen=True)
class StreamConfig:
    native: bool
    blocks: int
    chunk_tiles: int
    stages: int
    bulk: bool

    @property
    def tile_bytes(self) -> int:
        return layout.WEIGHT_BYTES + layout.CODE_BYTES * (2 if self.native else 1)

    @property
    def slot_bytes(self) -> int:
        return self.blocks * self.chunk_tiles * self.tile_bytes

    @property
    def shared_bytes(self) -> int:
        """Of one warp: slots, then their barriers."""
        return self.stages * (self.slot_bytes + 8)


class Stream:
    """Device code; `geometry` = (tiles, entries, row_blocks, tile_items, block_bytes, tile0, chunks, rest, jump, policy):
    addresses of weights and work tiles; row blocks and items of an expert; bytes of a row block; the slice's
    first tile, its chunks, the bytes of its last chunk; from one item's end to the next item's start."""

    def __init__(self, config: StreamConfig):
        self.c = config

    @cute.jit
    def init_barriers(self, bars: Int32, lane: Int32):
        if cutlass.const_expr(self.c.bulk):
            if lane == 0:
                for s in cutlass.range_constexpr(self.c.stages):
                    ptx.mbarrier_init(bars + s * 8, 1)
                ptx.mbarrier_init_fence()
            cute.arch.sync_warp()

    @cute.jit
    def wait(self, bar: Int32, phase: Int32):
        """Until the oldest chunk has arrived."""
        if cutlass.const_expr(self.c.bulk):
            ptx.mbarrier_wait(bar, phase)
        else:
            ptx.cp_async_wait(self.c.stages - 1)
            cute.arch.sync_warp()

    @cute.jit
    def start(self, geometry: tuple, entry: Int32, index: Int32):
        """Address of this warp's first tile in item `index` of a work tile."""
        tiles, entries, row_blocks, _, block_bytes, tile0, _, _, _, _ = geometry
        expert = Int32(ptx.ldg32(entries + 16 + Int64(entry) * 16))
        block = Int64(expert) * Int64(row_blocks) + Int64(index * self.c.blocks)
        return tiles + block * block_bytes + Int64(tile0 * self.c.tile_bytes)

    @cute.jit
    def fill(self, state: tuple, geometry: tuple, slot: Int32, bar: Int32, lane: Int32):
        """Requests the next chunk into `slot`; returns the new state."""
        todo, left, entry, within, address = state
        _, _, _, tile_items, block_bytes, _, chunks, rest, jump, policy = geometry
        full = cutlass.const_expr(self.c.chunk_tiles * self.c.tile_bytes)
        if todo > 0:
            size = Int32(full)
            if left == 1:
                size = rest
            self.copy(slot, address, size, block_bytes, bar, lane, policy)
            address += Int64(full)
            todo -= 1
            left -= 1
            if left == 0:
                left = chunks
                within -= 1
                address += jump
                if within == 0 and todo > 0:
                    entry += 1
                    within = tile_items
                    address = self.start(geometry, entry, Int32(0))
        if cutlass.const_expr(not self.c.bulk):
            ptx.cp_async_commit()
        return todo, left, entry, within, address

    @cute.jit
    def copy(
        self, slot: Int32, address: Int64, size: Int32, block_bytes: Int64, bar: Int32, lane: Int32, policy: Int64
    ):
        c = self.c
        if cutlass.const_expr(c.bulk):
            with cute.arch.elect_one():
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
