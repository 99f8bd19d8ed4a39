"""The NVFP4 scale encoder on any device: plain scale bytes to the two streams of the checkpoint format.

Byte for byte what the codec of the loaders writes (a test compares them): of each row the lowest base whose
window of 16 holds most bytes, code 0 under an exception. The prepared form of the kernels does not come
from these streams: `layout.pack` takes whole scale bytes and chooses bases of its own, because it codes
normal positive scales only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import layout

WINDOW = 16
SLAB_ROWS = 16
POSITION_BITS = 24
CHUNK = 1 << 24  # scales worked on at a time


@dataclass(frozen=True)
class Streams:
    """Of a stack of planes. fixed: uint8 [planes, R (1 + C / 2)]; exceptions: int32 [n], the 32 bits of the
    format's entries, plane after plane; counts: int64 [planes], entries of each."""

    fixed: torch.Tensor
    exceptions: torch.Tensor
    counts: torch.Tensor


def lowest_best_bases(rows: torch.Tensor) -> torch.Tensor:
    """Of each row of uint8 [n, C] the lowest base whose window holds most of its bytes: uint8 [n]."""
    _, upto = layout.byte_counts(rows)
    held = upto[:, WINDOW:] - upto[:, :-WINDOW]
    # The key orders windows by count, then by the lower base; torch.max alone may return any of equals.
    lower = 255 - torch.arange(held.shape[1], dtype=torch.int32, device=rows.device)
    return (255 - ((held << 8) | lower).amax(1) % 256).to(torch.uint8)


def encode(scales: torch.Tensor) -> Streams:
    """Encodes uint8 [planes, R, C] on its device.

    R a multiple of 16, C even, R C <= 2^24: else ValueError. Waits for the device once per chunk of planes,
    to learn how many exceptions there are.
    """
    planes, rows, columns = scales.shape
    if scales.dtype != torch.uint8 or rows % SLAB_ROWS or columns % 2 or rows * columns > 1 << POSITION_BITS:
        raise ValueError(
            f"scales are {scales.dtype} {list(scales.shape)}; expected torch.uint8 [planes, R, C], "
            f"R a multiple of {SLAB_ROWS}, C even, R C at most 2^{POSITION_BITS}"
        )
    parts = [_encode(part) for part in scales.split(max(1, CHUNK // (rows * columns)))]
    return Streams(*(torch.cat(found) for found in zip(*parts, strict=True)))


def _encode(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    planes, rows, columns = scales.shape
    base = lowest_best_bases(scales.reshape(-1, columns)).view(planes, rows, 1)
    code = scales - base  # wraps below the base, which lands outside the window
    outside = code >= WINDOW
    code = code.masked_fill(outside, 0)
    packed = code[..., 0::2] | code[..., 1::2] << 4
    slabs = rows // SLAB_ROWS
    fixed = torch.cat((base.view(planes, slabs, -1), packed.reshape(planes, slabs, -1)), dim=-1)
    where = outside.view(-1).nonzero().squeeze(1)
    entries = where % (rows * columns) | scales.reshape(-1)[where].to(torch.int64) << POSITION_BITS
    return fixed.flatten(1), layout.as_int32(entries), outside.flatten(1).sum(1)
