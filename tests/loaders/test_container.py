"""Layout B: descriptions that contradict each other or the shards are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_checkpoints import (
    BASE,
    csf_tensors,
    edit_json,
    random_layer,
    refused,
    write_container,
)
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.codec import MXFP4
from vllm_csf.loaders.errors import FormatError


@pytest.fixture
def box(tmp_path: Path) -> Path:
    write_container(tmp_path, csf_tensors(random_layer(experts=2)))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "a/x.safetensors", "/x.safetensors", "x.bin", "", "a\\x.safetensors"],
)
def test_container_shard_named_by_a_path(box: Path, name: str) -> None:
    edit_json(box / "manifest.json", lambda m: m["shards"][0].update(file=name))
    with pytest.raises(FormatError, match=r"manifest.json: shard .*expected a bare file name"):
        open_checkpoint(box)
    edit_json(box / "manifest.json", lambda m: m["shards"][0].update(file="model-00000.safetensors"))
    edit_json(box / "build-contract.json", lambda c: c["source_names"].update(x=name))
    with pytest.raises(FormatError, match=r"build-contract.json: shard .*expected a bare file name"):
        open_checkpoint(box)


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("manifest.json", {"schema": "lil-nvfp4-csf-checkpoint/2"}, "schema: .*expected the same"),
        ("build-contract.json", {"codec": "row-base/2"}, "codec: .*expected the same"),
        ("manifest.json", {"family": "b"}, "family: 'b' in manifest.json, 'some_family' in build-contract"),
        ("manifest.json", {"shards": []}, "shards is"),
        ("manifest.json", {"shards": [{"name": "x"}]}, "expected an object with a file"),
        ("manifest.json", {"shards": [{"file": "model-00000.safetensors"}] * 2}, "listed twice"),
        ("manifest.json", {"shards": [{"file": "model-00000.safetensors"}]}, "differ in .*00001"),
        ("build-contract.json", {"source_names": []}, "source_names"),
    ],
)
def test_container_descriptions_that_disagree(box: Path, file: str, change: dict, match: str) -> None:
    edit_json(box / file, lambda value: value.update(change))
    refused(box, match, FormatError)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": "lil-nvfp4-csf-checkpoint/2"}, "schema 'lil-nvfp4-csf-checkpoint/2', expected one of"),
        ({"codec": "byte-window4/9"}, "codec 'byte-window4/9', expected 'byte-window4-fixed"),
        ({"codec": MXFP4.name}, "expected 'byte-window4-fixed"),
    ],
)
def test_container_of_an_unknown_kind(box: Path, change: dict, match: str) -> None:
    for file in ("manifest.json", "build-contract.json"):
        edit_json(box / file, lambda value: value.update(change))
    refused(box, match, FormatError)


def test_container_half_described(box: Path) -> None:
    (box / "build-contract.json").rename(box / "away")
    refused(box, "build-contract.json: missing")
    (box / "away").rename(box / "build-contract.json")
    (box / "manifest.json").unlink()
    refused(box, "manifest.json: missing")


def test_container_shard_of_another_size(box: Path) -> None:
    edit_json(box / "manifest.json", lambda m: m["shards"][1].update(target_file_bytes=7))
    refused(box, r"shard tensors/model-00001.safetensors: \d+ bytes, expected 7 \(target_file_bytes\)")
    (box / "tensors/model-00001.safetensors").unlink()
    refused(box, "shard tensors/model-00001.safetensors: missing")


def test_container_names_that_are_not_stored(box: Path) -> None:
    contract = box / "build-contract.json"
    edit_json(contract, lambda c: c["source_names"].update(ghost="model-00000.safetensors"))
    refused(box, "ghost: missing, expected in shard 'model-00000.safetensors'", FormatError)
    edit_json(contract, lambda c: c["source_names"].pop("ghost"))

    def forget(value: dict) -> None:
        value["source_names"].pop(f"{BASE}.weight_scale")

    edit_json(contract, forget)
    refused(box, "not in source_names of build-contract.json", FormatError)


def test_container_stream_in_another_shard(box: Path) -> None:
    def move(value: dict) -> None:
        names = value["source_names"]
        here = names[f"{BASE}.weight_scale"]
        names[f"{BASE}.weight_scale"] = next(s for s in names.values() if s != here)

    edit_json(box / "build-contract.json", move)
    refused(box, "nvfp4_csf_fixed: in shard 'model-0000..safetensors', expected in", FormatError)
