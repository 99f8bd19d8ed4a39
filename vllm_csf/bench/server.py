"""Starts the real `vllm serve`, waits for it, asks it over HTTP, stops it. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 300.0
# Warnings quote errors that did not happen.
ERROR = re.compile(r"^(?!.*\b(?:DEBUG|INFO|WARNING)\b).*\b[A-Z]\w*(Error|Exception)\b: ")
REQUEST_SECONDS = 120.0
POLL_SECONDS = 0.25
SHOWN = 200  # characters of an answer that is not what was expected
# The second where what comes back is no HTTP, or ends too early.
NO_ANSWER = (OSError, http.client.HTTPException)
# A CPU server that pins threads of two ranks needs to be told which cores are whose.
CPU_FLAGS = ("--dtype", "float32", "--enforce-eager")


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request."""


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def vllm_command() -> list[str]:
    """The `vllm` command of this environment."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    # A folder on PYTHONPATH has the package and no command.
    return [found] if found else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def cpu_environment(ranks: int) -> dict[str, str]:
    """What vLLM's CPU build wants to know before it serves with `ranks` ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [cores[r * share : (r + 1) * share] or cores[-1:] for r in range(ranks)]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, group)) for group in groups),
        # Threads that spin while they wait take the cores from the other rank.
        "OMP_NUM_THREADS": "1",
    }


class Server:
    """`with Server(model, flags) as server: server.complete(...)`.

    flags: passed to `vllm serve`; log: file for its output; cpu: run on the CPU (default: if there is
    no CUDA device); environment: further variables.
    """

    def __init__(
        self,
        model: str | Path,
        flags: Sequence[str] = (),
        *,
        log: Path,
        cpu: bool | None = None,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.model = str(model)
        self.log = log
        self._cpu = not has_cuda() if cpu is None else cpu
        self._flags = [*(CPU_FLAGS if self._cpu else ()), *flags]
        self._ranks = ranks
        self._environment = environment or {}
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._launched = 0.0
        self.url = ""

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server answers; raises ServerError, with the end of its log, when it will not."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Starts the processes; `wait` returns when the server answers, and is to be called soon."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [*vllm_command(), "serve", self.model, "--host", "127.0.0.1", "--port", str(port)]
        if self._ranks > 1:
            command += ["--tensor-parallel-size", str(self._ranks)]
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
        environment |= cpu_environment(self._ranks) if self._cpu else {}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment | self._environment,
                start_new_session=True,
            )
        self._launched = time.monotonic()

    def wait(self) -> float:
        """Seconds from the launch until the server answered. Raises ServerError if it does not."""
        try:
            while (seconds := self.poll()) is None:
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise
        return seconds

    def poll(self) -> float | None:
        """Seconds since the launch where it answers now, None where it may yet.

        Raises ServerError, with the end of its log, where it will not. It is asked before its time is looked
        at: one that came up while nobody looked is up.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerError(f"vllm serve ended with {self._process.returncode}:\n{self.log_tail()}")
        with contextlib.suppress(*NO_ANSWER), urllib.request.urlopen(self.url + "/health", timeout=5):
            return time.monotonic() - self._launched
        if time.monotonic() >= self._launched + self._start_seconds:
            raise ServerError(f"not ready after {self._start_seconds:.0f} s:\n{self.log_tail()}")
        return None

    def wait_for_log(self, pattern: str) -> None:
        """Until the log has it. Returns as well where it never will; `wait` says then what is wrong."""
        assert self._process is not None
        deadline = self._launched + self._start_seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            if re.search(pattern, self.log_text()):
                return
            time.sleep(0.25)

    def peak_host_bytes(self) -> int:
        """The largest resident size of each of the server's processes so far, summed (Linux; 0 elsewhere)."""
        if self._process is None:
            return 0
        return sum(_peak_bytes(pid) for pid in _members(self._process.pid))

    def stop(self) -> None:
        """Ends the server and the processes it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for how, seconds in ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
                _signal_group(process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                    break
        finally:  # also after a second ctrl-C, which comes while it is waited for
            _signal_group(process.pid, signal.SIGKILL)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return log_tail(self.log)

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET, or POST with a JSON body; returns the JSON of the answer (None where there is none)."""
        text = self.text(path, body)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{path}: answered {text[:SHOWN]!r}, expected JSON") from error

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """As `request`, whatever the answer is."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                return answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise ServerError(f"{path}: HTTP {error.code}: {detail}\n{self.log_tail()}") from error
        except NO_ANSWER as error:
            raise ServerError(f"{path}: {type(error).__name__}: {error}\n{self.log_tail()}") from error

    def complete(self, prompt: str | list[int], tokens: int = 16, **options: Any) -> dict[str, Any]:
        """One greedy completion; the first choice of the answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
        return self._choice("/v1/completions", body, "text", str)

    def chat(self, text: str, tokens: int = 16, **options: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0, **options}
        return self._choice("/v1/chat/completions", body, "message", dict)

    def _choice(self, path: str, body: dict[str, Any], field: str, kind: type) -> dict[str, Any]:
        answer = self.request(path, body)
        try:
            choice = answer["choices"][0]
            good = isinstance(choice[field], kind)
        except (LookupError, TypeError):
            good = False
        if not good:
            raise ServerError(f"{path}: answered {repr(answer)[:SHOWN]}, expected choices[0].{field}")
        return choice


def log_tail(log: Path, lines: int = 40) -> str:
    """The last lines of a process's log, and before them its first error, which may stand far above."""
    found = log.read_text(errors="replace").splitlines()
    first = next((n for n, line in enumerate(found) if ERROR.search(line)), len(found))
    cause = ["first error: " + found[first].strip()] if first < len(found) - lines else []
    return "\n".join([*cause, *found[-lines:]])


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """A polite kill unwinds as ctrl-C does, so that servers are stopped."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found


def _peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def _signal_group(leader: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, how)
