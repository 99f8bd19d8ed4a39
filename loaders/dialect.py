"""compressed-tensors' NVFP4 modules in ModelOpt's spelling, which is that of layout A.

weight_packed         weight           the same bytes
weight_global_scale   weight_scale_2   a divisor becomes the multiplier 1 / x
input_global_scale    input_scale      a divisor becomes the multiplier 1 / x
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .codec import NVFP4
from .errors import CheckpointError
from .files import TensorInfo

_PACKED, _GLOBAL = "weight_packed", "weight_global_scale"
_MODELOPT = {_PACKED: "weight", _GLOBAL: "weight_scale_2", "input_global_scale": "input_scale"}
_DIVISORS = (_GLOBAL, "input_global_scale")


def modelopt_names(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """ModelOpt's name of every tensor that has another one; experts and linear layers alike.

    Raises CheckpointError, naming the tensor, for a packed module that is no NVFP4, a divisor that is
    not one FP32 value, and a name that is taken.
    """
    renamed = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if part not in _MODELOPT:
            continue
        if not _is_nvfp4(module, tensors):
            raise CheckpointError(f"{name}: belongs to no NVFP4 module, which layout A cannot describe")
        if part in _DIVISORS and (info.dtype != "F32" or info.numel != 1):
            raise CheckpointError(f"{name}: is {info.dtype} {list(info.shape)}, expected one FP32 value")
        target = f"{module}.{_MODELOPT[part]}"
        if target in tensors:
            raise CheckpointError(f"{name}: is stored beside {target}, expected one of the two")
        renamed[name] = target
    return renamed


def is_divisor(name: str) -> bool:
    return name.rpartition(".")[2] in _DIVISORS


def reciprocal(value: torch.Tensor) -> torch.Tensor:
    """1 / x of one FP32 value in FP32: what readers of divisors compute, too. 0-dim."""
    return (1 / value.to(torch.float32).reshape(())).reshape(())


def _is_nvfp4(module: str, tensors: Mapping[str, TensorInfo]) -> bool:
    weight = tensors.get(f"{module}.{_PACKED}") or tensors.get(f"{module}.weight")
    scale = tensors.get(f"{module}.weight_scale")
    if weight is None or scale is None or f"{module}.{_GLOBAL}" not in tensors:
        return False
    if weight.dtype not in ("U8", "I8") or scale.dtype not in ("F8_E4M3", "U8"):
        return False
    if len(weight.shape) != 2 or len(scale.shape) != 2 or weight.shape[0] != scale.shape[0]:
        return False
    return weight.shape[1] * 2 == scale.shape[1] * NVFP4.group_size
