"""Files that are not what they should be: refused, by name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_checkpoints import (
    csf_config,
    csf_tensors,
    edit_json,
    random_layer,
    refused,
    save,
    write_folder,
)
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layer = random_layer(experts=2)
    write_folder(tmp_path, csf_tensors(layer), csf_config(layer.name), folder="tensors/")
    return tmp_path


def test_missing_shard(folder: Path) -> None:
    (folder / "tensors/model-00001.safetensors").unlink()
    refused(folder, "shard tensors/model-00001.safetensors: missing")


def test_dangling_link(folder: Path) -> None:
    shard = folder / "tensors/model-00001.safetensors"
    shard.unlink()
    shard.symlink_to(folder / "blobs" / "abc")
    refused(folder, "shard tensors/model-00001.safetensors: missing")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(folder: Path, keep: int) -> None:
    shard = folder / "tensors/model-00000.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:keep])
    refused(folder, rf"shard tensors/model-00000.safetensors: {len(data[:keep])} bytes, expected .*truncated")


def test_trailing_bytes(folder: Path) -> None:
    shard = folder / "tensors/model-00000.safetensors"
    shard.write_bytes(shard.read_bytes() + b"\0")
    refused(folder, "model-00000.safetensors: .*trailing bytes")


def rewrite_header(shard: Path, change: Callable[[dict], None]) -> None:
    data = shard.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_malformed_headers(folder: Path) -> None:
    shard = folder / "tensors/model-00000.safetensors"
    good = shard.read_bytes()
    name = next(iter(json.loads(good[8 : 8 + struct.unpack("<Q", good[:8])[0]])))
    cases: list[tuple[Callable[[dict], None], str]] = [
        (lambda h: h[name].update(dtype="X9"), "malformed header entry"),
        (lambda h: h[name].pop("shape"), "malformed header entry"),
        (lambda h: h[name].update(shape=[3, 5, 7]), "expected"),
        (lambda h: h[name].update(shape=[-1, -1]), "malformed header entry"),
        (lambda h: h[name].update(shape=[1.0]), "malformed header entry"),
        (lambda h: h[name].update(shape=[True]), "malformed header entry"),
        (lambda h: h[name].update(shape=[1] * 65), "malformed header entry"),
        (lambda h: h[name].update(shape=[10**40]), "malformed header entry"),
        (lambda h: h[name].update(shape=[2**62, 2**62]), "expected"),
        (lambda h: h[name].update(data_offsets=[-1, 4]), "malformed header entry"),
        (lambda h: h[name].update(data_offsets=["0", "4"]), "malformed header entry"),
        (lambda h: h.update({"a\nb": h[name]}), r"tensor 'a\\nb', expected printable characters"),
        (lambda h: h.update({"\ud800": h[name]}), r"tensor '\\ud800', expected printable characters"),
        (lambda h: h.pop(name), "begins at byte 4, expected 0: neither overlaps nor holes"),
    ]
    for change, match in cases:
        rewrite_header(shard, change)
        refused(folder, f"shard tensors/model-00000.safetensors: .*{match}")
        shard.write_bytes(good)
    shard.write_bytes(struct.pack("<Q", 2) + b"{]" + good[10:])
    refused(folder, "header cannot be read: no JSON")
    for text, match in ((b"[" * 10**6, "nested too deeply"), (b"9" * 5000, "Exceeds the limit")):
        shard.write_bytes(struct.pack("<Q", len(text)) + text)
        refused(folder, f"model-00000.safetensors: header cannot be read: {match}")
    shard.write_bytes(struct.pack("<Q", 2) + b"[]")
    refused(folder, "header is a list")


def test_an_overlap_that_makes_up_for_a_hole(folder: Path) -> None:
    """The sizes add up to that of the file, and its end is some tensor's."""
    shard = folder / "tensors/model-00000.safetensors"

    def move(header: dict) -> None:
        scalars = [e["data_offsets"] for e in header.values() if e["shape"] == []]
        scalars[0][:] = scalars[1]

    rewrite_header(shard, move)
    refused(folder, "model-00000.safetensors: .* begins at byte .*neither overlaps nor holes")


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    shard = folder / "tensors/model-00000.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    refused(folder, "shard tensors/model-00000.safetensors: no ordinary file")


def test_index_names_a_tensor_that_is_not_there(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda i: i["weight_map"].update({"ghost.weight": "tensors/model-00000.safetensors"}))
    refused(
        folder,
        "ghost.weight: missing in shard tensors/model-00000.safetensors, where model.safetensors.index",
    )


def test_index_sends_a_tensor_to_another_shard(folder: Path) -> None:
    def swap(index: dict) -> None:
        name = next(iter(index["weight_map"]))
        index["weight_map"][name] = "tensors/model-00001.safetensors"

    edit_json(folder / "model.safetensors.index.json", swap)
    refused(folder, "in shard tensors/model-00000.safetensors, expected in tensors/model-00001")


def test_one_tensor_in_two_shards(folder: Path) -> None:
    twice = {"twice.weight": torch.zeros(1)}
    for i in (2, 3):
        save(folder / f"tensors/model-0000{i}.safetensors", {**twice, f"own{i}": torch.zeros(1)})
        edit_json(
            folder / "model.safetensors.index.json",
            lambda index, i=i: index["weight_map"].update({f"own{i}": f"tensors/model-0000{i}.safetensors"}),
        )
    refused(folder, "twice.weight: in tensors/model-00002.safetensors and in tensors/model-00003")


@pytest.mark.parametrize(
    "shard",
    ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "x.bin"],
)
def test_index_that_leaves_the_folder(folder: Path, shard: str) -> None:
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda i: i["weight_map"].update({"x": shard}))
    refused(folder, f"shard '{shard}', expected a .safetensors file in this folder")


def test_index_that_is_none(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    refused(folder, "index.json: cannot be read: no JSON")
    index.write_text("[]")
    refused(folder, "holds a list, expected an object")
    index.write_text("{}")
    refused(folder, "weight_map is NoneType")


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    refused(tmp_path, "no .safetensors files")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "a file, expected the folder")
    refused(tmp_path / "nowhere", "no such folder")
    with pytest.raises(CheckpointError, match=r"\./nowhere: no such folder"):
        open_checkpoint("./nowhere")


def test_shard_replaced_while_it_is_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    source = checkpoint.layers[0].source(0, "gate")
    source.weight()
    shard = checkpoint.tensors[source.weight_name].shard
    data = shard.read_bytes()
    os.utime(shard, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed since the checkpoint was opened"):
        source.weight()
    shard.write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="changed since the checkpoint was opened"):
        source.weight()
    shard.unlink()
    with pytest.raises(CheckpointError, match="changed since the checkpoint was opened"):
        source.weight()
