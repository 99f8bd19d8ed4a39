"""The quantization config of layout A, made from what a checkpoint of another layout stores.

A container keeps its source's config, and a source that is converted has its own: neither says that
scales are compressed. Layout A says it per module, in ModelOpt's MIXED_PRECISION.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .codec import NVFP4
from .errors import RecipeError
from .files import TensorInfo
from .recipes import CSF_ENCODING, MIXED_PRECISION, related
from .sources import ExpertLayer

# What ModelOpt calls a module, by the dtypes of its weight and of the tensor beside it.
_SCALE_PARTS = ("weight_scale", "weight_scale_inv", "scale")


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """ModelOpt's MIXED_PRECISION config of what is stored, with `csf` for all layers of FP4 experts.

    Entries of a source that has quantized_layers are kept; else one is made for every other quantised
    module from its tensors. Raises RecipeError, naming the module, for a form that has no ModelOpt name.
    """
    recipe = checkpoint.recipe
    raw_layers = recipe.raw.get("quantized_layers")
    if recipe.layers and isinstance(raw_layers, Mapping):
        layers = {
            key: dict(entry)
            for key, entry in raw_layers.items()
            if not any(related(key, layer.name) for layer in checkpoint.layers)
        }
    else:
        layers = _stored_modules(checkpoint)
    for layer in checkpoint.layers:
        layers[layer.name] = _expert_entry(layer)
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": MIXED_PRECISION}
    for key in ("producer", "kv_cache_scheme"):
        if recipe.raw.get(key):
            config[key] = recipe.raw[key]
    if str(recipe.raw.get("kv_cache_quant_algo") or "").upper() == "FP8" and "kv_cache_scheme" not in config:
        # The legacy file's spelling; config.json has the scheme.
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    config["quantized_layers"] = layers
    config["ignore"] = list(recipe.ignore)
    return config


def _expert_entry(layer: ExpertLayer) -> dict[str, Any]:
    if layer.spec is NVFP4:
        static = all(source.has_input_scale for source in layer.sources())
        algo = "NVFP4" if static else "W4A16_NVFP4"
    else:
        algo = "MXFP4"
    return {
        "quant_algo": algo,
        "group_size": layer.spec.group_size,
        "weight_scale_encoding": CSF_ENCODING,
    }


def _stored_modules(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Entries of the quantised modules that are no FP4 experts, from their tensors."""
    tensors = checkpoint.tensors
    ours = tuple(layer.name + "." for layer in checkpoint.layers)
    layers: dict[str, dict[str, Any]] = {}
    for name, weight in tensors.items():
        module, _, part = name.rpartition(".")
        if part not in ("weight", "weight_packed") or name.startswith(ours):
            continue
        scale = next((tensors[key] for p in _SCALE_PARTS if (key := f"{module}.{p}") in tensors), None)
        if scale is None:
            continue
        target = _entry_name(module, checkpoint)
        entry = _entry(module, weight, scale, checkpoint)
        if layers.setdefault(target, entry) != entry:
            raise RecipeError(
                f"{module}: stored as {entry}, expected {layers[target]} as other parts of {target}"
            )
    return layers


def _entry_name(module: str, checkpoint: Checkpoint) -> str:
    """Experts have one entry together."""
    for name in checkpoint.other_experts:
        if module.startswith(name + "."):
            return name
    return module


def _entry(module: str, weight: TensorInfo, scale: TensorInfo, checkpoint: Checkpoint) -> dict[str, Any]:
    if weight.dtype in ("U8", "I8") and scale.dtype == "F8_E4M3":
        algo = "NVFP4" if _any(module, checkpoint, "input_scale", "input_global_scale") else "W4A16_NVFP4"
        return {"quant_algo": algo, "group_size": 16}
    if weight.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0"):
        return {"quant_algo": "MXFP8", "group_size": 32}
    if weight.dtype == "F8_E4M3" and scale.dtype == "F32" and scale.numel == 1:
        return {"quant_algo": "FP8"}
    own = checkpoint.recipe.of(module)
    if own.algo is None:
        raise RecipeError(
            f"{module}: {weight.dtype} weights with a {scale.dtype} {list(scale.shape)} scale, "
            "expected NVFP4, MXFP8, FP8 with one scale, or a recipe that names the form"
        )
    entry: dict[str, Any] = {"quant_algo": own.algo}
    if own.group_size is not None:
        entry["group_size"] = own.group_size
    return entry


def _any(module: str, checkpoint: Checkpoint, *parts: str) -> bool:
    return any(f"{module}.{part}" in checkpoint.tensors for part in parts)
