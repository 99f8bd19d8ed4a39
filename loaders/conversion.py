"""What a converted checkpoint remembers of its source: folder `csf_source/` beside the shards.

conversion.json       format, tool, every file of the source with its size and SHA-256
<shard>.header        the source shard's header, byte for byte
<shard>.json          what became of the shard: written when it is done
<file>                source files that were rewritten (config, index), unchanged
INCOMPLETE            while shards are missing; a checkpoint without its index is no checkpoint
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import CheckpointError, reason
from .files import read_object
from .shard_writer import write_whole

FOLDER = "csf_source"
FORMAT = "vllm-csf-conversion/1"
RECORD, INCOMPLETE = "conversion.json", "INCOMPLETE"


@dataclass(frozen=True)
class SourceFile:
    """A file of the source, by its path relative to the source's folder."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """One converted shard. `source`: (size, mtime in ns) when it was read.

    `names`: stored name of each renamed tensor. `divisors`: hex of source values whose reciprocal does
    not give them back.
    """

    shard: str
    source: tuple[int, int]
    sha256: str
    target_bytes: int
    weight_map: list[str]
    names: dict[str, str] = field(default_factory=dict)
    divisors: dict[str, str] = field(default_factory=dict)


def folder_of(root: Path) -> Path:
    return root / FOLDER


def shard_key(shard: str) -> str:
    """A shard's path as a file name."""
    return shard.replace("/", "--")


def write_shard_record(root: Path, record: ShardRecord) -> None:
    path = folder_of(root) / f"{shard_key(record.shard)}.json"
    write_whole(path, json.dumps(asdict(record)).encode())


def read_shard_record(root: Path, shard: str) -> ShardRecord | None:
    path = folder_of(root) / f"{shard_key(shard)}.json"
    if not path.exists():
        return None
    value = read_object(path)
    try:
        size, time = value["source"]
        record = ShardRecord(**(value | {"source": (size, time)}))
        _check_shard_record(record, shard)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: malformed record of a shard: {reason(error)}") from error
    return record


def _check_shard_record(record: ShardRecord, shard: str) -> None:
    """Raises ValueError."""
    if record.shard != shard or not isinstance(record.weight_map, list):
        raise ValueError(f"expected shard {shard!r} and weight_map, a list; found {record.shard!r}")
    if not all(isinstance(number, int) for number in (*record.source, record.target_bytes)):
        raise ValueError("source and target_bytes, expected whole numbers")
    texts = [record.sha256, *record.weight_map, *record.names.values(), *record.divisors.values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("sha256, weight_map, names and divisors, expected strings")
    for name, text in record.divisors.items():
        if len(bytes.fromhex(text)) != 4:
            raise ValueError(f"divisor of {name} is {text!r}, expected 4 bytes in hex")


def write_record(
    root: Path, tool: str, files: list[SourceFile], shards: list[str], rewritten: list[str]
) -> None:
    content: dict[str, Any] = {"format": FORMAT, "tool": tool, "shards": shards, "rewritten": rewritten}
    content["files"] = [asdict(file) for file in files]
    write_whole(folder_of(root) / RECORD, (json.dumps(content, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Record:
    """files: those of the source. shards, rewritten: which of them were converted or replaced."""

    files: list[SourceFile]
    shards: list[str]
    rewritten: list[str]


def read_record(root: Path) -> Record:
    """Raises CheckpointError where the checkpoint was not converted by this tool, or not to the end."""
    path = folder_of(root) / RECORD
    if not root.is_dir():
        found = "is a file" if root.exists() else "no such folder"
        raise CheckpointError(f"{root}: {found}, expected the folder of a converted checkpoint")
    if not path.exists():
        raise CheckpointError(f"{root}: has no {FOLDER}/{RECORD}, expected a converted checkpoint")
    value = read_object(path)
    if value.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is {value.get('format')!r}, expected {FORMAT!r}")
    try:
        files = [SourceFile(**file) for file in value["files"]]
        record = Record(files, list(value["shards"]), list(value["rewritten"]))
        for name in [file.path for file in files] + record.shards + record.rewritten:
            _check_inside(name, path)
        if not set(record.shards + record.rewritten) <= {file.path for file in files}:
            raise ValueError("shards or rewritten name files that are not listed")
        if not all(isinstance(file.bytes, int) and isinstance(file.sha256, str) for file in files):
            raise TypeError("a file without size or SHA-256")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: malformed record of a conversion: {reason(error)}") from error
    return record


def _check_inside(name: object, record: Path) -> None:
    """Records come with checkpoints from anywhere; a restoration writes into its own folder alone."""
    path = PurePosixPath(name) if isinstance(name, str) else None
    if path is None or path.is_absolute() or ".." in path.parts or not path.parts or "\0" in str(path):
        raise CheckpointError(f"{record}: file {name!r}, expected a path inside the checkpoint")
