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
        self._modules: dict[str, set[str]] = defaultdict(set)
        self._shards: dict[str, Path | None] = {}
        for name in shards:
            if parsed := names.parse(name):
                part = parsed.part
                if part == names.OTHER and "scale" in name:
                    part = names.SCALE
                known = self._experts[canonical(parsed.module)]
                if part not in known:
                    # One tensor of a kind stands for all: this object is sent to every worker.
                    known[part], self._shards[name] = name, shards[name]
            else:
                module, _, tail = name.rpartition(".")
                self._modules[canonical(module)].add(tail)

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

    def modelopt_algorithm(self, prefix: str) -> str:
        """ModelOpt's name of the format of experts that are neither NVFP4 nor unquantised."""
        scale = self._experts[canonical(prefix)][names.SCALE]
        if scale.endswith("_inv"):
            return "FP8_PB_WO"
        dtype, shape = self._header(scale)
        if dtype == "U8":
            return "MXFP8"
        return "FP8_PB_WO" if len(shape) >= 2 and min(shape) > 1 else "FP8"

    def is_plain_linear(self, prefix: str, packed: Mapping[str, Iterable[str]]) -> bool:
        """Whether a linear layer is there and has nothing but its weight (and bias)."""
        name = prefix.rpartition(".")[2]
        parent = prefix.removesuffix(name)
        found = [self._tails(canonical(parent + member)) for member in packed.get(name, (name,))]
        return all(tails is not None and "weight" in tails and tails <= {"weight", "bias"} for tails in found)

    def _tails(self, module: str) -> set[str] | None:
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

    def _header(self, name: str) -> tuple[str, list[int]]:
        path = self._shards[name]
        if path is None:
            return "F32", []
        with safe_open(path, "pt") as shard:
            tensor = shard.get_slice(name)
            return tensor.get_dtype(), tensor.get_shape()


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
