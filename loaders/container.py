"""Layout B, the container: turned into layout A in memory.

    manifest.json        schema, codec, family, shards: [{file, target_file_bytes, ...}]
    build-contract.json  schema, codec, family, source_names: {original tensor name: shard file name}
    metadata/            the source's config.json, tokenizer, ... unchanged
    tensors/*.safetensors

There is no index. `source_names` holds the names of the source: a scale that was compressed is found
under its name + the suffixes of its two streams, in the same shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .codec import MXFP4, NVFP4, CodecSpec
from .errors import CheckpointError, FormatError
from .files import TensorInfo, read_header, read_object
from .names import is_stream, scale_of_stream

MANIFEST, CONTRACT, METADATA, TENSORS = "manifest.json", "build-contract.json", "metadata", "tensors"
SCHEMAS = {"lil-nvfp4-csf-checkpoint/1": NVFP4, "lil-mxfp4-csf-checkpoint/1": MXFP4}


def is_container(root: Path) -> bool:
    """Whether a folder claims to be a container, of whatever schema."""
    if (root / CONTRACT).is_file():
        return True
    if not (root / MANIFEST).is_file():
        return False
    try:
        schema = read_object(root / MANIFEST).get("schema")
    except CheckpointError:
        return False
    return isinstance(schema, str) and "csf-checkpoint" in schema


def read_container(root: Path) -> dict[str, TensorInfo]:
    """Every tensor of a container, by its name in the shards.

    Raises CheckpointError or FormatError, naming the file or tensor, where the two descriptions
    contradict each other or the shards.
    """
    manifest, contract = read_object(root / MANIFEST), read_object(root / CONTRACT)
    spec = _check_agreement(manifest, contract)
    sizes = _manifest_shards(manifest)
    names = contract.get("source_names")
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise FormatError(f"{CONTRACT}: source_names is no object of shard names")
    for shard in names.values():
        _check_shard_name(shard, CONTRACT)
    if set(names.values()) != set(sizes):
        odd = sorted(set(names.values()) ^ set(sizes))
        raise FormatError(f"{CONTRACT}: source_names and the shards of {MANIFEST} differ in {odd}")
    tensors: dict[str, TensorInfo] = {}
    for shard, size in sizes.items():
        path = root / TENSORS / shard
        found = read_header(path, f"{TENSORS}/{shard}")
        if size is not None and path.stat().st_size != size:
            raise CheckpointError(
                f"shard {TENSORS}/{shard}: {path.stat().st_size} bytes, expected {size} (target_file_bytes)"
            )
        for name, info in found.items():
            if name in tensors:
                raise FormatError(f"{name}: in {tensors[name].shard.name} and in {shard}, expected one shard")
            tensors[name] = info
    _check_names(names, tensors, spec)
    return tensors


def _check_agreement(manifest: Mapping[str, Any], contract: Mapping[str, Any]) -> CodecSpec:
    for key in ("schema", "codec", "family"):
        if manifest.get(key) != contract.get(key):
            found = f"{manifest.get(key)!r} in {MANIFEST}, {contract.get(key)!r} in {CONTRACT}"
            raise FormatError(f"{key}: {found}, expected the same")
    spec = SCHEMAS.get(str(manifest.get("schema")))
    if spec is None:
        raise FormatError(f"{MANIFEST}: schema {manifest.get('schema')!r}, expected one of {list(SCHEMAS)}")
    if manifest.get("codec") != spec.name:
        raise FormatError(f"{MANIFEST}: codec {manifest.get('codec')!r}, expected {spec.name!r}")
    return spec


def _manifest_shards(manifest: Mapping[str, Any]) -> dict[str, int | None]:
    shards: dict[str, int | None] = {}
    entries = manifest.get("shards")
    if not isinstance(entries, list) or not entries:
        raise FormatError(f"{MANIFEST}: shards is {entries!r}, expected a list of at least one")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            raise FormatError(f"{MANIFEST}: shard entry {entry!r}, expected an object with a file")
        name, size = entry["file"], entry.get("target_file_bytes")
        _check_shard_name(name, MANIFEST)
        if name in shards:
            raise FormatError(f"{MANIFEST}: shard {name!r} is listed twice")
        if size is not None and not isinstance(size, int):
            raise FormatError(f"{MANIFEST}: target_file_bytes of {name!r} is {size!r}, expected a number")
        shards[name] = size
    return shards


def _check_shard_name(name: str, where: str) -> None:
    bare = name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name
    if not bare or not name.endswith(".safetensors"):
        raise FormatError(f"{where}: shard {name!r}, expected a bare file name that ends in .safetensors")


def _check_names(names: Mapping[str, str], tensors: Mapping[str, TensorInfo], spec: CodecSpec) -> None:
    """Every source tensor lies in its shard, plain or as streams, and nothing else does."""
    for name, shard in names.items():
        streams = [name + spec.fixed_suffix, name + spec.exceptions_suffix]
        stored = [stream for stream in streams if stream in tensors]
        if name in tensors and stored:
            raise FormatError(f"{name}: stored beside its compressed streams, expected one of the two")
        wanted = streams if stored else [name]
        for tensor in wanted:
            info = tensors.get(tensor)
            if info is None:
                raise FormatError(f"{tensor}: missing, expected in shard {shard!r}")
            if info.shard.name != shard:
                raise FormatError(f"{tensor}: in shard {info.shard.name!r}, expected in {shard!r}")
    for tensor in tensors:
        if (scale_of_stream(tensor) if is_stream(tensor) else tensor) not in names:
            raise FormatError(f"{tensor}: in its shard, but not in source_names of {CONTRACT}")
