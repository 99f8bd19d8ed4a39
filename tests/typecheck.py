"""Runs mypy on the package as it is installed.

mypy does not follow the mapping of `kernels/` and `loaders/` into `vllm_csf`, so it is given a wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        site = Path(folder, "site")
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "-p",
            "vllm_csf",
        ]
        environment = os.environ | {"MYPYPATH": str(site)}
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
