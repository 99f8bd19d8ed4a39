"""Compiles several programs at once, each in a worker process.

Threads will not do (two in the compiler abort the process), a fork after CUDA has started neither, and
`multiprocessing` refuses children to the daemonic processes that vLLM's workers are: plain subprocesses.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .program import CompileError, Program

logger = logging.getLogger("vllm.csf")

MOST_WORKERS = 8  # a worker holds some 600 MiB of host memory
COMMAND = ("-P", "-m", "vllm_csf.kernels.compiled.worker")
LOG_TAIL = 2000


class WorkerDiedError(RuntimeError):
    """A worker ended without an answer: killed, or out of memory."""


def _environment() -> dict[str, str]:
    """A worker imports what this process would, and sees no GPU."""
    found = [path or os.getcwd() for path in sys.path]
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(found)}


class Worker:
    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, program: Program) -> bytes:
        """The program's object. Raises CompileError, or WorkerDiedError."""
        answer = self._ask(program)
        if "error" in answer:
            logger.debug("%s", answer["traceback"])
            error = str(answer["error"])
            raise CompileError(error if program.name in error else f"{program.name}: {error}")
        return base64.b64decode(answer["object"])

    def _ask(self, program: Program) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(program.to_json() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if line.endswith("\n"):
            return json.loads(line)
        status = self._process.wait()
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - LOG_TAIL))
        tail = self._log.read().decode(errors="replace").strip()
        raise WorkerDiedError(
            f"{program.name}: its worker ended with status {status}" + f": {tail}" * bool(tail)
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def compile_in_workers(
    programs: Sequence[Program],
    done: Callable[[Program, bytes], None],
    most: int = MOST_WORKERS,
    failed: Callable[[Program, CompileError], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Program]:
    """Compiles programs at the same time; `done` is told of each, one at a time, as it is ready.

    failed: is told of each that does not compile; without it the first CompileError is raised once the
    others have ended their work in hand. stop: once set, nothing new is begun.
    Returns those whose worker died, with a warning each, and what was not begun.
    """
    waiting: queue.SimpleQueue[Program] = queue.SimpleQueue()
    for program in programs:
        waiting.put(program)
    crew = _Crew(waiting, done, failed, stop or threading.Event())
    count = min(len(programs), most, len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if crew.error is not None:
        raise crew.error
    return [*crew.lost, *_drain(waiting)]


class _Crew:
    """What the threads that talk to the workers share."""

    def __init__(
        self,
        waiting: queue.SimpleQueue[Program],
        done: Callable[[Program, bytes], None],
        failed: Callable[[Program, CompileError], None] | None,
        stop: threading.Event,
    ) -> None:
        self.waiting = waiting
        self.error: BaseException | None = None
        self.lost: list[Program] = []
        self._done = done
        self._failed = failed
        self._stop = stop
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Feed one worker until nothing waits; a worker that died takes its thread along."""
        try:
            worker = Worker()
        except OSError as error:
            logger.warning("csf_nvfp4: no worker process could be started: %s", error)
            return
        try:
            self._feed(worker)
        except BaseException as error:
            self.error = self.error or error
        finally:
            worker.close()

    def _feed(self, worker: Worker) -> None:
        while self.error is None and not self._stop.is_set():
            try:
                program = self.waiting.get_nowait()
            except queue.Empty:
                return
            try:
                data = worker.compile(program)
            except CompileError as error:
                if self._failed is None:
                    raise
                with self._lock:
                    self._failed(program, error)
                continue
            except WorkerDiedError as error:
                logger.warning("csf_nvfp4: %s", error)
                self.lost.append(program)
                return
            with self._lock:
                self._done(program, data)


def _drain(waiting: queue.SimpleQueue[Program]) -> list[Program]:
    found = []
    while not waiting.empty():
        found.append(waiting.get_nowait())
    return found
