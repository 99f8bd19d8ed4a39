"""Made-up weights for ``--load-format dummy``: finite, and with about as many exceptions as trained ones."""

from __future__ import annotations

import torch

from .intake import Intake
from .loaders.made_up import BASE, EXCEPTION, EXCEPTION_SHARE, WINDOW
from .parameters import Dialect

ALPHA = 0.01


def fill(layer: torch.nn.Module, intake: Intake, dialect: Dialect) -> None:
    """Fill the parameters of a layer that no tensor came for."""
    generator = torch.Generator("cpu").manual_seed(0)
    for half in ("w13", "w2"):
        weight = getattr(layer, f"{half}_{dialect.weight}").data
        # One expert's worth of random bytes for all: dummy runs measure time, not text.
        # Sent before it is repeated: torch would repeat it on the host.
        weight.copy_(_random(*weight.shape[1:], generator=generator).to(weight.device))
        getattr(layer, f"{half}_{dialect.global_scale}").data.fill_(ALPHA)
    for name, shard in (("csf_scales13", "w1"), ("csf_scales2", "w2")):
        rows, cols = intake.shape.local_plane(shard)
        if intake.whole:
            scales = BASE + _random(rows * cols, generator=generator) % WINDOW
            scales[_positions(rows, cols).long()] = EXCEPTION
        else:
            slabs = _random(rows // 16, 16 * (1 + cols // 2), generator=generator)
            slabs[:, :16] = BASE
            scales = slabs.view(-1)
        staged = getattr(layer, name).data
        staged.copy_(scales.to(staged.device))
    for shard in intake.shape.shards:
        intake.invent(shard, _exceptions(*intake.shape.local_plane(shard)))


def _random(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device="cpu", generator=generator)


def _exceptions(rows: int, cols: int) -> torch.Tensor:
    return _positions(rows, cols) | EXCEPTION << 24


def _positions(rows: int, cols: int) -> torch.Tensor:
    """Of the exceptions of a plane: int32 [n]."""
    count = max(1, round(EXCEPTION_SHARE * rows * cols))
    return torch.arange(count, dtype=torch.int32, device="cpu") * (rows * cols // count)
