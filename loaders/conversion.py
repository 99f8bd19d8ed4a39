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
from pathlib import Path
from typing import Any

from .errors import CheckpointError
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
        value["source"] = tuple(value["source"])
        return ShardRecord(**value)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: malformed record of a shard: {error}") from error


def write_record(
    root: Path, tool: str, files: list[SourceFile], shards: list[str], rewritten: list[str]
) -> None:
    content: dict[str, Any] = {"format": FORMAT, "tool": tool, "shards": shards, "rewritten": rewritten}
    content["files"] = [asdict(file) for file in files]
    write_whole(folder_of(root) / RECORD, (json.dumps(content, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Record:
    files: list[SourceFile]
    shards: list[str]
    rewritten: list[str]


def read_record(root: Path) -> Record:
    """Raises CheckpointError where the checkpoint was not converted by this tool, or not to the end."""
    path = folder_of(root) / RECORD
    if not path.exists():
        raise CheckpointError(f"{root}: has no {FOLDER}/{RECORD}, expected a converted checkpoint")
    value = read_object(path)
    if value.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is {value.get('format')!r}, expected {FORMAT!r}")
    try:
        files = [SourceFile(**file) for file in value["files"]]
        return Record(files, list(value["shards"]), list(value["rewritten"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: malformed record of a conversion: {error}") from error
