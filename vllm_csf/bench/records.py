"""Records of measurements: JSON that is whole at any moment, so that an interrupted run keeps what it has."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..loaders.errors import CheckpointError, reason

# What kind a list of that name tells, the first that is there.
KINDS = {"rows": "kernels", "windows": "serve", "agreement": "quality", "starts": "starts"}
# Of a kind of records: where its rows are, and which of their fields are measured.
MEASURED = {
    "kernels": ("rows", ("us", "us_min", "us_max")),
    "serve": ("windows", ("seconds", "output_tok_s")),
    "starts": ("starts", ("start_seconds",)),
}
SPECIAL = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


class BenchError(CheckpointError):
    """Something cannot be measured here, or a file is no record of a measurement."""


def claim(path: Path | None, flag: str = "--out") -> None:
    """Raises BenchError where no record could be written, before anything is measured."""
    if path is None:
        return
    try:
        if (kind := _special(path)) is not None:
            raise BenchError(f"{flag} is {path}, which is a {kind}, expected a file")
        real = _real(path)
        real.parent.mkdir(parents=True, exist_ok=True)
        _beside(real).touch()
        _beside(real).unlink()
    except OSError as error:
        raise BenchError(f"{flag} {path}: cannot be written: {reason(error)}") from error


def _special(path: Path) -> str | None:
    """What stands there, if it is no file: a record would take its place. Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISREG(mode) else SPECIAL.get(stat.S_IFMT(mode), "special file")


def write(record: dict[str, Any], path: Path) -> None:
    """Replaces the file in one step. One row a line: records are kept under version control."""
    real = _real(path)
    real.parent.mkdir(parents=True, exist_ok=True)
    _beside(real).write_text(dumps(record))
    os.replace(_beside(real), real)


def _real(path: Path) -> Path:
    """Where a link leads: the file is replaced there, the link stays."""
    return Path(os.path.realpath(path))


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def dumps(record: dict[str, Any]) -> str:
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            parts.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


@contextmanager
def whole(*paths: Path) -> Iterator[None]:
    """Raises BenchError where a record lacks what is taken from it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        named = ", ".join(map(str, paths))
        raise BenchError(f"{named}: is no whole record: {reason(error)}") from error


def read(path: Path, kind: str | None = None) -> dict[str, Any]:
    """kind: of `kind_of`. Raises BenchError."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BenchError(f"{path}: cannot be read: {reason(error)}") from error
    found = kind_of(record)
    if found is None or kind not in (None, found):
        raise BenchError(f"{path}: is {found or 'no record'}, expected a record of {kind or 'bench'}")
    _check_measured(record, path, *MEASURED.get(found, ("", ())))
    return record


def _check_measured(record: dict[str, Any], path: Path, rows: str, fields: tuple[str, ...]) -> None:
    for number, row in enumerate(record.get(rows, ())):
        for field in fields:
            # What is missing is said later, where it is needed.
            value = row.get(field, 1) if isinstance(row, dict) else 1
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise BenchError(f"{path}: {rows}[{number}].{field} is {value!r}, expected a number above 0")


def kind_of(record: Any) -> str | None:
    """kernels, serve, quality, starts, or None."""
    if not isinstance(record, dict):
        return None
    # One of serving has starts, too.
    for key, kind in KINDS.items():
        if isinstance(record.get(key), list):
            return kind
    return None
