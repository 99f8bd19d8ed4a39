"""Stacks to pack, and what packing them has to give: `layout.pack` on the CPU, byte for byte."""

from __future__ import annotations

import torch
from vllm_csf.kernels import layout
from vllm_csf.kernels.layout import PreparedMatrix, Shape

# Share of arbitrary scales -> kinds of slices that the stacks below then have among them.
EXPECTED = {
    0.0: {"empty", "sparse", "dense"},
    0.003: {"empty", "sparse", "dense"},
    0.08: {"sparse", "dense"},
    1.0: {"sparse", "dense"},
}
FIELDS = ("tiles", "bases", "slices", "starts", "records", "dense")


def stack(shape: Shape, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales; `share` of the scales are any bytes. The first rows, and every second scale of the
    last one, are the edges: zeros, NaN, the limits of what is coded, subnormals, negative bytes."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(256, (shape.experts, shape.rows, shape.k // 2), generator=g, dtype=torch.uint8)
    size = (shape.experts, shape.rows, shape.k // 16)
    scale = torch.randint(90, 106, size, generator=g).to(torch.uint8)
    wild = torch.rand(size, generator=g) < share
    scale = torch.where(wild, torch.randint(256, size, generator=g).to(torch.uint8), scale)
    if shape.rows > 32:
        for row, byte in enumerate((0, 255, 127, 126, 8, 7, 128, 111)):
            scale[0, row] = byte
        scale[0, 8] = torch.arange(size[2]) % 9
        scale[0, 9] = torch.where(torch.arange(size[2]) % 2 == 1, 30, 60)  # two windows that are as good
        scale[-1, -1, ::2] = 0
    return weight, scale


def differences(found: PreparedMatrix, wanted: PreparedMatrix) -> list[str]:
    """Names of the fields that are not the same bytes."""
    return [name for name in FIELDS if not _same(getattr(found, name), getattr(wanted, name))]


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))


def kinds(matrix: PreparedMatrix) -> set[str]:
    """Of slices that a stack has: without exceptions, with few, with many."""
    mask, info = matrix.slices.unbind(-1)
    found = {"empty": (info >= 0) & (mask == 0), "sparse": mask != 0, "dense": info < 0}
    return {kind for kind, there in found.items() if bool(there.any())}


def shapes(native: bool) -> list[Shape]:
    """One tile, part of a slice, a slice and one tile, several slices; one expert and several."""
    sizes = ((1, 32, 64), (3, 64, 320), (1, 96, 1088), (2, 128, 2560))
    return [Shape(*size, gated, native) for size in sizes for gated in (False, True)]


def truth(shape: Shape, share: float) -> tuple[torch.Tensor, torch.Tensor, PreparedMatrix]:
    weight, scale = stack(shape, share, shape.rows + shape.k)
    return weight, scale, layout.pack(weight, scale, shape)
