"""Small random checkpoints for the demo and the tests: one set of weights, in every layout.

    modelopt             layout C, ModelOpt's NVFP4
    compressed-tensors   layout C, nvfp4-pack-quantized
    csf                  layout A
    container            layout B; a server is given its `metadata` folder
    dequantized          the same numbers as an unquantised FP32 checkpoint: what stock vLLM can serve

Everything but the experts is stored in FP32 and is not quantised, so that nothing is rounded twice.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from . import codec, example_config, example_tensors
from .errors import CheckpointError, reason
from .example_sizes import Sizes
from .example_tensors import FAMILIES, PROJECTIONS, Part, drafting
from .quantize import Quantized, global_scale, quantize

LAYOUTS = ("modelopt", "compressed-tensors", "csf", "container", "dequantized")
SHARDS = 2
DEGREES_OF_FREEDOM = 4.0  # of Student's t: tails that make exceptions

Tensors = dict[str, torch.Tensor]


def make_example(
    folder: Path | str,
    family: str = "qwen3-moe",
    layout: str = "modelopt",
    seed: int = 0,
    unequal_gate_up: bool = False,
    weights: bool = True,
    **sizes: int,
) -> Path:
    """Writes a checkpoint into `folder` (made, must be empty) and returns it.

    The weights depend on family, seed and sizes (fields of `Sizes`) alone, not on the layout. Without weights
    it is configuration and tokenizer, enough for a server with the load format `dummy` or `csf_made_up`.
    Raises ValueError for an unknown family, layout or size, CheckpointError where the folder is not empty.
    """
    folder = Path(folder)
    if family not in FAMILIES or layout not in LAYOUTS:
        raise ValueError(f"family is {family!r}, layout {layout!r}; expected one of {FAMILIES} and {LAYOUTS}")
    unknown = set(sizes) - set(asdict(Sizes()))
    if unknown:
        raise ValueError(f"sizes {sorted(unknown)} are unknown, expected {sorted(asdict(Sizes()))}")
    if layout == "container" and not weights:
        raise ValueError("layout is 'container' and weights False; without weights it holds nothing")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file, expected a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty, expected a new folder")
    size = Sizes(**sizes)
    size.check()
    metadata = folder / "metadata" if layout == "container" else folder
    metadata.mkdir(parents=True, exist_ok=True)
    if weights:
        drawn = _Weights(family, size, seed, unequal_gate_up)
        tensors = drawn.others() | _experts(drawn, layout)
        if layout == "container":
            _write_container(folder, tensors, family)
        else:
            _write_shards(folder, tensors)
    example_config.write_metadata(metadata, family, layout, size, _expert_modules(family, size))
    return folder


def _expert_modules(family: str, size: Sizes) -> list[str]:
    return [f"model.layers.{n}.mlp.experts" for n in range(size.layers + drafting(family))]


class _Weights:
    """Draws the numbers, always in the same order."""

    def __init__(self, family: str, size: Sizes, seed: int, unequal: bool) -> None:
        self.family, self.size, self._unequal = family, size, unequal
        self._generator = torch.Generator().manual_seed(seed)
        self._others = self._draw_others()
        self.experts = {
            f"{module}.{e}": self._draw_expert()
            for module in self.expert_modules()
            for e in range(size.experts)
        }
        if self._mtp:
            # As `_draw_mtp` does with the rest; copies, for tensors of one storage cannot be saved together.
            first, *_, last = self.expert_modules()
            for e in range(size.experts):
                self.experts[f"{last}.{e}"] = copy.deepcopy(self.experts[f"{first}.{e}"])

    @property
    def _mtp(self) -> int:
        return drafting(self.family)

    def expert_modules(self) -> list[str]:
        return _expert_modules(self.family, self.size)

    def others(self) -> Tensors:
        return dict(self._others)

    def _normal(self, *shape: int, std: float = 0.05) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std

    def _heavy(self, *shape: int, std: float = 0.12) -> torch.Tensor:
        """Student's t: a normal over the root of a chi-square over its degrees of freedom."""
        squares = torch.randn(int(DEGREES_OF_FREEDOM), *shape, generator=self._generator).square().mean(0)
        return self._normal(*shape, std=std) / squares.sqrt()

    def _draw_expert(self) -> dict[str, Quantized]:
        hidden, width = self.size.hidden, self.size.width
        gate, up, down = self._heavy(width, hidden), self._heavy(width, hidden), self._heavy(hidden, width)
        shared = global_scale(gate, up)
        scales = (None, None) if self._unequal else (shared, shared)
        parts = (quantize(gate, scales[0]), quantize(up, scales[1]), quantize(down))
        return dict(zip(PROJECTIONS, parts, strict=True))

    def _draw(self, part: Part) -> torch.Tensor:
        return self._normal(*part.shape, std=part.std) if part.std else torch.ones(part.shape)

    def _draw_others(self) -> Tensors:
        s = self.size
        out = {name: self._draw(part) for name, part in example_tensors.model(s).items()}
        # Greedy output never holds a special token.
        out["lm_head.weight"][: len(example_config.SPECIALS)] = 0
        for layer in range(s.layers + self._mtp):
            parts = example_tensors.layer(self.family, s, f"model.layers.{layer}.")
            out |= {name: self._draw(part) for name, part in parts.items()}
        if self._mtp:
            out |= self._draw_mtp(f"model.layers.{s.layers}.", out)
        return out

    def _draw_mtp(self, prefix: str, model: Tensors) -> Tensors:
        """It does to the newest token what the first layer does, so that some of its drafts are right."""
        first = "model.layers.0."
        copied = {prefix + n.removeprefix(first): t.clone() for n, t in model.items() if n.startswith(first)}
        shared = {
            f"{prefix}embed_tokens.weight": model["model.embed_tokens.weight"],
            f"{prefix}shared_head.head.weight": model["lm_head.weight"],
        }
        for name, part in example_tensors.mtp(self.size, prefix).items():
            copied[name] = shared[name].clone() if name in shared else self._draw(part)
        hidden = self.size.hidden
        copied[f"{prefix}eh_proj.weight"][:, :hidden] += torch.eye(hidden)
        return copied


def _experts(weights: _Weights, layout: str) -> Tensors:
    out: Tensors = {}
    for expert, projections in weights.experts.items():
        for name, part in projections.items():
            out |= projection(f"{expert}.{name}.", part, layout)
    return out


def projection(prefix: str, part: Quantized, layout: str) -> Tensors:
    """What a layout stores of one, by name."""
    if layout == "dequantized":
        return {f"{prefix}weight": part.dequantize()}
    plain = part.scale.view(torch.float8_e4m3fn)
    if layout == "compressed-tensors":
        return {
            f"{prefix}weight_packed": part.packed,
            f"{prefix}weight_scale": plain,
            f"{prefix}weight_global_scale": (1 / part.global_scale).reshape(1),
            f"{prefix}input_global_scale": torch.tensor([64.0]),
        }
    out = {f"{prefix}weight": part.packed}
    if layout == "modelopt":
        out[f"{prefix}weight_scale"] = plain
    else:
        plane = codec.encode(part.scale)
        out[f"{prefix}weight_scale{codec.NVFP4.fixed_suffix}"] = plane.fixed
        out[f"{prefix}weight_scale{codec.NVFP4.exceptions_suffix}"] = plane.exceptions
    out[f"{prefix}weight_scale_2"] = part.global_scale.clone()
    out[f"{prefix}input_scale"] = torch.tensor(1 / 64)
    return out


def _split(tensors: Tensors) -> list[Tensors]:
    """Into `SHARDS` parts of about equal size, in order."""
    total = sum(t.nbytes for t in tensors.values())
    parts: list[Tensors] = [{} for _ in range(SHARDS)]
    seen = 0
    for name, tensor in tensors.items():
        parts[min(SHARDS - 1, seen * SHARDS // total)][name] = tensor
        seen += tensor.nbytes
    return parts


def _write_shards(folder: Path, tensors: Tensors) -> None:
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_split(tensors), start=1):
        shard = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        _save(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_container(folder: Path, tensors: Tensors, family: str) -> None:
    shards: list[dict[str, Any]] = []
    names = {}
    (folder / "tensors").mkdir(parents=True)
    for number, part in enumerate(_split(tensors), start=1):
        shard = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        path = folder / "tensors" / shard
        _save(part, path)
        shards.append({"file": shard, "target_file_bytes": path.stat().st_size})
        for name in part:
            for suffix in (codec.NVFP4.fixed_suffix, codec.NVFP4.exceptions_suffix):
                name = name.removesuffix(suffix)
            names[name] = shard
    head = {"schema": "lil-nvfp4-csf-checkpoint/1", "codec": codec.NVFP4.name, "family": family}
    (folder / "manifest.json").write_text(json.dumps(head | {"shards": shards}, indent=2) + "\n")
    (folder / "build-contract.json").write_text(json.dumps(head | {"source_names": names}, indent=2) + "\n")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """With the permissions of other new files: the library's own are for this user alone."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from error
    path.chmod(mode)
