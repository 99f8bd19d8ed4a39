"""Example checkpoints, each made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(family, layout) -> folder to serve."""
    from vllm_csf.loaders import example

    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, layout: str) -> Path:
        if (family, layout) not in made:
            folder = root / family / layout
            folder.parent.mkdir(exist_ok=True)
            example.make_example(folder, family=family, layout=layout)
            made[family, layout] = folder / "metadata" if layout == "container" else folder
        return made[family, layout]

    return make
