"""Verification and restoration find what is wrong with a converted checkpoint, and name it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from converting import TOOL, contents, damage, edit_record, set_free_bytes
from fake_checkpoints import csf_tensors, edit_json, random_layer, write_container
from vllm_csf.loaders import conversion
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.convert import convert
from vllm_csf.loaders.errors import CheckpointError
from vllm_csf.loaders.example import make_example
from vllm_csf.loaders.restore import checked, restore
from vllm_csf.loaders.verify import verify

from vllm_csf import cli

SHARD = "model-00001-of-00002.safetensors"
EXPERTS_SHARD = "model-00002-of-00002.safetensors"
HEADER = f"{conversion.FOLDER}/{SHARD}.header"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    convert(make_example(root / "source"), root / "csf", TOOL)
    return root


@pytest.fixture
def converted(pristine, tmp_path) -> tuple[Path, Path]:
    """The source, and a converted checkpoint to damage."""
    shutil.copytree(pristine / "csf", tmp_path / "csf")
    return pristine / "source", tmp_path / "csf"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("up_proj.weight_scale.nvfp4_csf_fixed", "the block scale"),
        ("up_proj.weight_scale.nvfp4_csf_exceptions", "up_proj"),
        ("down_proj.weight_scale_2", "the global scale"),
        ("gate_proj.input_scale", "the input scale"),
        ("self_attn.o_proj.weight", "differs from the source"),
    ],
)
def test_verify_names_what_differs(converted, wanted, found):
    source, root = converted
    name = damage(root, wanted)
    report = verify(root, source, planes_only=True)
    assert not report.ok
    module = name.split(".weight")[0].split(".input_scale")[0]
    assert any(found in line and module in line for line in report.findings), report.findings


def test_verify_goes_on_behind_the_first_finding(converted):
    source, root = converted
    with open_checkpoint(root) as checkpoint:
        fixed = [i for n, i in checkpoint.tensors.items() if n.endswith("csf_fixed")][:3]
    for info in fixed:
        with info.shard.open("r+b") as file:
            file.seek(info.begin)
            file.write(b"\xff")  # a base above 240
    report = verify(root, source)
    assert len([line for line in report.findings if "base" in line]) >= 3
    assert report.planes == 2 * 8 * 3


def test_an_index_that_names_what_is_no_file_here(converted):
    _, root = converted
    strange = ["\0.safetensors", "\ud800.safetensors", "../model.safetensors", "\n.safetensors"]
    for shard in strange:
        edit_json(root / "model.safetensors.index.json", lambda i, s=shard: i["weight_map"].update(x=s))
        (finding,) = verify(root).findings
        assert finding.startswith(f"model.safetensors.index.json: shard {shard!r}, expected a .safetensors")


def test_a_folder_is_restored_into_once_at_a_time(converted, tmp_path):
    _, root = converted

    def again(_):
        with pytest.raises(CheckpointError, match="another restoration is at work on it"):
            restore(root, tmp_path / "back")

    restore(root, tmp_path / "back", again)
    assert verify(root).ok


def test_a_disk_that_fills_up_leaves_no_half_file(converted, tmp_path, monkeypatch):
    _, root = converted

    def fill(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="the disk is full"):
        restore(root, tmp_path / "back", fill)
    assert contents(tmp_path / "back") == {}


def test_truncated_shard_is_found(converted):
    source, root = converted
    shard = root / SHARD
    os.truncate(shard, shard.stat().st_size - 10)
    assert "truncated" in verify(root, source).findings[0]


def test_restore_refuses_what_was_not_converted(converted, tmp_path):
    source, _ = converted
    with pytest.raises(CheckpointError, match="expected a converted"):
        restore(source, tmp_path / "a")
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        restore(tmp_path / "absent", tmp_path / "a")


def test_every_file_of_the_source_is_reproduced(converted):
    source, root = converted
    report = verify(root)
    assert report.ok, report.findings
    assert (report.reproduced, report.compared) == (len(contents(source)), 0)
    assert verify(root, planes_only=True).reproduced == 0


@pytest.mark.parametrize("name", ["tokenizer.json", f"{conversion.FOLDER}/config.json"])
def test_changed_file_is_found_without_the_source(converted, name):
    _, root = converted
    (root / name).write_bytes((root / name).read_bytes() + b" ")
    assert verify(root, planes_only=True).ok
    (finding,) = verify(root).findings
    assert finding.startswith(f"{Path(name).name}: SHA-256 is ")


@pytest.mark.parametrize("wanted", ["self_attn.o_proj.weight", "up_proj.weight_scale.nvfp4_csf_fixed"])
def test_damaged_tensor_is_found_without_the_source(converted, wanted):
    _, root = converted
    damage(root, wanted)
    assert verify(root, planes_only=True).ok
    assert any(".safetensors: SHA-256 is" in line for line in verify(root).findings)


@pytest.mark.parametrize("name", ["tokenizer.json", HEADER, f"{conversion.FOLDER}/{SHARD}.json"])
def test_missing_file_is_named(converted, tmp_path, name):
    _, root = converted
    (root / name).unlink()
    assert [line for line in verify(root).findings if "missing" in line]
    with pytest.raises(CheckpointError, match="missing, cannot restore"):
        restore(root, tmp_path / "back")
    assert "config.json" not in contents(tmp_path / "back")


# ---- checkpoints that do not open ----------------------------------------------------------------


def test_every_damaged_shard_is_named_where_nothing_opens(converted):
    _, root = converted
    shards = sorted(root.glob("*.safetensors"))
    for shard in shards:
        os.truncate(shard, shard.stat().st_size - 10)
    findings = verify(root).findings
    assert len(findings) == len(shards) == 2
    assert all(f"shard {shard.name}:" in line for shard, line in zip(shards, findings, strict=True))


def test_shards_are_checked_where_the_config_does_not_open(converted):
    _, root = converted
    (root / "config.json").write_text("{")
    (root / SHARD).unlink()
    first, second = verify(root).findings
    assert "config.json" in first
    assert second == f"shard {SHARD}: missing"


def test_shards_of_a_container_are_checked(tmp_path):
    write_container(tmp_path, csf_tensors(random_layer()))
    assert verify(tmp_path).ok
    edit_json(tmp_path / "manifest.json", lambda value: value.update(codec="unknown/1"))
    shard = next((tmp_path / "tensors").iterdir())
    shard.write_bytes(b"short")
    findings = verify(tmp_path).findings
    assert len(findings) == 2
    assert "unknown/1" in findings[0]
    assert f"tensors/{shard.name}" in findings[1]


# ---- records from elsewhere ----------------------------------------------------------------------


def _refused(root: Path, tmp_path: Path, match: str) -> None:
    """By both commands, and nothing is written."""
    assert any(match in line for line in verify(root).findings), verify(root).findings
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        restore(root, tmp_path / "deep" / "back")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("path", ["../evil", "/evil", "a/../../evil", "..", ".", "", "a\0b", 3, None])
@pytest.mark.parametrize("where", ["files", "shards", "rewritten"])
def test_paths_that_lead_out_of_the_checkpoint_are_refused(converted, tmp_path, path, where):
    _, root = converted
    entry = {"path": path, "bytes": 1, "sha256": "0"} if where == "files" else path
    edit_record(root, conversion.RECORD, lambda value: value[where].append(entry))
    _refused(root, tmp_path, "expected a path inside")


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("files"),
        lambda v: v.update(files=["config.json"]),
        lambda v: v["files"][0].pop("sha256"),
        lambda v: v["files"][0].update(sha256=3),
        lambda v: v["files"][0].update(bytes="3"),
        lambda v: v["files"][0].update(more=1),
        lambda v: v["shards"].append("unlisted.safetensors"),
        lambda v: v["rewritten"].append("unlisted.json"),
        lambda v: v.update(shards=None),
    ],
)
def test_malformed_record_of_a_conversion_is_refused(converted, tmp_path, change):
    _, root = converted
    edit_record(root, conversion.RECORD, change)
    _refused(root, tmp_path, "malformed record of a conversion")


def test_record_of_another_format_is_refused(converted, tmp_path):
    _, root = converted
    edit_record(root, conversion.RECORD, lambda v: v.update(format="other/1"))
    _refused(root, tmp_path, "format is 'other/1', expected 'vllm-csf-conversion/1'")


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("sha256"),
        lambda v: v.update(more=1),
        lambda v: v.update(shard="other.safetensors"),
        lambda v: v.update(source=3),
        lambda v: v.update(source=[1, 2, 3]),
        lambda v: v.update(source=[1, "2"]),
        lambda v: v.update(target_bytes=None),
        lambda v: v.update(weight_map="abc"),
        lambda v: v.update(weight_map=[1]),
        lambda v: v.update(names=["a"]),
        lambda v: v.update(names={"a": 1}),
        lambda v: v.update(divisors={"a": "not hex"}),
        lambda v: v.update(divisors={"a": "0011"}),
    ],
)
def test_malformed_record_of_a_shard_is_refused(converted, change):
    _, root = converted
    path = edit_record(root, f"{SHARD}.json", change)
    with pytest.raises(CheckpointError, match="malformed record of a shard"):
        conversion.read_shard_record(root, SHARD)
    assert any(line.startswith(f"{path}: malformed") for line in verify(root).findings)


@pytest.mark.parametrize(
    "header", [b"", b"x" * 20, b"8bytes..[]", b'8bytes..{"a": 1}', b'8bytes..{"a": {"shape": [1]}}']
)
def test_malformed_header_is_refused(converted, tmp_path, header):
    _, root = converted
    (root / HEADER).write_bytes(header)
    assert any("is no header of a shard" in line for line in verify(root).findings)
    with pytest.raises(CheckpointError, match="is no header of a shard"):
        restore(root, tmp_path / "back")


@pytest.mark.parametrize("shape", ["ab", [16, "x"], [48], [1 << 40, 2], [16, 3]])
def test_header_with_another_shape_of_a_scale_is_refused(converted, shape):
    """Decoding would follow it."""
    _, root = converted
    path = conversion.folder_of(root) / f"{EXPERTS_SHARD}.header"
    header = path.read_bytes()
    value = json.loads(header[8:])
    name = next(name for name in value if name.endswith("up_proj.weight_scale"))
    value[name]["shape"] = shape
    path.write_bytes(header[:8] + json.dumps(value).encode())
    assert len(verify(root).findings) == 1


# ---- where to restore to -------------------------------------------------------------------------


def test_restore_takes_a_new_folder_of_its_own(converted, tmp_path):
    _, root = converted
    for target in (root, root / "inside", root.parent):
        with pytest.raises(CheckpointError, match="folder of its own"):
            restore(root, target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        restore(root, tmp_path / "full")


def test_restore_needs_exactly_the_bytes_of_the_source(converted, tmp_path, monkeypatch):
    source, root = converted
    needed = sum(len(content) for content in contents(source).values())
    set_free_bytes(monkeypatch, needed - 1)
    with pytest.raises(CheckpointError, match=f"{needed - 1} bytes are free, expected at least {needed}"):
        restore(root, tmp_path / "a")
    set_free_bytes(monkeypatch, needed)
    assert restore(root, tmp_path / "b") == len(contents(source))


def test_restored_files_are_checked_before_they_get_their_name(converted, tmp_path):
    _, root = converted
    damage(root, "self_attn.o_proj.weight")
    (tmp_path / "there").mkdir()
    for name in ("back", "new/back", "there"):
        with pytest.raises(CheckpointError, match="SHA-256"):
            restore(root, tmp_path / name)
    # What was not there before is gone again.
    assert {"back", "new", "there"} & {path.name for path in tmp_path.iterdir()} == {"there"}
    assert contents(tmp_path / "there") == {}


def test_where_no_folder_can_be_made_nothing_is_left(converted, tmp_path):
    _, root = converted
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file/new/back: cannot be made: not a directory"):
        restore(root, tmp_path / "file" / "new" / "back")
    with pytest.raises(CheckpointError, match="cannot be made: file name too long"):
        restore(root, tmp_path / "new" / ("n" * 300))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["csf", "file"]


def test_links_in_a_circle_are_named(converted, tmp_path):
    source, root = converted
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for target in (loop, loop / "below"):
        for make in (lambda to: restore(root, to), lambda to: convert(source, to, TOOL)):
            with pytest.raises(CheckpointError, match=r"loop.*: its links lead round in a circle"):
                make(target)
    assert cli.main(["restore", str(loop), str(tmp_path / "back")]) == 1


def test_a_file_is_not_called_a_missing_folder(converted, tmp_path):
    _, root = converted
    with pytest.raises(CheckpointError, match=r"config\.json: is a file, expected the folder of a converted"):
        restore(root / "config.json", tmp_path / "back")


@pytest.mark.parametrize("there", [False, True])
def test_what_is_restored_in_part_is_told(converted, tmp_path, there):
    _, root = converted
    back = tmp_path / "back"
    if there:
        back.mkdir()
    (root / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=f"missing, .*; {back} is restored in part, delete it"):
        restore(root, back)
    assert (back / SHARD).exists()


def test_an_interrupted_restoration_says_what_it_leaves(converted, tmp_path, capsys, monkeypatch):
    _, root = converted
    back = tmp_path / "back"
    written = []

    def interrupted(*arguments) -> Iterator[bytes]:
        yield from checked(*arguments)
        if written:
            raise KeyboardInterrupt
        written.append(arguments)

    monkeypatch.setattr("vllm_csf.loaders.restore.checked", interrupted)
    assert cli.main(["restore", "--quiet", str(root), str(back)]) == 130
    assert capsys.readouterr().err == (
        f"vllm-csf restore: interrupted: {back} is restored in part, delete it before another try\n"
    )
    assert len(contents(back)) == 1
