"""Checkpoints in a Hugging Face cache: links into blobs, revisions, offline mode. No network is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from fake_checkpoints import csf_config, csf_tensors, random_layer, write_folder
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.errors import CheckpointError

REPO = "some-org/some-model"
COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two revisions of one repository, as huggingface_hub lays them out; `main` is the second."""
    home = tmp_path / "hub" / "models--some-org--some-model"
    (home / "refs").mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs" / "main").write_text(COMMITS[1])
    for seed, commit in enumerate(COMMITS):
        plain = tmp_path / f"plain{seed}"
        layer = random_layer(experts=2, seed=seed)
        write_folder(plain, csf_tensors(layer), csf_config(layer.name), folder="tensors/")
        for path in sorted(p for p in plain.rglob("*") if p.is_file()):
            blob = home / "blobs" / f"{seed}-{path.name}"
            path.rename(blob)
            link = home / "snapshots" / commit / path.relative_to(plain)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return tmp_path / "hub"


@pytest.mark.parametrize(("revision", "seed"), [(None, 1), ("main", 1), (COMMITS[0], 0), (COMMITS[1], 1)])
def test_offline_by_revision(cache: Path, revision: str | None, seed: int) -> None:
    checkpoint = open_checkpoint(REPO, revision=revision, cache_dir=cache, offline=True)
    assert checkpoint.layout == "A"
    expected = random_layer(experts=2, seed=seed).matrices[1, "up"].weight
    assert torch.equal(checkpoint.layers[0].source(1, "up").weight(), expected)
    assert checkpoint.weight_map()[checkpoint.layers[0].source(1, "up").weight_name].startswith("tensors/")


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    folders = [p for p in (cache, *cache.rglob("*")) if p.is_dir() and not p.is_symlink()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert open_checkpoint(REPO, cache_dir=cache, offline=True).layers[0].experts == 2
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_offline_by_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE=1 is read by huggingface_hub when it is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(REPO, cache_dir=cache).layers[0].experts == 2
    with pytest.raises(
        CheckpointError, match="other/model: no such folder, and not in the Hugging Face cache"
    ):
        open_checkpoint("other/model", cache_dir=cache)


def test_what_the_cache_lacks(cache: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"some-org/some-model \(revision v9\): no such folder, and not in"
    ):
        open_checkpoint(REPO, revision="v9", cache_dir=cache, offline=True)
    blob = next((cache / "models--some-org--some-model" / "blobs").glob("1-model-00001*"))
    blob.unlink()
    with pytest.raises(CheckpointError, match=r"shard tensors/model-00001.safetensors: missing"):
        open_checkpoint(REPO, cache_dir=cache, offline=True)


def test_arguments_reach_huggingface_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def download(repo: str, **arguments: Any) -> str:
        seen.update(arguments, repo=repo)
        return str(cache / "models--some-org--some-model" / "snapshots" / COMMITS[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_checkpoint(REPO, revision="v1", cache_dir=cache, token="hf_x", offline=False)
    assert (seen["repo"], seen["revision"], seen["token"], seen["cache_dir"]) == (REPO, "v1", "hf_x", cache)
    assert seen["local_files_only"] is False
    assert "*.bin" in seen["ignore_patterns"]


def test_a_folder_comes_before_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "some-org" / "some-model", csf_tensors(random_layer()))
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint(REPO, offline=True).root == Path(REPO)
