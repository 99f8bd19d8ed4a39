"""Writes safetensors shards and small files so that they are there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError
from .files import TensorInfo, element_bits

BLOCK = 16 << 20
PARTIAL = ".csf-partial"  # what a file is called before it is whole: no name that a checkpoint has


@dataclass(frozen=True)
class Entry:
    """One tensor to be written; `chunks` yields its bytes when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * element_bits(self.dtype) // 8


def header_bytes(entries: list[Entry], metadata: dict[str, str] | None) -> bytes:
    """The header of a shard that holds the entries in this order, its length included."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def aligned(entries: Iterable[Entry]) -> list[Entry]:
    """Larger elements first, else in the given order: readers that map a shard want aligned tensors."""
    return sorted(entries, key=lambda entry: -element_bits(entry.dtype))


def write_shard(path: Path, entries: list[Entry], metadata: dict[str, str] | None) -> int:
    """Writes a shard and returns its size. Raises CheckpointError where the disk is full."""
    with whole_file(path) as file:
        file.write(header_bytes(entries, metadata))
        for entry in entries:
            written = 0
            for chunk in entry.chunks():
                file.write(chunk)
                written += len(chunk)
            if written != entry.nbytes:
                raise CheckpointError(f"{entry.name}: {written} bytes to write, expected {entry.nbytes}")
        return file.tell()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is complete and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with full_disk_named(path), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raises CheckpointError where the disk is full, or the user's share of it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(f"{path}: the disk is full ({free} bytes free)") from error


def _sync_folder(folder: Path) -> None:
    """Makes a new name last. Some network file systems cannot, and need not."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


def copy_whole(source: Path, target: Path) -> str:
    """Copies a file and returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with whole_file(target) as out:
        for chunk in file_bytes(source):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def file_bytes(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            yield chunk


def check_space(folder: Path, needed: int) -> None:
    """Raises CheckpointError where less is free than is certainly needed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(f"{folder}: {free} bytes are free, expected at least {needed}")


def stored_bytes(info: TensorInfo, progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """A tensor's bytes as they lie in its shard."""
    with info.shard.open("rb") as file:
        file.seek(info.begin)
        left = info.nbytes
        while left:
            chunk = file.read(min(BLOCK, left))
            if not chunk:
                raise CheckpointError(f"shard {info.shard}: ends {left} bytes before a tensor does")
            left -= len(chunk)
            if progress:
                progress(len(chunk))
            yield chunk
