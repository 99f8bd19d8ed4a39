"""The encoder for the GPU writes what the codec writes, byte for byte."""

from __future__ import annotations

import pytest
import torch
from vllm_csf.kernels.scales import encoder
from vllm_csf.loaders import codec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scales_of(kind: str, planes: int, rows: int, columns: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows + columns)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (planes, rows, columns), generator=g).to(torch.uint8)

    if kind == "any":
        return draw(0, 256)
    if kind == "two clusters":  # equally good windows: the lower one is asked for
        return torch.where(draw(0, 2) == 1, draw(30, 34), draw(200, 204))
    return torch.where(torch.rand(planes, rows, columns, generator=g) < 0.01, draw(0, 256), draw(90, 106))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["any", "two clusters", "usual"])
@pytest.mark.parametrize("size", [(3, 16, 2), (2, 48, 20), (5, 64, 258)])
def test_streams_are_those_of_the_codec(kind, size, device, monkeypatch):
    monkeypatch.setattr(encoder, "CHUNK", 2 * size[1] * size[2])
    scales = scales_of(kind, *size)
    scales[0, 0], scales[0, 1], scales[0, 2] = 0, 255, 240
    found = encoder.encode(scales.to(device))
    exceptions = found.exceptions.cpu().view(torch.uint32).split(found.counts.tolist())
    for i, plane in enumerate(scales):
        truth = codec.encode(plane, name="scale")
        assert torch.equal(found.fixed[i].cpu(), truth.fixed)
        assert torch.equal(exceptions[i], truth.exceptions)


@pytest.mark.parametrize("size", [(1, 8, 4), (1, 16, 3), (1, 8192, 4096)])
def test_planes_outside_the_format_are_refused(size):
    with pytest.raises(ValueError, match="scales are"):
        encoder.encode(torch.empty(size, dtype=torch.uint8))
