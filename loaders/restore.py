"""Rebuilds the source of a converted checkpoint, byte for byte."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from . import conversion, shard_writer
from .checkpoint import Checkpoint, open_checkpoint
from .codec import NVFP4, decode, plane_from_streams
from .conversion import Record, ShardRecord, SourceFile
from .dialect import is_divisor, reciprocal
from .errors import CheckpointError, one_line, reason
from .files import resolved

Progress = Callable[[int], None]


def restore(converted: Path, target: Path, progress: Progress | None = None) -> int:
    """Writes the source's files into `target` and returns their number.

    Every file is compared with the SHA-256 that was taken when the source was converted, before it gets
    its name; config and index come last. Raises CheckpointError, naming the file, where one differs or
    cannot be rebuilt; what was restored before stays, and the error says so. `progress`
    is told bytes as they are written.
    """
    converted, target = resolved(converted), resolved(target)
    record = conversion.read_record(converted)
    if converted == target or converted in target.parents or target in converted.parents:
        raise CheckpointError(f"{target}: is, holds or lies in {converted}, expected a folder of its own")
    if os.path.exists(target) and not target.is_dir():
        raise CheckpointError(f"{target}: is a file, expected a new folder")
    with open_checkpoint(converted) as checkpoint, _folder(target), _claimed(target), _named(target):
        shard_writer.check_space(target, sum(file.bytes for file in record.files))
        for file in sorted(
            record.files, key=lambda f: (f.path not in record.shards, f.path in record.rewritten)
        ):
            with shard_writer.whole_file(target / file.path) as out:
                for chunk in checked(checkpoint, record, file):
                    out.write(chunk)
                    if progress:
                        progress(len(chunk))
    return len(record.files)


@contextmanager
def _folder(target: Path) -> Iterator[None]:
    """Makes it; after an error it goes again, if it was made here and nothing came into it."""
    missing = [path for path in (target, *target.parents) if not os.path.exists(path)]
    try:
        _make(target)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def _make(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be made: {reason(error)}") from error


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Whatever ends a restoration also says what it leaves there, which the next one would not take."""
    try:
        yield
    except (CheckpointError, OSError, KeyboardInterrupt) as error:
        if not any(target.iterdir()):
            raise
        left = f"{target} is restored in part, delete it before another try"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(left) from error
        raise CheckpointError(f"{one_line(error)}; {left}") from error


@contextmanager
def _claimed(target: Path) -> Iterator[None]:
    """Nobody else restores into the folder, which is empty."""
    held = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{target}: another restoration is at work on it") from None
        except OSError:
            pass  # a file system without locks
        if any(target.iterdir()):
            raise CheckpointError(f"{target}: is not empty, expected a new folder")
        yield
    finally:
        os.close(held)


def checked(checkpoint: Checkpoint, record: Record, file: SourceFile) -> Iterator[bytes]:
    """The bytes of a file of the source. Raises CheckpointError at their end where the SHA-256 differs."""
    digest = hashlib.sha256()
    for chunk in _file_bytes(checkpoint, record, file):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{file.path}: SHA-256 is {digest.hexdigest()}, expected {file.sha256}")


def _file_bytes(checkpoint: Checkpoint, record: Record, file: SourceFile) -> Iterator[bytes]:
    if file.path in record.shards:
        yield from _shard_bytes(checkpoint, file.path)
        return
    root = checkpoint.root
    path = (conversion.folder_of(root) if file.path in record.rewritten else root) / file.path
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, cannot restore {file.path}")
    yield from shard_writer.file_bytes(path)


def _shard_bytes(checkpoint: Checkpoint, shard: str) -> Iterator[bytes]:
    record = conversion.read_shard_record(checkpoint.root, shard)
    kept = conversion.folder_of(checkpoint.root) / f"{conversion.shard_key(shard)}.header"
    if record is None or not kept.exists():
        raise CheckpointError(f"{kept}: missing, cannot restore {shard}")
    header = kept.read_bytes()
    yield header
    for name, shape in _in_order(header, kept):
        yield from _tensor_bytes(checkpoint, record, name, shape)


def _in_order(header: bytes, kept: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a shard's tensors as their bytes follow each other."""
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        order = sorted((*map(int, entry["data_offsets"]), name) for name, entry in entries.items())
        return [(name, tuple(map(int, entries[name]["shape"]))) for _, _, name in order]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{kept}: is no header of a shard: {error!r}") from error


def _tensor_bytes(
    checkpoint: Checkpoint, record: ShardRecord, name: str, shape: tuple[int, ...]
) -> Iterator[bytes]:
    """The bytes of a tensor of the source."""
    stored = record.names.get(name, name)
    if name + NVFP4.fixed_suffix in checkpoint.tensors:
        fixed, exceptions = (checkpoint.read(name + s) for s in (NVFP4.fixed_suffix, NVFP4.exceptions_suffix))
        if len(shape) != 2:
            raise CheckpointError(
                f"{name}: shape {list(shape)} in the source's header, expected two dimensions"
            )
        yield decode(plane_from_streams(fixed, exceptions, *shape, NVFP4, name)).numpy().tobytes()
    elif stored not in checkpoint.tensors:
        raise CheckpointError(f"{stored}: missing, cannot restore {name}")
    elif stored != name and is_divisor(name):
        info = checkpoint.tensors[stored]
        if (info.dtype, info.numel) != ("F32", 1):
            raise CheckpointError(f"{stored}: {info.dtype} {list(info.shape)}, expected one FP32 value")
        yield _divisor(checkpoint.read(stored), stored, record.divisors.get(name))
    else:
        yield from shard_writer.stored_bytes(checkpoint.tensors[stored])


def _divisor(multiplier: torch.Tensor, stored: str, recorded: str | None) -> bytes:
    """The source's divisor: recorded where the multiplier's reciprocal is another number."""
    if recorded is None:
        return reciprocal(multiplier).numpy().tobytes()
    divisor = bytes.fromhex(recorded)
    wanted = reciprocal(torch.from_numpy(np.frombuffer(divisor, np.float32).copy()))
    if multiplier.numpy().tobytes() != wanted.numpy().tobytes():
        raise CheckpointError(f"{stored}: is {multiplier.item()}, expected {wanted.item()}")
    return divisor
