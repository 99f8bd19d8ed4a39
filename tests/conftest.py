"""Example checkpoints, each made once a session."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As what a shell starts in the background inherits, and hands on: servers could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first: two workers share out files, and none is to be left with them.

    Tests marked `gpu` are skipped, and counted as skipped, where there is none.
    """
    items.sort(key=lambda item: item.get_closest_marker("server") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, layout, seed=0) -> folder to serve."""
    from vllm_csf.loaders import example

    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, str, int], Path] = {}

    def make(family: str, layout: str, seed: int = 0) -> Path:
        if (family, layout, seed) not in made:
            folder = root / f"{family}-{seed}" / layout
            folder.parent.mkdir(exist_ok=True)
            example.make_example(folder, family=family, layout=layout, seed=seed)
            made[family, layout, seed] = folder / "metadata" if layout == "container" else folder
        return made[family, layout, seed]

    return make
