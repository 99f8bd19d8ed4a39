"""Conversion, verification and restoration: nothing is lost, nothing half-done passes for whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from converting import TOOL, contents
from safetensors.torch import load_file, save_file
from vllm_csf.loaders import conversion, shard_writer
from vllm_csf.loaders.checkpoint import INDEX, open_checkpoint
from vllm_csf.loaders.convert import convert
from vllm_csf.loaders.errors import CheckpointError
from vllm_csf.loaders.example import make_example
from vllm_csf.loaders.restore import restore
from vllm_csf.loaders.verify import verify


@pytest.fixture(params=["modelopt", "compressed-tensors"])
def source(request, tmp_path) -> Path:
    """With unrelated tensors of many kinds, and unrelated files."""
    root = make_example(tmp_path / "source", "glm4-moe", request.param)
    shard = root / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    odd = {
        "odd.bool": torch.tensor([True, False, True]),
        "odd.empty": torch.empty(0, 3),
        "odd.scalar": torch.tensor(3, dtype=torch.int64),
        "odd.half": torch.randn(3, 5).half(),
        "odd.bfloat16": torch.randn(7).bfloat16(),
        "odd.float64": torch.randn(2, dtype=torch.float64),
        "odd.int8": torch.arange(5, dtype=torch.int8),
        "odd.float8": torch.randn(9).to(torch.float8_e5m2),
    }
    save_file(tensors | odd, shard, metadata={"format": "pt", "note": "äöü"})
    index = json.loads((root / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(odd, shard.name)
    (root / INDEX).write_text(json.dumps(index))
    (root / "chat").mkdir()
    (root / "chat" / "template.jinja").write_text("{{ x }}")
    return root


@pytest.mark.parametrize("jobs", [1, 2])
def test_round_trip_is_byte_for_byte(source, tmp_path, jobs):
    seen = []
    result = convert(source, tmp_path / "csf", TOOL, jobs, seen.append)
    assert (result.shards, result.converted) == (2, 2)
    assert sum(seen) <= result.source_bytes
    report = verify(tmp_path / "csf", source)
    assert report.ok, report.findings
    assert report.planes == 3 * 8 * 3
    assert restore(tmp_path / "csf", tmp_path / "back") == len(contents(source))
    assert contents(tmp_path / "back") == contents(source)


def test_jobs_do_not_change_the_bytes(source, tmp_path):
    for jobs in (1, 2):
        convert(source, tmp_path / str(jobs), TOOL, jobs)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_what_is_no_scale_is_carried_over(source, tmp_path):
    convert(source, tmp_path / "csf", TOOL)
    with open_checkpoint(source) as a, open_checkpoint(tmp_path / "csf") as b:
        assert b.layout == "A"
        for name, info in a.tensors.items():
            if ".experts." not in name:
                found = b.tensors[name]
                assert (found.dtype, found.shape) == (info.dtype, info.shape)
                assert b"".join(shard_writer.stored_bytes(found)) == b"".join(shard_writer.stored_bytes(info))
    assert (tmp_path / "csf" / "chat" / "template.jinja").read_text() == "{{ x }}"
    assert (tmp_path / "csf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    layers = json.loads((tmp_path / "csf" / "config.json").read_text())["quantization_config"][
        "quantized_layers"
    ]
    assert {entry["weight_scale_encoding"] for entry in layers.values()} == {"csf"}


def test_streams_are_aligned_in_their_shards(source, tmp_path):
    convert(source, tmp_path / "csf", TOOL)
    with open_checkpoint(tmp_path / "csf") as checkpoint:
        for info in checkpoint.tensors.values():
            assert info.begin % {"U32": 4, "F32": 4, "I64": 8, "F64": 8, "BF16": 2}.get(info.dtype, 1) == 0


def test_symlinked_sources_are_read(source, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    shutil.rmtree(linked / "chat", ignore_errors=True)
    convert(linked, tmp_path / "csf", TOOL)
    assert verify(tmp_path / "csf", source).ok


def test_killed_conversion_goes_on_where_it_stopped(source, tmp_path):
    target = tmp_path / "csf"
    code = (
        "import os, sys, signal\n"
        "from pathlib import Path\n"
        "from vllm_csf.loaders import convert, shard_writer\n"
        "write = shard_writer.write_shard\n"
        "def once(path, entries, metadata):\n"
        "    if path.name.startswith('model-00002'):\n"
        "        path.with_name(path.name + shard_writer.PARTIAL).write_bytes(b'half')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return write(path, entries, metadata)\n"
        "shard_writer.write_shard = once\n"
        f"convert.convert(Path({str(source)!r}), Path({str(target)!r}), {TOOL!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not (target / INDEX).exists()
    assert "interrupted" in verify(target).findings[0]
    with pytest.raises(CheckpointError, match="interrupted"):
        open_checkpoint(target)
    with pytest.raises(CheckpointError):
        restore(target, tmp_path / "back")
    first = (target / "model-00001-of-00002.safetensors").stat().st_mtime_ns
    result = convert(source, target, TOOL)
    assert result.converted == 1
    assert (target / "model-00001-of-00002.safetensors").stat().st_mtime_ns == first
    assert verify(target, source).ok
    whole = tmp_path / "whole"
    convert(source, whole, TOOL)
    assert contents(target) == contents(whole)


def test_resumed_conversion_of_a_changed_shard_starts_that_shard_anew(source, tmp_path, monkeypatch):
    def stop(*_):
        raise CheckpointError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_csf.loaders.convert._finish", stop)
        with pytest.raises(CheckpointError, match="stopped"):
            convert(source, tmp_path / "csf", TOOL)
    time.sleep(0.01)
    os.utime(source / "model-00001-of-00002.safetensors")
    assert convert(source, tmp_path / "csf", TOOL).converted == 1
    assert verify(tmp_path / "csf", source).ok


def test_full_disk_is_one_clear_error_and_leaves_no_shard(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CheckpointError, match="1000 bytes are free"):
            convert(source, tmp_path / "csf", TOOL)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.os, "fsync", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            convert(source, tmp_path / "other", TOOL)
    assert list(contents(tmp_path / "other")) == [f"{conversion.FOLDER}/{conversion.INCOMPLETE}"]
    assert convert(source, tmp_path / "csf", TOOL).converted == 2


def test_targets_that_are_not_ours_are_refused(source, tmp_path):
    for target in (source, source / "inside", source.parent):
        with pytest.raises(CheckpointError, match="folder of its own"):
            convert(source, target, TOOL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(source, tmp_path / "full", TOOL)
    convert(source, tmp_path / "csf", TOOL)
    with pytest.raises(CheckpointError, match="not empty"):
        convert(source, tmp_path / "csf", TOOL)
    with pytest.raises(CheckpointError, match="compressed already"):
        convert(tmp_path / "csf", tmp_path / "again", TOOL)


def test_interrupted_conversion_of_another_source_is_refused(source, tmp_path):
    marker = conversion.folder_of(tmp_path / "csf") / conversion.INCOMPLETE
    marker.parent.mkdir(parents=True)
    marker.write_text("{}")
    with pytest.raises(CheckpointError, match="another source"):
        convert(source, tmp_path / "csf", TOOL)


def test_sources_that_cannot_be_described_are_refused(tmp_path):
    plain = make_example(tmp_path / "plain", layout="dequantized")
    with pytest.raises(CheckpointError, match="no experts"):
        convert(plain, tmp_path / "out", TOOL)
    packed = make_example(tmp_path / "packed", layout="compressed-tensors")
    shard = packed / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"model.layers.0.self_attn.q_proj.weight_packed": torch.zeros(2, 2)}, shard)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_packed"):
        convert(packed, tmp_path / "out", TOOL)
    assert not (tmp_path / "out").exists()
