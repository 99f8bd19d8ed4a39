"""Checkpoints of every layout, opened into one form.

A  Hugging Face folder whose expert scales are stored as CSF streams
B  container (`container`)
C  Hugging Face folder with plain FP4 block scales, ModelOpt's or compressed-tensors'
other  none of these: no experts in FP4
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch

from . import container, conversion, inventory
from .errors import CheckpointError
from .files import TensorInfo, TensorReader, read_header, read_object
from .hub import locate
from .recipes import CONFIG_FILE, QUANT_CONFIG_FILE, Recipe, read_recipe
from .sources import ExpertLayer

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """An opened checkpoint: its tensors, its recipe and its layers of FP4 experts.

    root: the folder. metadata_root: the folder of config.json and tokenizer. layout: A, B, C or other.
    config: config.json as parsed ({} where there is none). tensors: every stored tensor by name.
    layers: expert layers in FP4, in natural order. other_experts: the other expert modules and the
    dtypes of their weights. A context manager; closing it unmaps the shards.
    """

    def __init__(
        self,
        root: Path,
        metadata_root: Path,
        is_container: bool,
        tensors: Mapping[str, TensorInfo],
        config: Mapping[str, Any],
        recipe: Recipe,
    ) -> None:
        stored, self.other_experts = inventory.build(tensors, recipe)
        self.root = root
        self.metadata_root = metadata_root
        self.config = config
        self.recipe = recipe
        self.tensors = tensors
        self._reader = TensorReader(tensors)
        self.layers = tuple(ExpertLayer(layer, self._reader) for layer in stored)
        self._by_name = {layer.name: layer for layer in self.layers}
        if is_container:
            self.layout = "B"
        elif any(layer.compressed for layer in self.layers):
            self.layout = "A"
        else:
            self.layout = "C" if self.layers else "other"

    def layer(self, name: str) -> ExpertLayer:
        """The expert layer of that module. Raises CheckpointError where there is none in FP4."""
        if name not in self._by_name:
            what = (
                f"its experts are {self.other_experts[name]}" if name in self.other_experts else "no experts"
            )
            raise CheckpointError(f"{name}: {what}, expected experts in FP4")
        return self._by_name[name]

    def read(
        self, name: str, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """A stored tensor, or a block of it, contiguous in its stored dtype.

        rows, cols: [start, stop) in stored units, of the first two dimensions. Raises CheckpointError,
        naming the tensor, where there is none or the block is outside.
        """
        return self._reader.read(name, rows, cols)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors asked for since the checkpoint was opened."""
        return self._reader.bytes_read

    def shards(self) -> list[Path]:
        """The shard files, sorted."""
        return sorted({info.shard for info in self.tensors.values()})

    def weight_map(self) -> dict[str, str]:
        """The index: tensor name to shard path relative to the root."""
        return {name: info.shard.relative_to(self.root).as_posix() for name, info in self.tensors.items()}

    def close(self) -> None:
        """Unmap the shards."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(
    path_or_repo: str | Path,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
) -> Checkpoint:
    """Open a checkpoint of any layout from a folder or a Hugging Face repository id.

    Reads headers only. revision, cache_dir, token, offline: of a repository, see `hub.locate`. Raises
    CheckpointError (FormatError, RecipeError), naming the tensor or file, for whatever is missing,
    damaged or contradictory.
    """
    root = locate(path_or_repo, revision, cache_dir, token, offline)
    # Without its index, the shards that are done would pass for all there are.
    if (conversion.folder_of(root) / conversion.INCOMPLETE).exists():
        raise CheckpointError(f"{root}: its conversion was interrupted; convert again to finish it")
    boxed = container.is_container(root)
    metadata_root = root / container.METADATA if boxed else root
    config = _object_or_nothing(metadata_root / CONFIG_FILE)
    recipe = read_recipe(config, _object_or_nothing(metadata_root / QUANT_CONFIG_FILE))
    with _many_objects():
        tensors = container.read_container(root) if boxed else _read_folder(root)
        return Checkpoint(root, metadata_root, boxed, tensors, config, recipe)


def _object_or_nothing(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


@contextmanager
def _many_objects() -> Iterator[None]:
    """Hundreds of thousands of small objects are made, none is garbage: looking for it doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- Hugging Face folders ------------------------------------------------------------------------


def _read_folder(root: Path) -> dict[str, TensorInfo]:
    index = _find_index(root)
    weight_map = _weight_map(index) if index is not None else None
    if weight_map is not None:
        shards = sorted(set(weight_map.values()))
    else:
        shards = _find_shards(root)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(root / shard, shard).items():
            if name in tensors:
                first = tensors[name].shard.relative_to(root).as_posix()
                raise CheckpointError(f"{name}: in {first} and in {shard}, expected one shard")
            tensors[name] = info
    for name, shard in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(
                f"{name}: missing in shard {shard}, where {index.name if index else ''} has it"
            )
        if tensors[name].shard != root / shard:
            found = tensors[name].shard.relative_to(root).as_posix()
            raise CheckpointError(f"{name}: in shard {found}, expected in {shard} by the index")
    return tensors


def _find_index(root: Path) -> Path | None:
    if (root / INDEX).exists():
        return root / INDEX
    found = sorted(root.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(f"{root}: indexes {[path.name for path in found]}, expected one or {INDEX}")
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name}: weight_map is {type(weight_map).__name__}, expected an object")
    for shard in set(map(str, weight_map.values())):
        if not is_shard_path(shard):
            raise CheckpointError(
                f"{index.name}: shard {shard!r}, expected a .safetensors file in this folder or below"
            )
    return weight_map


def is_shard_path(shard: str) -> bool:
    """Whether a name in an index is that of a shard in the index's folder or below."""
    path = PurePosixPath(shard)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in shard
    return inside and shard.isprintable() and path.suffix == ".safetensors"


def _find_shards(root: Path) -> list[str]:
    """Without an index: the shards at the top, or those in `tensors/`."""
    for folder in (root, root / container.TENSORS):
        found = sorted(path.relative_to(root).as_posix() for path in folder.glob("*.safetensors"))
        # Some repositories hold the same weights once more, in one file of another naming.
        ours = [shard for shard in found if PurePosixPath(shard).name.startswith("model")]
        if ours or found:
            return ours or found
    raise CheckpointError(f"{root}: no .safetensors files, expected a checkpoint")
