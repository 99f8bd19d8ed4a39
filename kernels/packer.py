"""The host's side of packing on the GPU: `Packer` makes of a stack what `layout.pack` makes, byte for byte.

The programs (`pack_kernels`) are given from outside: this module compiles nothing and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from . import layout
from .layout import PreparedMatrix, Shape

TILES, RECORDS = "tiles", "records"
STEPS = (TILES, RECORDS)
SLOT_SHIFT = 16  # a slice's size is its words | its slots << 16


@dataclass(frozen=True)
class Packer:
    """`programs`: by step, compiled for compressed or native scales as the stacks are that it packs."""

    programs: Mapping[str, Callable]

    def pack_groups(
        self, groups: Iterable[tuple[slice, torch.Tensor, torch.Tensor]], shape: Shape, device: torch.device
    ) -> PreparedMatrix:
        """A stack in groups of experts, each with its weights and scales as `layout.pack` takes them, so that
        only one group's temporaries are on the device at a time. Waits for the device once a group."""
        e, blocks = shape.experts, shape.row_blocks
        tiles = torch.empty(e, blocks, shape.k_tiles, shape.tile_bytes, dtype=torch.uint8, device=device)
        bases = torch.empty(0 if shape.native else e, blocks, 8, 4, dtype=torch.uint8, device=device)
        slices = torch.empty(e, blocks, shape.slices, 2, dtype=torch.int32, device=device)
        parts = []
        for group, weight, scale in groups:
            mine = replace(shape, experts=weight.shape[0])
            parts.append(self._pack(weight, scale, mine, tiles[group], bases[group], slices[group]))
        return layout.join(parts, shape, tiles, bases, slices)

    def _pack(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        shape: Shape,
        tiles: torch.Tensor,
        bases: torch.Tensor,
        slices: torch.Tensor,
    ) -> PreparedMatrix:
        """Into `tiles`, `bases` and `slices` of a group."""
        layout.check_sources(weight, scale, shape)
        weight, scale = _aligned(weight), _aligned(scale)
        device = weight.device
        sizes = torch.empty(slices.numel() // 2, dtype=torch.int32, device=device)
        numbers = (shape.experts, shape.rows, shape.k_tiles, int(shape.gated))
        addresses = [t.data_ptr() for t in (weight, scale, tiles, bases, slices)]
        self.programs[TILES](sizes, *addresses, *numbers)
        starts, words, slots = place(sizes, slices)
        records = torch.empty(words, dtype=torch.int16, device=device).view(torch.uint16)
        dense = torch.empty(0 if shape.native else slots, layout.CODE_BYTES, dtype=torch.uint8, device=device)
        if words or slots:
            addresses = [t.data_ptr() for t in (scale, bases, slices, starts, records, dense)]
            self.programs[RECORDS](sizes, *addresses, *numbers)
        return PreparedMatrix(shape, tiles, bases, slices, starts, records, dense)


def place(sizes: torch.Tensor, slices: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Adds to each slice's second word where its records or slots begin; returns `starts`, and how many words
    and slots there are. sizes: int32 [E * RB * S]; slices: int32 [E, RB, S, 2]. Waits for the device."""
    found = sizes.view(slices.shape[0], -1)
    both = torch.stack((found & ((1 << SLOT_SHIFT) - 1), found >> SLOT_SHIFT), dim=-1)
    upto = both.cumsum(1)  # int64 [E, RB * S, 2]
    before = torch.where(both[..., 1] > 0, (upto - both)[..., 1], (upto - both)[..., 0])
    slices[..., 1] += before.to(torch.int32).view(slices.shape[:-1])
    totals = upto[:, -1]
    starts = totals.cumsum(0) - totals
    words, slots = totals.sum(0).tolist()
    return starts, words, slots


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, at an address that the kernels' loads can take."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
