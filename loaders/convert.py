"""Plain NVFP4 to layout A, shard by shard: the scales compressed, everything else byte for byte.

Each shard of the source becomes one of the same name. A conversion that is interrupted goes on where it
stopped; the index is written last, so that a folder without it is never taken for a checkpoint.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from . import conversion, names, shard_writer
from .checkpoint import INDEX, Checkpoint, open_checkpoint
from .codec import NVFP4, Plane, encode_batch
from .conversion import ShardRecord, SourceFile
from .dialect import is_divisor, modelopt_names, reciprocal
from .errors import CheckpointError
from .files import read_header, read_object, resolved
from .layout_a import quantization_config
from .recipes import CONFIG_FILE, QUANT_CONFIG_FILE
from .shard_writer import Entry

BATCH_BYTES = 64 << 20  # of scale bytes that are encoded together
BOOKKEEPING = (".git", ".cache")  # folders that are no part of a checkpoint
LEFT_OVER = shard_writer.PARTIAL  # nor are files that a killed conversion or restoration left
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

    Memory: the compressed scales of `jobs` shards, and a batch of plain ones. Raises CheckpointError: the
    source is no plain NVFP4 checkpoint, the target holds something else, the disk is full. What can be
    refused is refused before anything is written.
    """
    source, target = resolved(source), resolved(target)
    if source == target or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target}: is, holds or lies in the source, expected a folder of its own")
    with open_checkpoint(source) as checkpoint:
        plan = _plan(checkpoint)
        with _claimed(target, source, plan.shards):
            done = {shard for shard in plan.shards if _finished(source, target, shard)}
            todo = [shard for shard in plan.shards if shard not in done]
            shard_writer.check_space(target, _least_bytes(checkpoint, plan, target, todo))
            for shard in done:
                if progress:
                    progress((source / shard).stat().st_size)
            _run(_Job(checkpoint, plan, target, progress), todo, jobs)
            _finish(checkpoint, plan, target, tool)
    before, after = (sum((root / s).stat().st_size for s in plan.shards) for root in (source, target))
    return Result(before, after, converted=len(todo), shards=len(plan.shards))


def _run(job: _Job, shards: list[str], jobs: int) -> None:
    """The first failure, or Ctrl-C, stops the shards at work and keeps the others from starting."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(job.shard, shard) for shard in shards]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            job.stop()
            pool.shutdown(cancel_futures=True)
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error


# ---- before --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """shards, others: files of the source, relative to it. names: of renamed tensors. config: the new one."""

    shards: list[str]
    others: list[str]
    names: dict[str, str]
    config: dict[str, Any]

    @property
    def rewritten(self) -> list[str]:
        return [name for name in self.others if _is_rewritten(name)]

    def copy_of(self, name: str, target: Path) -> Path:
        """Where a file that is no shard is kept."""
        return (conversion.folder_of(target) if _is_rewritten(name) else target) / name


def _plan(checkpoint: Checkpoint) -> _Plan:
    """What is to be done, or CheckpointError for a source that cannot become layout A."""
    root = checkpoint.root
    _check_source(checkpoint)
    shards = [path.relative_to(root).as_posix() for path in checkpoint.shards()]
    keys = {conversion.shard_key(shard): shard for shard in shards}
    for shard in shards:
        if (other := keys[conversion.shard_key(shard)]) != shard:
            raise CheckpointError(f"shard {shard}: its record would have the name of that of {other}")
    files = _source_files(root)
    if lost := sorted(set(shards) - set(files)):
        raise CheckpointError(f"shard {lost[0]}: is not among the files of {root}")
    others = [name for name in files if name not in shards]
    _index_metadata(root)
    # Without an index every shard counts; with one, only those that it names.
    strays = [name for name in others if name.endswith(".safetensors")]
    if strays and not any(_is_index(name) for name in others):
        raise CheckpointError(f"{root / strays[0]}: holds tensors beside {shards}, and there is no index")
    return _Plan(shards, others, modelopt_names(checkpoint.tensors), _new_config(checkpoint))


def _check_source(checkpoint: Checkpoint) -> None:
    root = checkpoint.root
    if checkpoint.layout in ("A", "B"):
        raise CheckpointError(f"{root}: is compressed already (layout {checkpoint.layout})")
    if checkpoint.layout != "C":
        raise CheckpointError(f"{root}: has no experts with plain NVFP4 scales")
    if conversion.folder_of(root).exists():
        raise CheckpointError(
            f"{conversion.folder_of(root)}: exists, expected a source without such a folder"
        )
    ours = {layer.name for layer in checkpoint.layers}
    for layer in checkpoint.layers:
        if layer.spec is not NVFP4:
            raise CheckpointError(f"{layer.name}: is {layer.spec.name}, expected NVFP4")
    for name, info in checkpoint.tensors.items():
        found = names.parse(name)
        if found is None or found.module not in ours:
            continue
        if found.expert is None:
            raise CheckpointError(f"{name}: holds all experts in one tensor, expected one tensor an expert")
        if found.part == names.SCALE:
            rows, cols = info.shape
            NVFP4.check_shape(rows, cols, name)


def _source_files(root: Path) -> list[str]:
    """Every file below a folder, links followed; without what git, downloads and we keep for ourselves."""
    found: list[str] = []
    for folder, below, files in os.walk(root, onerror=_unreadable, followlinks=True):
        here = Path(folder)
        if any(parent.samefile(here) for parent in here.parents if parent.is_relative_to(root)):
            raise CheckpointError(f"{here}: a link to a folder around it")
        below[:] = sorted(name for name in below if name not in BOOKKEEPING)
        for name in files:
            if name.endswith(LEFT_OVER):
                continue
            if not (here / name).is_file():
                raise CheckpointError(f"{here / name}: a broken link or no ordinary file")
            found.append((here / name).relative_to(root).as_posix())
    return sorted(found)


def _unreadable(error: OSError) -> None:
    raise error


def _is_index(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors.index.json")


def _is_rewritten(path: str) -> bool:
    return path in (CONFIG_FILE, QUANT_CONFIG_FILE) or _is_index(path)


@contextmanager
def _claimed(target: Path, source: Path, shards: list[str]) -> Iterator[None]:
    """The target is new, or an interrupted conversion of the same source; nobody else works on it."""
    marker = conversion.folder_of(target) / conversion.INCOMPLETE
    identity = json.dumps({"source": str(source), "shards": shards}).encode()
    if not marker.exists():
        _check_empty(target, marker)
    marker.parent.mkdir(parents=True, exist_ok=True)
    # Never replaced, since its lock lies on this very file.
    with marker.open("ab+") as held:
        _lock(held, marker, target)
        held.seek(0)
        found = held.read()
        if found != identity:
            # Killed before all of it was written, a conversion wrote nothing else.
            if not identity.startswith(found):
                raise CheckpointError(f"{target}: holds an interrupted conversion of another source")
            _check_empty(target, marker)
            with shard_writer.full_disk_named(marker):
                held.write(identity[len(found) :])
                held.flush()
                os.fsync(held.fileno())
        yield


def _lock(held: BinaryIO, marker: Path, target: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{target}: another conversion is at work on it") from None
    except OSError:
        pass  # a file system without locks
    if not marker.exists() or not os.path.samestat(os.fstat(held.fileno()), marker.stat()):
        raise CheckpointError(f"{target}: another conversion has just finished it")


def _check_empty(target: Path, marker: Path) -> None:
    """But for the marker of a conversion that did nothing more."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file, expected a new folder")
    if any(path not in (marker, marker.parent) for path in target.rglob("*")):
        raise CheckpointError(f"{target}: is not empty, and no interrupted conversion")


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


def _least_bytes(checkpoint: Checkpoint, plan: _Plan, target: Path, shards: list[str]) -> int:
    """Scales shrink to half at best, so that no disk is refused that could do."""
    root = checkpoint.root
    others = [name for name in plan.others if not plan.copy_of(name, target).exists()]
    sizes = sum((root / name).stat().st_size for name in shards + others)
    paths = {root / shard for shard in shards}
    scales = sum(
        info.nbytes for name, info in checkpoint.tensors.items() if info.shard in paths and _is_scale(name)
    )
    return sizes - scales // 2


def _is_scale(name: str) -> bool:
    found = names.parse(name)
    return found is not None and found.part == names.SCALE


# ---- one shard -----------------------------------------------------------------------------------


class _StoppedError(CheckpointError):
    pass


class _Job:
    """What the threads share. `stop` ends them at their next piece of work."""

    def __init__(self, checkpoint: Checkpoint, plan: _Plan, target: Path, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._target = target
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._progress = progress
        self._ours = {layer.name for layer in checkpoint.layers}
        self._by_shard: dict[Path, list[str]] = defaultdict(list)
        for name, info in checkpoint.tensors.items():
            self._by_shard[info.shard].append(name)

    def stop(self) -> None:
        self._stopped.set()

    def shard(self, shard: str) -> None:
        """Converts one shard, unless another one failed."""
        try:
            self._tell(0)
            self._convert(shard)
        except BaseException:
            self.stop()
            raise

    def _convert(self, shard: str) -> None:
        source = self._checkpoint.root / shard
        stamp = _stamp(source)
        own = self._by_shard[source]
        if read_header(source) != {name: self._checkpoint.tensors[name] for name in own}:
            raise CheckpointError(f"shard {source}: changed since the checkpoint was opened")
        planes = self._encode(source)
        divisors: dict[str, str] = {}
        entries: list[Entry] = []
        for name in own:
            entries += self._entries(name, planes.get(name), divisors)
        entries = shard_writer.aligned(entries)
        header, metadata = _header_of(source)
        size = shard_writer.write_shard(self._target / shard, entries, metadata)
        kept = conversion.folder_of(self._target) / f"{conversion.shard_key(shard)}.header"
        shard_writer.write_whole(kept, header)
        digest = hashlib.sha256()
        for chunk in shard_writer.file_bytes(source):
            digest.update(chunk)
            self._tell(0)
        if _stamp(source) != stamp:
            raise CheckpointError(f"shard {source}: changed while it was converted")
        record = ShardRecord(
            shard,
            stamp,
            digest.hexdigest(),
            size,
            [entry.name for entry in entries],
            {name: self._plan.names[name] for name in own if name in self._plan.names},
            divisors,
        )
        conversion.write_shard_record(self._target, record)

    def _tell(self, count: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError("stopped")
        if self._progress and count:
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

    def _entries(self, name: str, plane: Plane | None, divisors: dict[str, str]) -> Iterable[Entry]:
        info = self._checkpoint.tensors[name]
        target = self._plan.names.get(name, name)
        if plane is not None:
            yield _array(name + NVFP4.fixed_suffix, "U8", plane.fixed.numpy())
            yield _array(name + NVFP4.exceptions_suffix, "U32", plane.exceptions.numpy())
        elif target != name and is_divisor(name):
            stored = self._checkpoint.read(name)
            value = reciprocal(stored)
            # Restoring takes the reciprocal of the multiplier, which is not always what it came from.
            if reciprocal(value).numpy().tobytes() != stored.numpy().tobytes():
                divisors[name] = stored.numpy().tobytes().hex()
            self._tell(info.nbytes)
            yield _array(target, "F32", value.numpy())
        else:
            yield Entry(target, info.dtype, info.shape, lambda: shard_writer.stored_bytes(info, self._tell))


def _array(name: str, dtype: str, array: np.ndarray) -> Entry:
    return Entry(name, dtype, array.shape, lambda: (array.tobytes(),))


def _header_of(shard: Path) -> tuple[bytes, dict[str, str] | None]:
    """The header with its length, and its metadata."""
    with shard.open("rb") as file:
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    return length + text, json.loads(text).get("__metadata__")


# ---- after ---------------------------------------------------------------------------------------


def _finish(checkpoint: Checkpoint, plan: _Plan, target: Path, tool: str) -> None:
    """Everything that is no shard; the index last."""
    source = checkpoint.root
    files: list[SourceFile] = []
    weight_map: dict[str, str] = {}
    size = 0
    for shard in plan.shards:
        record = conversion.read_shard_record(target, shard)
        assert record is not None, shard
        files.append(SourceFile(shard, record.source[0], record.sha256))
        weight_map |= dict.fromkeys(record.weight_map, shard)
        size += record.target_bytes - len(_header_of(target / shard)[0])
    for name in plan.others:
        digest = shard_writer.copy_whole(source / name, plan.copy_of(name, target))
        files.append(SourceFile(name, (source / name).stat().st_size, digest))
    conversion.write_record(target, tool, files, plan.shards, plan.rewritten)
    _write_json(target / CONFIG_FILE, plan.config)
    metadata = _index_metadata(source) | {"total_size": size}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(target / INDEX, index)
    (conversion.folder_of(target) / conversion.INCOMPLETE).unlink(missing_ok=True)


def _index_metadata(source: Path) -> dict[str, Any]:
    found = read_object(source / INDEX).get("metadata") if (source / INDEX).exists() else None
    if not isinstance(found, dict | None):
        raise CheckpointError(f"{INDEX}: metadata is a {type(found).__name__}, expected an object")
    return found or {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    shard_writer.write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def _new_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = copy.deepcopy(dict(checkpoint.config))
    nested = config.get("text_config")
    place = config
    if isinstance(nested, dict) and "quantization_config" in nested and "quantization_config" not in config:
        place = nested
    place["quantization_config"] = quantization_config(checkpoint)
    config.pop("compression_config", None)
    return config


def source_bytes(source: Path) -> int:
    """Bytes of the shards, for a progress bar."""
    with open_checkpoint(source) as checkpoint:
        return sum(path.stat().st_size for path in checkpoint.shards())
