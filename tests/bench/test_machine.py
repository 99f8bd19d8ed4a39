"""What a record says of the machine, with an nvidia-smi that is made up."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from vllm_csf.bench import machine

LINE = "Card H, 580.1, 143771, 1980, 3201, 345, 2619, 700.00, 31"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def make(body: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_facts_of_each_gpu(nvidia_smi):
    nvidia_smi(f"print({LINE!r}); print({LINE!r})")
    found = machine.gpus()
    assert len(found) == 2
    assert found[0] == {
        "name": "Card H",
        "driver": "580.1",
        "memory_mib": 143771,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "sm_mhz": 345,
        "memory_mhz": 2619,
        "power_limit_w": 700,
        "temperature_c": 31,
    }
    assert machine.describe()["gpu"] == "Card H"


@pytest.mark.parametrize("body", ["sys.exit(9)", "print('')"])
def test_no_gpu(nvidia_smi, body):
    nvidia_smi(body)
    assert machine.gpus() == []
    assert machine.used_mib() is None
    assert machine.describe()["gpu"] is None


def test_no_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.gpus() == []
    assert machine.used_mib() is None


def test_memory_in_use(nvidia_smi):
    nvidia_smi("print(1234)")
    assert machine.used_mib() == 1234


def test_versions_name_what_is_installed():
    found = machine.versions()
    assert found["torch"]
    assert found["vllm_csf"]


def test_commit_is_that_of_the_checkout_and_marks_changes(tmp_path, monkeypatch):
    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    source = tmp_path / "vllm_csf" / "bench" / "machine.py"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(machine, "__file__", str(source))
    head = git("rev-parse", "--short=12", "HEAD")
    assert machine.commit() == head
    source.write_text("two")
    assert machine.commit() == head + "+"
    assert machine.commit("given") == "given"


def test_commit_of_an_installed_package_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "a" / "b" / "machine.py"))
    assert machine.commit() == "unknown"


@pytest.mark.gpu
def test_copy_rate_is_that_of_a_gpu():
    assert 100 < machine.copy_rate() < 20_000


def test_a_watch_takes_medians_of_what_can_be_read(nvidia_smi):
    nvidia_smi("import time\nfor x in (3, 1, 2):\n    print(f'{x}, [N/A], 40', flush=True)\ntime.sleep(60)")
    with machine.Watch() as watch:
        time.sleep(1.5)
    assert watch.medians == {"sm_mhz": 2, "temperature_c": 40}


def test_a_watch_without_nvidia_smi_sees_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with machine.Watch() as watch:
        pass
    assert watch.medians == {}
