"""On a CUDA device: examples/serve_check.py, with CUDA graphs, MTP and both levels of sleep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from asking import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.server]

CASES = {
    "qwen3-moe, streams": ("qwen3-moe", "csf", []),
    "qwen3-moe, plain, lazy": ("qwen3-moe", "modelopt", ["--load-format", "csf"]),
    "qwen3-moe, reference": ("qwen3-moe", "csf", ["--execution", "reference"]),
    "glm4-moe, MTP": ("glm4-moe", "csf", ["--mtp", "1"]),
}


@pytest.mark.parametrize(("family", "layout", "flags"), CASES.values(), ids=CASES.keys())
def test_serve_check(checkpoint, tmp_path: Path, family: str, layout: str, flags: list[str]) -> None:
    record = tmp_path / "record.json"
    models = [str(checkpoint(family, kind)) for kind in (layout, "dequantized")]
    script = str(ROOT / "examples" / "serve_check.py")
    command = [sys.executable, script, *models, "--record", str(record), "--sleep", *flags]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    found = json.loads(record.read_text())
    assert "FULL" in found["cuda_graphs"] or "PIECEWISE" in found["cuda_graphs"]
    assert {"first", "again", "after reload", "after sleep level 1", "after sleep level 2"} <= set(
        found["runs"]
    )
