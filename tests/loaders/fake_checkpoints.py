"""Small random checkpoints in every layout, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.codec import NVFP4, CodecSpec, encode
from vllm_csf.loaders.errors import CheckpointError

PROJECTIONS = ("gate", "up", "down")
PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
Tensors = dict[str, torch.Tensor]
# A projection of `random_layer`, for tests that damage one.
BASE = "model.layers.0.mlp.experts.1.up_proj"


@dataclass
class Matrix:
    """One projection: FP4 pairs [R, K/2], scale bytes [R, K/group], global and input scale (multipliers)."""

    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor


@dataclass
class Layer:
    """experts: by (expert, projection)."""

    name: str
    experts: int
    width: int
    hidden: int
    matrices: dict[tuple[int, str], Matrix] = field(default_factory=dict)


def random_layer(
    name: str = "model.layers.0.mlp.experts",
    experts: int = 4,
    width: int = 64,
    hidden: int = 96,
    group: int = 16,
    projections: tuple[str, ...] = PROJECTIONS,
    seed: int = 0,
) -> Layer:
    rng = torch.Generator().manual_seed(seed)
    layer = Layer(name, experts, width, hidden)
    for expert in range(experts):
        for projection in projections:
            rows, inputs = (hidden, width) if projection == "down" else (width, hidden)
            scale = torch.randint(40, 56, (rows, inputs // group), generator=rng)
            stray = torch.rand(scale.shape, generator=rng) < 0.05
            scale = torch.where(stray, torch.randint(0, 127, scale.shape, generator=rng), scale)
            layer.matrices[expert, projection] = Matrix(
                torch.randint(0, 256, (rows, inputs // 2), generator=rng, dtype=torch.uint8),
                scale.to(torch.uint8),
                torch.rand((), generator=rng) + 0.1,
                torch.rand((), generator=rng) + 0.1,
            )
    return layer


def csf_tensors(
    layer: Layer,
    proj: Mapping[str, str] = PROJ,
    spec: CodecSpec = NVFP4,
    flat: bool = True,
    weight: str = "weight",
    scale: str = "weight_scale",
    calibration: bool = True,
) -> Tensors:
    """Layout A's tensors (and those of a container)."""
    out: Tensors = {}
    for (expert, projection), m in layer.matrices.items():
        base = f"{layer.name}.{expert}.{proj[projection]}"
        plane = encode(m.scale, spec)
        slabs = plane.fixed if flat else plane.fixed.view(plane.rows // 16, -1)
        out[f"{base}.{weight}"] = m.weight
        out[f"{base}.{scale}{spec.fixed_suffix}"] = slabs
        out[f"{base}.{scale}{spec.exceptions_suffix}"] = plane.exceptions
        if calibration:
            out[f"{base}.weight_scale_2"] = m.global_scale
            out[f"{base}.input_scale"] = m.input_scale
    return out


def modelopt_tensors(layer: Layer, proj: Mapping[str, str] = PROJ, input_scale: bool = True) -> Tensors:
    out: Tensors = {}
    for (expert, projection), m in layer.matrices.items():
        base = f"{layer.name}.{expert}.{proj[projection]}"
        out[f"{base}.weight"] = m.weight
        out[f"{base}.weight_scale"] = m.scale.view(torch.float8_e4m3fn)
        out[f"{base}.weight_scale_2"] = m.global_scale
        if input_scale:
            out[f"{base}.input_scale"] = m.input_scale.view(1)
    return out


def compressed_tensors(layer: Layer, proj: Mapping[str, str] = PROJ) -> Tensors:
    """nvfp4-pack-quantized: the global scales are divisors."""
    out: Tensors = {}
    for (expert, projection), m in layer.matrices.items():
        base = f"{layer.name}.{expert}.{proj[projection]}"
        out[f"{base}.weight_packed"] = m.weight
        out[f"{base}.weight_scale"] = m.scale.view(torch.float8_e4m3fn)
        out[f"{base}.weight_global_scale"] = (1 / m.global_scale).view(1)
        out[f"{base}.input_global_scale"] = (1 / m.input_scale).view(1)
    return out


def fused_tensors(layer: Layer, dotted: bool = False) -> Tensors:
    """All experts in one tensor: gate_up_proj [E, 2I, H/2] and down_proj [E, H, I/2]."""
    out: Tensors = {}
    for stored, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        each: dict[str, list[list[torch.Tensor]]] = {"weight": [], "scale": [], "global": [], "input": []}
        for expert in range(layer.experts):
            ms = [layer.matrices[expert, part] for part in parts]
            each["weight"].append([m.weight for m in ms])
            each["scale"].append([m.scale for m in ms])
            each["global"].append([m.global_scale for m in ms])
            each["input"].append([m.input_scale for m in ms])
        base, dot = f"{layer.name}.{stored}", "." if dotted else "_"
        out[f"{base}.weight" if dotted else base] = torch.stack([torch.cat(w) for w in each["weight"]])
        scale = torch.stack([torch.cat(s) for s in each["scale"]])
        out[f"{base}{dot}weight_scale"] = scale.view(torch.float8_e4m3fn)
        out[f"{base}{dot}weight_scale_2"] = torch.tensor(each["global"])
        out[f"{base}{dot}input_scale"] = torch.tensor(each["input"])
    return out


# ---- folders -------------------------------------------------------------------------------------


def csf_config(*modules: str, algo: str = "NVFP4", **entry: Any) -> dict[str, Any]:
    each = {"quant_algo": algo, "group_size": 16, "weight_scale_encoding": "csf", **entry}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": dict.fromkeys(modules, each),
    }


def save(path: Path, tensors: Tensors) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Tensors of one storage cannot be saved together; the tests share some on purpose.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)


def write_folder(
    root: Path,
    tensors: Tensors,
    config: Mapping[str, Any] | None = None,
    shards: int = 2,
    folder: str = "",
    name: Callable[[int], str] = lambda i: f"model-{i:05d}.safetensors",
) -> dict[str, str]:
    """A Hugging Face folder; tensors go to the shards in turn. Returns the weight map."""
    root.mkdir(parents=True, exist_ok=True)
    shard_of = {tensor: f"{folder}{name(i % shards)}" for i, tensor in enumerate(tensors)}
    for shard in set(shard_of.values()):
        save(root / shard, {t: tensors[t] for t, s in shard_of.items() if s == shard})
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    (root / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return shard_of


def write_container(root: Path, tensors: Tensors, spec: CodecSpec = NVFP4, shards: int = 2) -> None:
    """Layout B of tensors as `csf_tensors` gives them."""

    def original(name: str) -> str:
        return name.removesuffix(spec.fixed_suffix).removesuffix(spec.exceptions_suffix)

    order = list(dict.fromkeys(map(original, tensors)))
    source_names = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(order)}
    files = sorted(set(source_names.values()))
    for shard in files:
        part = {name: t for name, t in tensors.items() if source_names[original(name)] == shard}
        save(root / "tensors" / shard, part)
    kind = spec.suffix.removesuffix("_csf")
    head = {"schema": f"lil-{kind}-csf-checkpoint/1", "codec": spec.name, "family": "some_family"}
    entries = [
        {"file": shard, "target_file_bytes": (root / "tensors" / shard).stat().st_size} for shard in files
    ]
    (root / "manifest.json").write_text(json.dumps({**head, "shards": entries, "metadata_sha256": {}}))
    (root / "build-contract.json").write_text(json.dumps({**head, "source_names": source_names}))
    (root / "metadata").mkdir()
    (root / "metadata" / "config.json").write_text(json.dumps({"model_type": "x"}))


def edit_json(path: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def refused(folder: Path, match: str, kind: type[Exception] = CheckpointError) -> None:
    """Opening the folder raises an error of that kind which says so."""
    with pytest.raises(kind, match=match):
        open_checkpoint(folder)
