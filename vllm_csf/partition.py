"""Which channels of an expert a tensor-parallel rank owns, and to what width they are padded.

Ranks own whole units of 32 channels: 16 keep the slabs of gate and up whole, 32 keep the number of
scale columns of down even. Every projection of an expert is cut alike, so the cut needs no
agreement with anything outside the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 32


@dataclass(frozen=True)
class Extent:
    """Channels [start, stop) of an expert's width, held in `size` channels; the rest is padding."""

    start: int
    stop: int
    size: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def padded_width(width: int, ranks: int) -> int:
    """Channels that each of the ranks holds."""
    units = -(-width // UNIT)
    return -(-units // ranks) * UNIT


def extent(width: int, rank: int, ranks: int, name: str) -> Extent:
    """The extent of one rank. Raises ValueError, naming the layer, for widths that the format excludes."""
    if width % UNIT:
        raise ValueError(f"{name}: experts are {width} channels wide, expected a multiple of {UNIT}")
    size = padded_width(width, ranks)
    start = min(rank * size, width)
    return Extent(start, min(start + size, width), size)
