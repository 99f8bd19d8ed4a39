"""Rebuilds the source of a converted checkpoint, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from . import conversion, shard_writer
from .checkpoint import Checkpoint, open_checkpoint
from .codec import NVFP4, decode, plane_from_streams
from .conversion import ShardRecord
from .convert import Progress
from .errors import CheckpointError


def restore(converted: Path, target: Path, progress: Progress | None = None) -> int:
    """Writes the source's files into `target` and returns their number.

    Every file is compared with the SHA-256 that was taken when the source was converted. Raises
    CheckpointError, naming the file, where one differs or cannot be rebuilt.
    """
    converted, target = converted.resolve(), target.resolve()
    record = conversion.read_record(converted)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: is not empty, expected a new folder")
    target.mkdir(parents=True, exist_ok=True)
    kept = conversion.folder_of(converted)
    with open_checkpoint(converted) as checkpoint:
        for file in record.files:
            path = target / file.path
            if file.path in record.shards:
                _restore_shard(checkpoint, file.path, path)
            else:
                root = kept if file.path in record.rewritten else converted
                if not (root / file.path).exists():
                    raise CheckpointError(f"{root / file.path}: missing, cannot restore {file.path}")
                shard_writer.copy_whole(root / file.path, path)
            found = shard_writer.sha256(path)
            if found != file.sha256:
                raise CheckpointError(f"{file.path}: SHA-256 is {found}, expected {file.sha256}")
            if progress:
                progress(file.bytes)
    return len(record.files)


def _restore_shard(checkpoint: Checkpoint, shard: str, path: Path) -> None:
    record = conversion.read_shard_record(checkpoint.root, shard)
    kept = conversion.folder_of(checkpoint.root) / f"{conversion.shard_key(shard)}.header"
    if record is None or not kept.exists():
        raise CheckpointError(f"{kept}: missing, cannot restore {shard}")
    header = kept.read_bytes()
    try:
        entries = json.loads(header[8:])
    except ValueError as error:
        raise CheckpointError(f"{kept}: is no header of a shard: {error}") from error
    entries.pop("__metadata__", None)
    with shard_writer.whole_file(path) as file:
        file.write(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            for chunk in _source_bytes(checkpoint, record, name, tuple(entry["shape"])):
                file.write(chunk)


def _source_bytes(
    checkpoint: Checkpoint, record: ShardRecord, name: str, shape: tuple[int, ...]
) -> Iterator[bytes]:
    """The bytes of a tensor of the source."""
    if name in record.divisors:
        yield bytes.fromhex(record.divisors[name])
        return
    stored = record.names.get(name, name)
    if name + NVFP4.fixed_suffix in checkpoint.tensors:
        fixed, exceptions = (checkpoint.read(name + s) for s in (NVFP4.fixed_suffix, NVFP4.exceptions_suffix))
        rows, columns = shape
        yield decode(plane_from_streams(fixed, exceptions, rows, columns, NVFP4, name)).numpy().tobytes()
    elif stored != name and not name.endswith(".weight_packed"):
        yield (1 / checkpoint.read(stored).to(torch.float32)).numpy().tobytes()
    elif stored in checkpoint.tensors:
        yield from shard_writer.stored_bytes(checkpoint.tensors[stored])
    else:
        raise CheckpointError(f"{stored}: missing, cannot restore {name}")
