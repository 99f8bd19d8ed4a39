"""What a conversion refuses before it writes, and how conversions keep out of each other's way."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from converting import TOOL, contents, set_free_bytes
from fake_checkpoints import edit_json, modelopt_tensors, random_layer, save, write_folder
from vllm_csf.loaders import conversion, shard_writer
from vllm_csf.loaders.checkpoint import INDEX
from vllm_csf.loaders.convert import convert
from vllm_csf.loaders.errors import CheckpointError
from vllm_csf.loaders.restore import restore
from vllm_csf.loaders.verify import verify

CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
SHARDS = [f"model-0000{n}.safetensors" for n in range(3)]


def plain_source(root: Path, shards: int = 3, **sizes: int) -> Path:
    write_folder(root, modelopt_tensors(random_layer(**sizes)), CONFIG, shards)
    (root / "tokenizer.json").write_text("{}")
    return root


@pytest.fixture
def source(tmp_path) -> Path:
    return plain_source(tmp_path / "source")


def refused(source: Path, tmp_path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        convert(source, tmp_path / "csf", TOOL)
    assert not (tmp_path / "csf").exists()


def comes_back(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "csf", TOOL)
    report = verify(tmp_path / "csf", source)
    assert report.ok, report.findings
    restore(tmp_path / "csf", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


# ---- files of the source -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "folder"])
def test_broken_links_are_refused(source, tmp_path, name):
    (source / name).symlink_to(tmp_path / "nowhere")
    refused(source, tmp_path, f"{name}: a broken link")


def test_links_in_circles_are_refused(source, tmp_path):
    (source / "below").mkdir()
    (source / "below" / "again").symlink_to(source)
    refused(source, tmp_path, "below/again: a link to a folder around it")


def test_shards_whose_records_would_have_one_name(tmp_path):
    layer = random_layer(experts=2)
    names = ["a/b.safetensors", "a--b.safetensors"]
    write_folder(tmp_path / "source", modelopt_tensors(layer), CONFIG, name=lambda i: names[i])
    refused(tmp_path / "source", tmp_path, r"its record would have the name of that of a")


def test_index_with_strange_metadata(source, tmp_path):
    edit_json(source / INDEX, lambda index: index.update(metadata=[1]))
    refused(source, tmp_path, "metadata is a list, expected an object")


def test_what_killed_runs_left_is_no_part_of_a_source(source, tmp_path):
    (source / f"config.json{shard_writer.PARTIAL}").write_text("half")
    convert(source, tmp_path / "csf", TOOL)
    restore(tmp_path / "csf", tmp_path / "back")
    assert contents(tmp_path / "back").keys() == contents(source).keys() - {"config.json.csf-partial"}


def test_files_called_partial_come_back(source, tmp_path):
    for name in ("config.json.partial", "tokenizer.json.partial", f"{SHARDS[0]}.partial"):
        (source / name).write_text(name)
    comes_back(source, tmp_path)


def test_what_is_no_file_is_refused(source, tmp_path):
    os.mkfifo(source / "pipe")
    refused(source, tmp_path, "pipe: .*no ordinary file")


def test_folder_that_cannot_be_read_is_an_error(source, tmp_path, monkeypatch):
    (source / "below").mkdir()
    scan = os.scandir

    def scandir(path):
        if Path(path).name == "below":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        convert(source, tmp_path / "csf", TOOL)
    assert not (tmp_path / "csf").exists()


def test_linked_folders_are_carried_over(source, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "file").write_text("x")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    convert(source, tmp_path / "csf", TOOL)
    restore(tmp_path / "csf", tmp_path / "back")
    for root in ("csf", "back"):
        assert (tmp_path / root / "linked" / "deep" / "file").read_text() == "x"


def test_what_git_and_downloads_keep_is_left_behind(source, tmp_path):
    for folder in (".git", ".cache"):
        (source / folder).mkdir()
        (source / folder / "file").write_text("x")
    (source / ".gitattributes").write_text("x")
    convert(source, tmp_path / "csf", TOOL)
    found = contents(tmp_path / "csf")
    assert ".gitattributes" in found
    assert not [name for name in found if name.startswith((".git/", ".cache/"))]


def test_stray_shard_without_an_index_is_refused(tmp_path):
    """With one, the shards that it does not name are files like others."""
    source = plain_source(tmp_path / "source", shards=1)
    save(source / "consolidated.safetensors", {"x": torch.ones(3)})
    comes_back(source, tmp_path)
    (source / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors: holds tensors beside"):
        convert(source, tmp_path / "again", TOOL)
    assert not (tmp_path / "again").exists()


def test_one_shard_without_an_index_comes_back_without_one(tmp_path):
    source = plain_source(tmp_path / "source", shards=1)
    (source / INDEX).unlink()
    comes_back(source, tmp_path)
    assert (tmp_path / "csf" / INDEX).exists()


def test_index_of_another_name_comes_back(source, tmp_path):
    (source / INDEX).rename(source / "other.safetensors.index.json")
    comes_back(source, tmp_path)
    assert not (tmp_path / "csf" / "other.safetensors.index.json").exists()


def test_folder_of_the_name_of_ours_is_refused(source, tmp_path):
    conversion.folder_of(source).mkdir()
    refused(source, tmp_path, f"{conversion.FOLDER}: exists")


def test_planes_that_the_codec_does_not_define_are_refused_by_name(tmp_path):
    source = plain_source(tmp_path / "source", width=64, hidden=48)
    refused(source, tmp_path, r"0\.gate_proj\.weight_scale: 3 columns, expected even")


def test_file_for_a_target_is_refused(source, tmp_path):
    (tmp_path / "csf").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        convert(source, tmp_path / "csf", TOOL)
    assert (tmp_path / "csf").read_text() == "x"


# ---- one at a time -------------------------------------------------------------------------------


def test_target_is_locked_while_a_conversion_is_at_work(source, tmp_path):
    tried = []

    def again(_):
        with pytest.raises(CheckpointError, match="another conversion is at work"):
            convert(source, tmp_path / "csf", TOOL)
        tried.append(1)

    convert(source, tmp_path / "csf", TOOL, progress=again)
    assert tried
    assert verify(tmp_path / "csf", source).ok


def test_of_two_that_start_together_one_converts(source, tmp_path):
    def attempt(_):
        try:
            return convert(source, tmp_path / "csf", TOOL).shards
        except CheckpointError as error:
            return str(error)

    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(attempt, range(2)))
        lost = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert len(lost) == 1, outcomes
        assert any(why in lost[0] for why in ("at work on it", "just finished it", "is not empty"))
        assert verify(tmp_path / "csf", source).ok
        (tmp_path / "csf").rename(tmp_path / f"csf{len(list(tmp_path.iterdir()))}")


def test_lock_goes_with_a_conversion_that_fails(source, tmp_path):
    def fail(_):
        raise CheckpointError("stopped here")

    with pytest.raises(CheckpointError, match="stopped here"):
        convert(source, tmp_path / "csf", TOOL, progress=fail)
    assert convert(source, tmp_path / "csf", TOOL).converted == 3


@pytest.mark.parametrize("kept", [0, 10])
def test_conversion_killed_at_its_marker_goes_on(source, tmp_path, kept):
    def fail(_):
        raise CheckpointError("stopped here")

    with pytest.raises(CheckpointError, match="stopped here"):
        convert(source, tmp_path / "csf", TOOL, progress=fail)
    marker = conversion.folder_of(tmp_path / "csf") / conversion.INCOMPLETE
    marker.write_bytes(marker.read_bytes()[:kept])
    (tmp_path / "csf" / "file").write_text("a stranger's")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(source, tmp_path / "csf", TOOL)
    assert len(marker.read_bytes()) == kept
    (tmp_path / "csf" / "file").unlink()
    assert convert(source, tmp_path / "csf", TOOL).converted == 3
    assert not marker.exists()


# ---- stops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("error", [CheckpointError("no more"), KeyboardInterrupt()])
def test_first_failure_stops_the_others(source, tmp_path, monkeypatch, jobs, error):
    started = []
    write = shard_writer.write_shard

    def once(path, entries, metadata):
        started.append(path.name)
        if path.name == SHARDS[0]:
            raise error
        return write(path, entries, metadata)

    monkeypatch.setattr(shard_writer, "write_shard", once)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "csf", TOOL, jobs)
    if jobs == 1:
        assert started == SHARDS[:1]
    assert not [name for name in contents(tmp_path / "csf") if name.endswith(shard_writer.PARTIAL)]
    monkeypatch.undo()
    convert(source, tmp_path / "csf", TOOL, jobs)
    assert verify(tmp_path / "csf", source).ok


def test_shard_that_changes_meanwhile_is_no_result(source, tmp_path, monkeypatch):
    write = shard_writer.write_shard

    def touch(path, entries, metadata):
        size = write(path, entries, metadata)
        os.utime(source / path.name, (1, 1))
        return size

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "write_shard", touch)
        with pytest.raises(CheckpointError, match="changed while it was converted"):
            convert(source, tmp_path / "csf", TOOL)
    assert not list(conversion.folder_of(tmp_path / "csf").glob("*.safetensors.json"))
    assert convert(source, tmp_path / "csf", TOOL).converted == 3


def test_shard_that_changes_before_its_turn_is_no_result(source, tmp_path):
    """One without scales, so that only its bytes are copied."""
    last = source / "model-last.safetensors"
    save(last, {"x": torch.ones(3)})
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["x"] = last.name
    (source / INDEX).write_text(json.dumps(index))

    def change(_):
        save(last, {"x": torch.ones(4)})

    with pytest.raises(CheckpointError, match=r"model-last\.safetensors: changed since"):
        convert(source, tmp_path / "csf", TOOL, progress=change)
    assert not (tmp_path / "csf" / last.name).exists()


# ---- space ---------------------------------------------------------------------------------------


def test_no_disk_is_refused_that_could_do(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "first", TOOL)
    set_free_bytes(monkeypatch, sum(map(len, contents(tmp_path / "first").values())))
    assert convert(source, tmp_path / "csf", TOOL).converted == 3


def test_disk_is_refused_that_cannot_do(source, tmp_path, monkeypatch):
    """Scales shrink to half at best."""
    scales = sum(t.nbytes for n, t in modelopt_tensors(random_layer()).items() if n.endswith("weight_scale"))
    free = sum(map(len, contents(source).values())) - scales // 2 - 1
    set_free_bytes(monkeypatch, free)
    with pytest.raises(CheckpointError, match=f"{free} bytes are free, expected at least {free + 1}"):
        convert(source, tmp_path / "csf", TOOL)
    assert not [name for name in contents(tmp_path / "csf") if name.endswith(".safetensors")]


def test_what_is_done_needs_no_space_again(source, tmp_path, monkeypatch):
    def fail(*_):
        raise CheckpointError("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_record", fail)
        with pytest.raises(CheckpointError, match="stopped here"):
            convert(source, tmp_path / "csf", TOOL)
    set_free_bytes(monkeypatch, 0)
    assert convert(source, tmp_path / "csf", TOOL).converted == 0
    assert json.loads((tmp_path / "csf" / INDEX).read_text())["weight_map"]
