"""What a checkpoint really holds for a module, read from its index and shard headers.

Recipes are wrong often enough (an MTP layer left in BF16 that no ``ignore`` entry names), and vLLM
names modules otherwise than checkpoints do. So modules are matched by what follows the last
``layers.``, and judged by the names of their tensors.
"""

from __future__ import annotations

import enum
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open

from .loaders import names

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PLAIN = "plain"
_GLOBAL_SCALES = {"weight_scale_2", "weight_global_scale"}
_LAYER = re.compile(r"(mtp\.)?layers\.\d+\.")
CONTAINER_METADATA = "metadata"
CONTAINER_MANIFEST = "manifest.json"


def checkpoint_of(model: str) -> str:
    """The checkpoint that a model argument means: a container's metadata folder means the container."""
    folder = Path(model)
    if folder.name == CONTAINER_METADATA and (folder.parent / CONTAINER_MANIFEST).is_file():
        return str(folder.parent)
    return model


class ExpertsKind(enum.Enum):
    CSF = "CSF streams"
    NVFP4 = "NVFP4 with plain scales"
    UNQUANTIZED = "no scales"
    OTHER = "another format"


def canonical(name: str) -> str:
    """A module's name without what differs between checkpoints and vLLM."""
    head, found, tail = name.replace(".mtp_block.", ".").rpartition("layers.")
    if not found:
        return name
    return ("mtp." if "mtp" in head else "") + found + tail


class Stored:
    """Tensor names of a checkpoint, by module; headers of its shards are read when asked for.

    shards: tensor name -> path of its shard, or None where the shard is not on this machine.
    """

    def __init__(self, shards: Mapping[str, Path | None]) -> None:
        self._experts: dict[str, dict[str, str]] = defaultdict(dict)
        self._modules: dict[str, dict[str, str]] = defaultdict(dict)
        self._scales: dict[str, Path | None] = {}
        for name in shards:
            if parsed := names.parse(name):
                part = parsed.part
                if part == names.OTHER and "scale" in name:
                    part = names.SCALE
                known = self._experts[canonical(parsed.module)]
            else:
                module, _, part = name.rpartition(".")
                known = self._modules[canonical(module)]
            if part not in known:
                # Of experts one tensor of a kind stands for all: this object is sent to every worker.
                known[part] = name
                if "scale" in part:
                    self._scales[name] = shards[name]

    def experts(self, prefix: str) -> ExpertsKind | None:
        """The kind of a layer's experts; None where the checkpoint has none under that name."""
        parts = self._experts.get(canonical(prefix))
        if not parts:
            return None
        if names.SCALE_FIXED in parts or names.SCALE_EXCEPTIONS in parts:
            return ExpertsKind.CSF
        if names.GLOBAL_SCALE in parts:
            return ExpertsKind.NVFP4
        return ExpertsKind.OTHER if names.SCALE in parts else ExpertsKind.UNQUANTIZED

    def has_packed_names(self, prefix: str) -> bool:
        """Whether a layer's experts have the names of compressed-tensors."""
        return self._experts[canonical(prefix)].get(names.WEIGHT, "").endswith("weight_packed")

    def experts_algorithm(self, prefix: str) -> str:
        """ModelOpt's name of the format of experts of the kind OTHER."""
        return self._algorithm(self._experts[canonical(prefix)][names.SCALE])

    def linear_algorithm(self, prefix: str, packed: Mapping[str, Iterable[str]]) -> str | None:
        """ModelOpt's name of the format of a linear layer; PLAIN without any scale; None if unknown.

        packed: the parts of layers that vLLM joins, q_proj and so on of qkv_proj.
        """
        name = prefix.rpartition(".")[2]
        parent = prefix.removesuffix(name)
        parts = [self._parts(canonical(parent + member)) for member in packed.get(name, (name,))]
        if any(found is None or not found.keys() & {"weight", "weight_packed"} for found in parts):
            return None
        scales = [found.get("weight_scale", found.get("weight_scale_inv")) for found in parts if found]
        if not any(scales):
            return PLAIN
        if None in scales or any(found and found.keys() & _GLOBAL_SCALES for found in parts):
            return None
        return self._algorithm(str(scales[0]))

    def _parts(self, module: str) -> dict[str, str] | None:
        """What is stored of a module. Some of vLLM's names leave a step out (the head of an MTP layer is
        ``layers.N.head``, stored as ``layers.N.shared_head.head``): then the only one so named counts."""
        if module in self._modules:
            return self._modules[module]
        layer = _LAYER.match(module)
        if layer is None:
            return None
        last = "." + module.rpartition(".")[2]
        named = [m for m in self._modules if m.startswith(layer[0]) and m.endswith(last)]
        return self._modules[named[0]] if len(named) == 1 else None

    def _algorithm(self, scale: str) -> str:
        if scale.endswith("_inv"):
            return "FP8_PB_WO"
        path = self._scales[scale]
        if path is None:
            return "FP8"
        with safe_open(path, "pt") as shard:
            tensor = shard.get_slice(scale)
            dtype, shape = tensor.get_dtype(), tensor.get_shape()
        if dtype == "U8":
            return "MXFP8"
        longer = [n for n in shape if n > 1]
        return ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")[min(len(longer), 2)]


def read_stored(model: str, revision: str | None = None) -> Stored | None:
    """What the checkpoint `model` (a folder or a repository) holds; None if it cannot be told."""
    folder = Path(model)
    if folder.is_dir():
        return _from_folder(folder)
    try:
        index = Path(hf_hub_download(model, INDEX, revision=revision))
    except (EntryNotFoundError, LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    files = json.loads(index.read_text())["weight_map"]
    paths = {file: try_to_load_from_cache(model, file, revision=revision) for file in set(files.values())}
    local = {file: Path(path) if isinstance(path, str) else None for file, path in paths.items()}
    return Stored({name: local[file] for name, file in files.items()})


def _from_folder(folder: Path) -> Stored | None:
    if (index := folder / INDEX).is_file():
        files = json.loads(index.read_text())["weight_map"]
        return Stored({name: folder / file for name, file in files.items()})
    container = Path(checkpoint_of(str(folder)))
    if (contract := container / "build-contract.json").is_file():
        files = json.loads(contract.read_text())["source_names"]
        return Stored({name: container / "tensors" / file for name, file in files.items()})
    if (single := folder / SINGLE).is_file():
        with safe_open(single, "pt") as shard:
            return Stored(dict.fromkeys(shard.keys(), single))
    return None
