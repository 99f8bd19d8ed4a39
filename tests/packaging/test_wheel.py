"""The built wheel and sdist hold every package, and install into a fresh environment."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPPED = {"kernels": "vllm_csf.kernels", "loaders": "vllm_csf.loaders", "vllm_csf": "vllm_csf"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    return folder


def packages_of_the_tree() -> set[str]:
    found = set()
    for top, name in MAPPED.items():
        for marker in (ROOT / top).rglob("__init__.py"):
            found.add(".".join((name, *marker.parent.relative_to(ROOT / top).parts)))
    return found


def test_pyproject_lists_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["tool"]["setuptools"]["packages"]) == packages_of_the_tree()


def test_wheel_holds_every_module_and_nothing_at_the_top(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {
        "/".join((*MAPPED[top].split("."), *path.relative_to(ROOT / top).parts))
        for top in MAPPED
        for path in (ROOT / top).rglob("*.py")
    }
    assert modules <= set(names)
    assert "vllm_csf/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"vllm_csf", names[-1].split("/")[0]}


def test_sdist_holds_the_sources(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "kernels/layout.py", "loaders/codec.py"} <= names


def test_wheel_installs_and_imports_in_a_fresh_environment(built, tmp_path):
    """The environment borrows torch, at the end of its path, so that nothing else is borrowed first."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    borrowed = [p for p in sys.path if p.endswith("site-packages")]
    code = f"""
import sys
sys.path += {borrowed!r}
import vllm_csf, vllm_csf.kernels, vllm_csf.loaders
import vllm_csf.kernels.layout, vllm_csf.loaders.codec
for module in (vllm_csf, vllm_csf.kernels, vllm_csf.loaders):
    assert module.__file__.startswith(sys.prefix), module.__file__
from importlib.metadata import entry_points
(point,) = {{p for p in entry_points(group="vllm.general_plugins") if p.name == "csf_nvfp4"}}
assert point.load() is vllm_csf.register
"""
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path)


def test_import_is_quick_and_needs_neither_torch_nor_vllm():
    code = (
        "import sys, time; t = time.perf_counter(); import vllm_csf; t = time.perf_counter() - t\n"
        "assert not {'torch', 'vllm', 'cutlass'} & set(sys.modules), sorted(sys.modules)\n"
        "assert t < 0.2, t\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_imports_run_one_way():
    """kernels and loaders know neither each other nor vLLM; see CONTRIBUTING.md."""
    import ast

    forbidden = {"kernels": ("vllm", "vllm_csf"), "loaders": ("vllm", "vllm_csf", "cutlass", "triton")}
    for top, names in forbidden.items():
        for path in (ROOT / top).rglob("*.py"):
            depth = len(path.relative_to(ROOT / top).parts)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found = [alias.name.split(".")[0] for alias in node.names]
                    assert not set(found) & set(names), (path, found)
                elif isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, (path, node.module, "leaves its package")
                    if node.level == 0:
                        assert node.module.split(".")[0] not in names, (path, node.module)
