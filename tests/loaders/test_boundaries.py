"""loaders know neither vLLM nor the kernels."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import vllm_csf.loaders

FORBIDDEN = ("vllm", "vllm_csf.kernels", "cutlass", "transformers")


def test_no_forbidden_imports() -> None:
    modules = [
        f"vllm_csf.loaders.{module.name}" for module in pkgutil.iter_modules(vllm_csf.loaders.__path__)
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {FORBIDDEN} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
