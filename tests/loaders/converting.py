"""What tests of conversions share: what a folder holds, damage to it, and a compressed-tensors source."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_checkpoints import compressed_tensors, random_layer, write_folder
from vllm_csf.loaders import conversion
from vllm_csf.loaders.checkpoint import open_checkpoint

TOOL = "test"
LINEAR = "model.layers.0.self_attn."


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def damage(root: Path, wanted: str) -> str:
    """Flips one bit in the middle of the first tensor whose name has `wanted`."""
    with open_checkpoint(root) as checkpoint:
        name, info = next((n, i) for n, i in checkpoint.tensors.items() if wanted in n and i.nbytes)
    with info.shard.open("r+b") as file:
        file.seek(info.begin + info.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return name


def edit_record(root: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Changes a record of a conversion, and returns its path."""
    path = conversion.folder_of(root) / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage(".")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def divisors(returning: bool, count: int) -> list[np.float32]:
    """FP32 numbers whose reciprocal's reciprocal is, or is not, the number."""
    numbers = (np.float32(3) + np.float32(k) / 64 for k in range(1000))
    found = [x for x in numbers if (np.float32(1) / (np.float32(1) / x) == x) == returning]
    return found[:count]


def packed_source(root: Path) -> dict[str, torch.Tensor]:
    """A compressed-tensors checkpoint with NVFP4 linear layers: q has input scales, o has none."""
    rng = torch.Generator().manual_seed(5)
    tensors = compressed_tensors(random_layer())
    (good,), (bad, other) = divisors(True, 1), divisors(False, 2)
    for name, numbers in (("q_proj", (bad, good)), ("o_proj", (other,))):
        module = f"{LINEAR}{name}."
        tensors[f"{module}weight_packed"] = torch.randint(0, 256, (24, 40), generator=rng).to(torch.uint8)
        scale = torch.randint(1, 120, (24, 5), generator=rng).to(torch.uint8)
        tensors[f"{module}weight_scale"] = scale.view(torch.float8_e4m3fn)
        for part, number in zip(("weight_global_scale", "input_global_scale"), numbers, strict=False):
            tensors[f"{module}{part}"] = torch.tensor([number])
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": "local"}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    write_folder(root, tensors, config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]})
    return tensors
