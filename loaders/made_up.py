"""Made-up weights for a checkpoint that has none: what `make-example --no-weights` writes, in any size.

Every tensor depends on its name and shape alone, so that all who ask get the same model; it is made when its
turn comes, on the device that asks. Weights keep the size of what goes through them, and scales of FP4 lie as
close together as trained ones, but for one in 250.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from . import example, example_tensors
from .example_sizes import Sizes, sizes_of
from .example_tensors import PROJECTIONS, Part
from .quantize import Quantized

GROUP = 16
EXCEPTION_SHARE = 0.004
BASE, WINDOW, EXCEPTION = 0x30, 16, 0x40  # E4M3: 0.5 up to 1.875; 2.0
WEIGHT_RMS, SCALE_RMS = 2.93, 1.16  # of the values of all nibbles, and of those scales
BIAS = 0.05

Named = tuple[str, torch.Tensor]


def tensors(config: dict[str, Any], device: torch.device | str = "cpu") -> Iterator[Named]:
    """The tensors of layout C, ModelOpt's NVFP4, for a `config.json` of the example's families.

    Dense ones are bf16. Raises CheckpointError where the family is none of these.
    """
    family, size = sizes_of(config)
    yield from _dense(example_tensors.model(size), device)
    for number in range(size.layers + example_tensors.drafting(family)):
        prefix = f"model.layers.{number}."
        parts = example_tensors.layer(family, size, prefix)
        if number >= size.layers:
            parts |= example_tensors.mtp(size, prefix)
        yield from _dense(parts, device)
        for expert in range(size.experts):
            yield from _expert(f"{prefix}mlp.experts.{expert}.", size, device)


def _dense(parts: dict[str, Part], device: torch.device | str) -> Iterator[Named]:
    for name, part in parts.items():
        tensor = torch.ones(part.shape, dtype=torch.bfloat16, device=device)
        if part.std:
            tensor.normal_(std=_deviation(name, part.shape), generator=_generator(name, device))
        yield name, tensor


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) == 1:
        return BIAS
    return 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5


def _expert(prefix: str, size: Sizes, device: torch.device | str) -> Iterator[Named]:
    for projection in PROJECTIONS:
        rows, columns = example_tensors.projection(size, projection)
        name = f"{prefix}{projection}."
        generator = _generator(name, device)
        weight = _bytes((rows, columns // 2), 256, generator)
        scale = BASE + _bytes((rows, columns // GROUP), WINDOW, generator)
        count = max(1, round(EXCEPTION_SHARE * scale.numel()))
        where = torch.randint(scale.numel(), (count,), generator=generator, device=device)
        scale.view(-1)[where] = EXCEPTION
        gain = torch.tensor(columns**-0.5 / (WEIGHT_RMS * SCALE_RMS), device=device)
        yield from example.projection(name, Quantized(weight, scale, gain), "modelopt").items()


def _bytes(shape: tuple[int, int], below: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(below, shape, generator=generator, device=generator.device, dtype=torch.uint8)


def _generator(name: str, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
