"""The stream of one warp: its share of the weights, through a ring of slots in shared memory.

A warp fills its ring by itself (bulk copies from sm_90 on, cp.async before), runs ahead of its own use by
`stages` chunks and never waits for another warp. A chunk is `chunk_tiles` tiles of each row block of an
item. Items come in descending order; of each a warp takes the chunks [a, b) along K, `Share` says which.
The state of a stream: chunks left, item, chunk and its end in the item, address.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import layout, ptx
from .route import Route


@dataclass(frozen=True)
class StreamConfig:
    native: bool
    blocks: int
    chunk_tiles: int
    stages: int
    bulk: bool

    def __post_init__(self) -> None:
        if layout.SLICE_TILES % self.chunk_tiles:
            raise ValueError(f"chunk_tiles is {self.chunk_tiles}; expected a divisor of {layout.SLICE_TILES}")

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


@cute.jit
def bounds(share: tuple, item: Int32):
    """The chunks [a, b) of an item that a warp with this share takes."""
    first, last, a_first, a_other, b_last, b_other = share
    a = a_other
    if item == first:
        a = a_first
    b = b_other
    if item == last:
        b = b_last
    return a, b


class Stream:
    """Device code of a stream. `geometry`: addresses of weights and work tiles, row blocks and items of an
    expert, tiles along K, bytes of a row block, L2 policy. `share`: first and last item, first chunk in
    the first and in the other items, last chunk of the last and of the other items."""

    def __init__(self, config: StreamConfig, route: Route):
        self.c = config
        self.route = route

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
    def begin(self, geometry: tuple, share: tuple):
        """The state before anything is requested."""
        first, last, a_first, a_other, b_last, b_other = share
        a, b = bounds(share, last)
        todo = b - a
        address = Int64(0)
        if last > first:
            todo += (b_other - a_first) + (last - first - 1) * (b_other - a_other)
        if last < first:
            todo = Int32(0)
        if todo > 0:
            address = self.start(geometry, last, a)
        return todo, last, a, b, address

    @cute.jit
    def start(self, geometry: tuple, item: Int32, chunk: Int32):
        """Address of a chunk of an item's first row block."""
        tiles, entries, row_blocks, tile_items, _, block_bytes, _ = geometry
        entry = item // tile_items
        expert, _, _ = self.route.entry(entries, entry)
        block = Int64(expert) * Int64(row_blocks) + Int64((item - entry * tile_items) * self.c.blocks)
        return tiles + block * block_bytes + Int64(chunk * (self.c.chunk_tiles * self.c.tile_bytes))

    @cute.jit
    def fill(self, state: tuple, geometry: tuple, share: tuple, slot: Int32, bar: Int32, lane: Int32):
        """Requests the next chunk into `slot`; returns the new state."""
        todo, item, chunk, end, address = state
        _, _, _, _, k_tiles, block_bytes, policy = geometry
        full = cutlass.const_expr(self.c.chunk_tiles * self.c.tile_bytes)
        if todo > 0:
            size = (k_tiles - chunk * self.c.chunk_tiles) * self.c.tile_bytes
            if size > full:
                size = Int32(full)
            self.copy(slot, address, size, block_bytes, bar, lane, policy)
            address += Int64(full)
            todo -= 1
            chunk += 1
            if chunk == end and todo > 0:
                item -= 1
                chunk, end = bounds(share, item)
                address = self.start(geometry, item, chunk)
        if cutlass.const_expr(not self.c.bulk):
            ptx.cp_async_commit()
        return todo, item, chunk, end, address

    @cute.jit
    def copy(
        self,
        slot: Int32,
        address: Int64,
        size: Int32,
        block_bytes: Int64,
        bar: Int32,
        lane: Int32,
        policy: Int64,
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
