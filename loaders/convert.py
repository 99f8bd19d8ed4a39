"""Plain NVFP4 to layout A, shard by shard: the scales compressed, everything else byte for byte.

Each shard of the source becomes one of the same name. A conversion that is interrupted goes on where it
stopped; the index is written last, so that a folder without it is never taken for a checkpoint.
"""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import conversion, names, shard_writer
from .checkpoint import INDEX, Checkpoint, open_checkpoint
from .codec import NVFP4, Plane, encode_batch
from .conversion import ShardRecord, SourceFile
from .errors import CheckpointError
from .layout_a import quantization_config
from .recipes import CONFIG_FILE, QUANT_CONFIG_FILE
from .shard_writer import Entry

BATCH_BYTES = 64 << 20  # of scale bytes that are encoded together
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Result:
    """Bytes of the source's and the target's shards, and how many were converted in this run."""

    source_bytes: int
    target_bytes: int
    converted: int
    shards: int


def convert(source: Path, target: Path, tool: str, jobs: int = 1, progress: Progress | None = None) -> Result:
    """Converts a checkpoint folder. `progress` is told bytes of the source as they are done.

    Raises CheckpointError: the source is no plain NVFP4 checkpoint, the target holds something else, the
    disk is full.
    """
    source, target = source.resolve(), target.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target}: is, holds or lies in the source, expected a folder of its own")
    with open_checkpoint(source) as checkpoint:
        _check_source(checkpoint)
        shards = [path.relative_to(source).as_posix() for path in checkpoint.shards()]
        _claim(target, source, shards)
        done = {shard: _finished(source, target, shard) for shard in shards}
        _check_space(source, target, [shard for shard in shards if not done[shard]])
        todo = [shard for shard in shards if not done[shard]]
        for shard in shards:
            if done[shard] and progress:
                progress((source / shard).stat().st_size)
        job = _Job(checkpoint, target, progress)
        if jobs > 1:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(job.shard, todo))
        else:
            for shard in todo:
                job.shard(shard)
        _finish(checkpoint, source, target, shards, tool)
    before, after = (sum((root / s).stat().st_size for s in shards) for root in (source, target))
    return Result(before, after, converted=len(todo), shards=len(shards))


# ---- before --------------------------------------------------------------------------------------


def _check_source(checkpoint: Checkpoint) -> None:
    root = checkpoint.root
    if checkpoint.layout in ("A", "B"):
        raise CheckpointError(f"{root}: is compressed already (layout {checkpoint.layout})")
    if checkpoint.layout != "C":
        raise CheckpointError(f"{root}: has no experts with plain NVFP4 scales")
    ours = {layer.name for layer in checkpoint.layers}
    for layer in checkpoint.layers:
        if layer.spec is not NVFP4:
            raise CheckpointError(f"{layer.name}: is {layer.spec.name}, expected NVFP4")
    for name in checkpoint.tensors:
        found = names.parse(name)
        if found is not None and found.module in ours and found.expert is None:
            raise CheckpointError(f"{name}: holds all experts in one tensor, expected one tensor an expert")
        if name.endswith(".weight_packed") and (found is None or found.module not in ours):
            raise CheckpointError(
                f"{name}: a packed layer that is no NVFP4 expert, which layout A cannot describe"
            )


def _claim(target: Path, source: Path, shards: list[str]) -> None:
    """The target is new, or an interrupted conversion of the same source."""
    marker = conversion.folder_of(target) / conversion.INCOMPLETE
    identity = json.dumps({"source": str(source), "shards": shards})
    if target.exists() and any(target.iterdir()):
        if not marker.exists():
            raise CheckpointError(f"{target}: is not empty, and no interrupted conversion")
        if marker.read_text() != identity:
            raise CheckpointError(f"{target}: holds an interrupted conversion of another source")
    else:
        shard_writer.write_whole(marker, identity.encode())


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _finished(source: Path, target: Path, shard: str) -> bool:
    record = conversion.read_shard_record(target, shard)
    path = target / shard
    return (
        record is not None
        and record.source == _stamp(source / shard)
        and path.exists()
        and path.stat().st_size == record.target_bytes
    )


def _check_space(source: Path, target: Path, shards: list[str]) -> None:
    """Compressed scales are about half: a target needs nine tenths of its source at the least."""
    needed = sum((source / shard).stat().st_size for shard in shards) * 9 // 10
    free = shutil.disk_usage(target).free
    if free < needed:
        raise CheckpointError(f"{target}: {free} bytes are free, expected at least {needed}")


# ---- one shard -----------------------------------------------------------------------------------


class _Job:
    def __init__(self, checkpoint: Checkpoint, target: Path, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._target = target
        self._lock = threading.Lock()
        self._progress = progress
        self._ours = {layer.name for layer in checkpoint.layers}
        self._by_shard: dict[Path, list[str]] = defaultdict(list)
        for name, info in checkpoint.tensors.items():
            self._by_shard[info.shard].append(name)

    def shard(self, shard: str) -> None:
        source = self._checkpoint.root / shard
        stamp = _stamp(source)
        planes = self._encode(source)
        renamed: dict[str, str] = {}
        divisors: dict[str, str] = {}
        entries: list[Entry] = []
        for name in self._by_shard[source]:
            entries += self._entries(name, planes.get(name), renamed, divisors)
        entries = shard_writer.aligned(entries)
        header, metadata = _header_of(source)
        size = shard_writer.write_shard(self._target / shard, entries, metadata)
        kept = conversion.folder_of(self._target) / f"{conversion.shard_key(shard)}.header"
        shard_writer.write_whole(kept, header)
        record = ShardRecord(
            shard,
            stamp,
            shard_writer.sha256(source),
            size,
            [entry.name for entry in entries],
            renamed,
            divisors,
        )
        if _stamp(source) != stamp:
            raise CheckpointError(f"shard {source}: changed while it was converted")
        conversion.write_shard_record(self._target, record)

    def _tell(self, count: int) -> None:
        if self._progress:
            with self._lock:
                self._progress(count)

    def _encode(self, source: Path) -> dict[str, Plane]:
        """The planes of the shard's expert scales, encoded many at a time."""
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self._by_shard[source]:
            found = names.parse(name)
            if found is not None and found.module in self._ours and found.part == names.SCALE:
                groups[self._checkpoint.tensors[name].shape].append(name)
        planes: dict[str, Plane] = {}
        for shape, members in groups.items():
            batch = max(1, BATCH_BYTES // max(1, int(np.prod(shape))))
            for start in range(0, len(members), batch):
                part = members[start : start + batch]
                scales = torch.from_numpy(
                    np.stack([self._checkpoint.read(name).view(torch.uint8).numpy() for name in part])
                )
                planes |= dict(zip(part, encode_batch(scales, NVFP4, part[0]), strict=True))
                self._tell(scales.numel())
        return planes

    def _entries(
        self, name: str, plane: Plane | None, renamed: dict[str, str], divisors: dict[str, str]
    ) -> Iterable[Entry]:
        info = self._checkpoint.tensors[name]
        found = names.parse(name)
        if plane is not None:
            yield _array(name + NVFP4.fixed_suffix, "U8", plane.fixed.numpy())
            yield _array(name + NVFP4.exceptions_suffix, "U32", plane.exceptions.numpy())
        elif found is not None and found.module in self._ours and found.divisor:
            yield self._multiplier(name, found.part, renamed, divisors)
        else:
            target = name
            if found is not None and found.module in self._ours and name.endswith(".weight_packed"):
                target = renamed[name] = name.removesuffix("_packed")
            yield Entry(target, info.dtype, info.shape, lambda: shard_writer.stored_bytes(info, self._tell))

    def _multiplier(self, name: str, part: str, renamed: dict[str, str], divisors: dict[str, str]) -> Entry:
        """compressed-tensors' global scales divide; those of layout A multiply."""
        stored = self._checkpoint.read(name)
        if stored.numel() != 1 or stored.dtype != torch.float32:
            raise CheckpointError(f"{name}: is {stored.dtype} {list(stored.shape)}, expected one FP32 value")
        value = (1 / stored.reshape(())).reshape(())
        if not torch.equal((1 / value).view(torch.int32), stored.reshape(()).view(torch.int32)):
            divisors[name] = stored.numpy().tobytes().hex()
        last = "weight_scale_2" if part == names.GLOBAL_SCALE else "input_scale"
        renamed[name] = f"{name.rpartition('.')[0]}.{last}"
        self._tell(4)
        return _array(renamed[name], "F32", value.numpy())


def _array(name: str, dtype: str, array: np.ndarray) -> Entry:
    return Entry(name, dtype, array.shape, lambda: (array.tobytes(),))


def _header_of(shard: Path) -> tuple[bytes, dict[str, str] | None]:
    """The header with its length, and its metadata."""
    with shard.open("rb") as file:
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    return length + text, json.loads(text).get("__metadata__")


# ---- after ---------------------------------------------------------------------------------------


def _finish(checkpoint: Checkpoint, source: Path, target: Path, shards: list[str], tool: str) -> None:
    """Everything that is no shard; the index last."""
    kept = conversion.folder_of(target)
    files = []
    rewritten = [CONFIG_FILE, INDEX, QUANT_CONFIG_FILE]
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        relative = path.relative_to(source).as_posix()
        if relative in shards:
            record = conversion.read_shard_record(target, relative)
            assert record is not None, relative
            files.append(SourceFile(relative, path.stat().st_size, record.sha256))
            continue
        if relative.endswith(".safetensors"):
            raise CheckpointError(f"{path}: a shard that the index does not name")
        files.append(SourceFile(relative, path.stat().st_size, shard_writer.sha256(path)))
        shard_writer.copy_whole(path, (kept if relative in rewritten else target) / relative)
    stored = [file.path for file in files]
    conversion.write_record(target, tool, files, shards, [name for name in rewritten if name in stored])
    config = _new_config(checkpoint)
    shard_writer.write_whole(target / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
    shard_writer.write_whole(
        target / INDEX, (json.dumps(_new_index(source, target, shards), indent=2) + "\n").encode()
    )
    (kept / conversion.INCOMPLETE).unlink(missing_ok=True)


def _new_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = copy.deepcopy(dict(checkpoint.config))
    nested = config.get("text_config")
    place = config
    if isinstance(nested, dict) and "quantization_config" in nested and "quantization_config" not in config:
        place = nested
    place["quantization_config"] = quantization_config(checkpoint)
    config.pop("compression_config", None)
    return config


def _new_index(source: Path, target: Path, shards: list[str]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if (source / INDEX).exists():
        metadata = dict(json.loads((source / INDEX).read_text()).get("metadata") or {})
    weight_map: dict[str, str] = {}
    size = 0
    for shard in shards:
        record = conversion.read_shard_record(target, shard)
        assert record is not None, shard
        weight_map |= dict.fromkeys(record.weight_map, shard)
        header = int.from_bytes((target / shard).open("rb").read(8), "little")
        size += record.target_bytes - 8 - header
    return {"metadata": metadata | {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}


def source_bytes(source: Path) -> int:
    """Bytes of the shards, for a progress bar."""
    with open_checkpoint(source) as checkpoint:
        return sum(path.stat().st_size for path in checkpoint.shards())
