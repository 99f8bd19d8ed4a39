"""Safetensors shards: what lies where, and reads of parts of it.

Headers are parsed here, once per shard, so that a checkpoint of hundreds of thousands of tensors opens
in seconds and a damaged shard is refused before anything is read. Tensors are read through
`safetensors.safe_open`, which maps the file: only the pages of a slice are touched.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, FormatError, reason

# Bits of the element types; the safetensors format knows no others.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_HEADER = 1 << 28
_MAX_NUMBERS = 66  # of a tensor: torch knows 64 dimensions
_OPEN_SHARDS = 4
# A shard is mapped anew after so many bytes, so that pages read long ago stop counting as ours.
_REMAP_BYTES = 1 << 30


class TensorInfo(NamedTuple):
    """One stored tensor. dtype: as safetensors spells it. [begin, end): its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    shard: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def element_bits(dtype: str) -> int:
    """Bits of an element of a safetensors dtype. Raises FormatError for an unknown one."""
    if dtype not in _BITS:
        raise FormatError(f"dtype is {dtype!r}, expected one of {sorted(_BITS)}")
    return _BITS[dtype]


# ---- headers -------------------------------------------------------------------------------------


def read_header(shard: Path, label: str | None = None) -> dict[str, TensorInfo]:
    """The tensors of one shard, by name. Reads the header only.

    Raises CheckpointError, naming the shard (as `label`), for a missing, truncated or malformed file.
    """
    label = label or str(shard)
    try:
        status = shard.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise CheckpointError(f"shard {label}: no ordinary file")
        size = status.st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                wanted = f"{8 + length} for its header" if size >= 8 else "at least 8"
                raise CheckpointError(f"shard {label}: {size} bytes, expected {wanted}: truncated?")
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"shard {label}: missing") from None
    except OSError as error:
        raise CheckpointError(f"shard {label}: cannot be read: {reason(error)}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"shard {label}: header cannot be read: {reason(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"shard {label}: header is a {type(header).__name__}, expected an object")
    return _tensors(header, shard, 8 + length, size, label)


def _tensors(header: dict, shard: Path, data: int, size: int, label: str) -> dict[str, TensorInfo]:
    tensors = {}
    last = data
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not name.isprintable():  # it would spoil a terminal, or be no text at all
            raise CheckpointError(f"shard {label}: tensor {name!r:.200}, expected printable characters")
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            # Whole numbers by their type: 2.0 and true are equal to some.
            numbers = (begin, end, *shape)
            if len(numbers) > _MAX_NUMBERS or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
                raise ValueError
            bits = _BITS[dtype]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"shard {label}: {name}: malformed header entry {entry!r:.200}") from error
        info = TensorInfo(dtype, shape, shard, data + begin, data + end)
        expected = info.numel * bits // 8
        if info.nbytes != expected:
            found = f"{name}: bytes [{begin}, {end})"
            raise CheckpointError(f"shard {label}: {found}, expected {expected} for {dtype} {list(shape)}")
        last = max(last, info.end)
        tensors[name] = info
    if last != size:
        why = "truncated" if size < last else "trailing bytes"
        raise CheckpointError(f"shard {label}: {size} bytes, expected {last}: {why}")
    _check_gapless(tensors, data, label)
    return tensors


def _check_gapless(tensors: Mapping[str, TensorInfo], data: int, label: str) -> None:
    """Also how a name that stands twice in the header shows: JSON keeps one of the two."""
    at = data
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != at:
            found = f"{name}: begins at byte {info.begin - data}"
            raise CheckpointError(f"shard {label}: {found}, expected {at - data}: neither overlaps nor holes")
        at = info.end


def resolved(path: Path) -> Path:
    """The path without links. Raises CheckpointError where they lead round in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a RuntimeError before Python 3.13
        raise CheckpointError(f"{path}: its links lead round in a circle, expected a folder") from error


def read_json(path: Path) -> Any:
    """A JSON file. Raises CheckpointError, naming it, where it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


# ---- reads ---------------------------------------------------------------------------------------


class TensorReader:
    """Reads tensors and blocks of them into memory of their own.

    Keeps few shards mapped. Safe to use from several threads, one read at a time. `bytes_read` counts
    the bytes of what was asked for.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._mapped: OrderedDict[Path, _Shard] = OrderedDict()
        self._identity = {shard: _identity(shard) for shard in {info.shard for info in tensors.values()}}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
        lead: int | tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """A block of a stored tensor, contiguous, in its stored dtype.

        lead: an index or range of the first dimension of a 3-D tensor; rows and cols cut the two
        dimensions after it. A 1-D tensor has rows only. Raises CheckpointError, naming the tensor.
        """
        info = self.info(name)
        index = _index(name, info, rows, cols, lead)
        with self._lock:
            shard = self._shard(info.shard)
            try:
                if index:
                    found = shard.file.get_slice(name)[index]
                else:
                    found = shard.file.get_tensor(name)
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(f"{name}: cannot be read from {info.shard}: {reason(error)}") from error
            # A view would keep the file mapped, at whatever alignment the file has.
            found = _copy(found)
            self.bytes_read += found.nbytes
            shard.bytes_read += found.nbytes
        return found

    def info(self, name: str) -> TensorInfo:
        """What the headers say of a tensor. Raises CheckpointError where there is none."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{name}: no such tensor") from None

    def close(self) -> None:
        """Unmap everything. The next read maps again."""
        with self._lock:
            self._mapped.clear()

    def _shard(self, path: Path) -> _Shard:
        if _identity(path) != self._identity[path]:
            self._mapped.pop(path, None)
            raise CheckpointError(f"shard {path}: changed since the checkpoint was opened")
        shard = self._mapped.pop(path, None)
        if shard is None or shard.bytes_read > _REMAP_BYTES:
            shard = _Shard(path)
        self._mapped[path] = shard
        while len(self._mapped) > _OPEN_SHARDS:
            self._mapped.popitem(last=False)
        return shard


class _Shard:
    def __init__(self, path: Path) -> None:
        try:
            self.file: Any = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"shard {path}: cannot be opened: {reason(error)}") from error
        self.bytes_read = 0


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, made on this thread.

    torch splits even small copies over its thread pool; on a machine whose cores are busy (several ranks
    that load at once) the threads wait for each other, which was measured to cost more than tenfold.
    """
    bits = tensor.view(_INTEGERS[tensor.element_size()]).numpy()
    return torch.from_numpy(np.array(bits, order="C")).view(tensor.dtype)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _index(
    name: str,
    info: TensorInfo,
    rows: tuple[int, int] | None,
    cols: tuple[int, int] | None,
    lead: int | tuple[int, int] | None,
) -> tuple[int | slice, ...]:
    """The index for get_slice; empty where the whole tensor is meant."""
    wanted: list[int | slice] = []
    shape = info.shape
    if lead is not None:
        if len(shape) < 2 or not _inside(lead, shape[0]):
            raise FormatError(f"{name}: entry {lead} asked of shape {list(shape)}")
        wanted.append(lead if isinstance(lead, int) else slice(*lead))
        shape = shape[1:]
    for part, size in zip((rows, cols), (*shape, 1, 1), strict=False):
        if part is not None and not _inside(part, size):
            raise FormatError(f"{name}: [{part[0]}, {part[1]}) asked of shape {list(info.shape)}")
        wanted.append(slice(None) if part is None else slice(*part))
    if all(part == slice(None) for part in wanted):
        return ()
    return tuple(wanted[: len(info.shape)])


def _inside(part: int | tuple[int, int], size: int) -> bool:
    if isinstance(part, int):
        return 0 <= part < size
    return 0 <= part[0] < part[1] <= size


def total_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes on disk of some tensors."""
    return sum(info.nbytes for info in tensors)
