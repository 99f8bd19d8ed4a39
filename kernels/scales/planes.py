"""Expanded scale planes: what they look like in memory, and the decoder in plain torch.

A plane holds the scale bytes [R, C] of one matrix of one expert, in the checkpoint's order of rows (w13:
gate, then up). Two orders in memory:

    rows     [R, C], row after row
    blocked  F8_128x4: tiles of 128 rows x 4 columns, 512 bytes each, [ceil(R / 128), ceil(C / 4)];
             byte (r, c) of a tile lies at r % 32 * 16 + r // 32 * 4 + c; what pads a plane is 0

Planes follow each other, one for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import layout
from ..layout import PreparedMatrix

ROWS, BLOCKED = "rows", "blocked"
ORDERS = (ROWS, BLOCKED)
BLOCK_ROWS, BLOCK_COLUMNS = 128, 4
BLOCK_BYTES = BLOCK_ROWS * BLOCK_COLUMNS


@dataclass(frozen=True)
class Plane:
    """Shape and order of the expanded planes of one matrix."""

    rows: int
    columns: int
    order: str

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}; expected one of {', '.join(ORDERS)}")

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // BLOCK_COLUMNS)

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // BLOCK_ROWS)

    @property
    def nbytes(self) -> int:
        """Of one plane, padding included."""
        if self.order == ROWS:
            return self.rows * self.columns
        return self.row_blocks * self.column_blocks * BLOCK_BYTES


def planes_of(hidden: int, width: int, order: str) -> tuple[Plane, Plane]:
    """The planes of w13 [2 I, H] and w2 [H, I]; `width`: I, as in the checkpoint."""
    if hidden % layout.TILE_K:
        raise ValueError(f"hidden is {hidden}; expected a multiple of {layout.TILE_K}")
    if width % layout.GROUP:
        raise ValueError(f"width is {width}; expected a multiple of {layout.GROUP}")
    group = layout.GROUP
    return Plane(2 * width, hidden // group, order), Plane(hidden, width // group, order)


def to_blocked(plane: torch.Tensor) -> torch.Tensor:
    """uint8 [..., R, C] to F8_128x4 order, uint8 [..., bytes of a plane]; the padding is 0."""
    *outer, rows, columns = plane.shape
    p = Plane(rows, columns, BLOCKED)
    whole = plane.new_zeros(*outer, p.row_blocks * BLOCK_ROWS, p.column_blocks * BLOCK_COLUMNS)
    whole[..., :rows, :columns] = plane
    tiled = whole.unflatten(-1, (p.column_blocks, 4)).unflatten(-3, (p.row_blocks, 4, 32))
    # row block, quarter, row of 32, column block, column -> row block, column block, row, quarter, column
    return tiled.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).flatten(-5)


def from_blocked(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `to_blocked`: uint8 [..., bytes] to [..., R, C]."""
    p = Plane(rows, columns, BLOCKED)
    tiled = flat.unflatten(-1, (p.row_blocks, p.column_blocks, 32, 4, BLOCK_COLUMNS))
    whole = tiled.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1)).flatten(-2).flatten(-4, -2)
    return whole[..., :rows, :columns]


def without_padding(scales: torch.Tensor, rows: int, columns: int, gated: bool) -> torch.Tensor:
    """[E, R, C] without what `layout.pad` added; each half of a gated matrix is padded at its own end."""
    halves = 2 if gated else 1
    kept = scales.unflatten(1, (halves, -1))[:, :, : rows // halves, :columns]
    return kept.flatten(1, 2)


def expand(m: PreparedMatrix, plane: Plane, routes: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the planes of the routed experts, and no others: the decoder's twin, on any device.

    routes: integers of any shape, those outside 0 .. E - 1 are ignored; out: uint8 [E, plane.nbytes].
    """
    routed = routes.reshape(-1).to(torch.int64).unique()
    routed = routed[(routed >= 0) & (routed < m.shape.experts)].to(out.device)
    scales = without_padding(layout.unpack_scales(m), plane.rows, plane.columns, m.shape.gated)[routed]
    out[routed] = to_blocked(scales) if plane.order == BLOCKED else scales.flatten(1)
