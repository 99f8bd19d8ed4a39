"""Measures how long servers take to start: with empty caches, with filled ones, several at once.

    for each round, for each arm: start with empty caches, stop; start again, stop
                                  start several at once on other empty caches, stop

Every start is real `vllm serve`, up to its answer to a greedy prompt. The arm that begins changes from round
to round. `vllm-csf bench starts` runs this. The record, written anew after every start:

    {"machine": {...}, "commit": ..., "checkpoint": {...}, "settings": {...}, "skipped": {arm: reason},
     "failures": [...], "starts": [...]}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import machine, observe, records
from .serve_report import aligned
from .server import ERROR, POLL_SECONDS, Server, ServerError, has_cuda, terminable
from .serving import MTP, OFF, speculative_config, turn
from .subjects import Subject

COLD, WARM = "empty", "filled"
PROMPT = list(range(1, 17))
ANSWER = 16
PROGRAMS = re.compile(r"programs: (\d+) compiled in [\d.]+ s, (\d+) from cache")
WAITED = re.compile(r"the start waited ([\d.]+) s")


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    at_once: servers of an arm with the plugin that start together on empty caches, 1 for none of that;
    speculation: `OFF` or `MTP`; duration: nothing starts after so many seconds.
    """

    checkpoint: str
    subjects: Sequence[Subject]
    rounds: int = 3
    at_once: int = 1
    speculation: str = OFF
    speculative_tokens: int = 3
    duration: float | None = None
    start_seconds: float = 900.0
    commit: str = "unknown"
    skipped: dict[str, str] = field(default_factory=dict)


def run(
    wanted: Wanted,
    record: dict[str, Any],
    out: Path | None,
    say: Callable[[str], None],
    about: dict[str, Any] | None = None,
) -> None:
    """Fills the record, which `out` holds at any moment, logs beside it; failures are in it.

    about: of the checkpoint. Raises KeyboardInterrupt when interrupted, after the servers have stopped: the
    record has what there was until then.
    """
    record |= {
        "machine": machine.describe(),
        "commit": wanted.commit,
        "checkpoint": {"name": Path(wanted.checkpoint).name, **(about or {})},
        "settings": _settings(wanted),
        "skipped": wanted.skipped,
        "failures": [],
        "starts": [],
    }
    with tempfile.TemporaryDirectory(prefix="vllm-csf-starts-") as folder, terminable():
        logs = out.with_name(out.stem + "-logs") if out else Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        _Session(wanted, record, out, say, logs).measure()


def _settings(wanted: Wanted) -> dict[str, Any]:
    names = ("rounds", "at_once", "speculation", "speculative_tokens", "duration", "start_seconds")
    arms = {s.name: {"model": Path(s.model).name, "flags": s.flags} for s in wanted.subjects}
    return {name: getattr(wanted, name) for name in names} | {"arms": arms}


class _Session:
    def __init__(
        self,
        wanted: Wanted,
        record: dict[str, Any],
        out: Path | None,
        say: Callable[[str], None],
        logs: Path,
    ) -> None:
        self.wanted, self.record, self.out, self.say, self.logs = wanted, record, out, say, logs
        self._end = time.monotonic() + (math.inf if wanted.duration is None else wanted.duration)
        self._cpu = not has_cuda()

    def measure(self) -> None:
        self._keep()
        for number in range(self.wanted.rounds):
            for subject in turn(self.wanted.subjects, number):
                self._arm(number, subject)

    def _arm(self, number: int, subject: Subject) -> None:
        with tempfile.TemporaryDirectory(prefix="vllm-csf-caches-") as folder:
            for caches in (COLD, WARM):
                if not self._start(number, subject, caches, 1, Path(folder)):
                    return
        if self.wanted.at_once > 1 and subject.name != "stock":
            with tempfile.TemporaryDirectory(prefix="vllm-csf-caches-") as folder:
                self._start(number, subject, COLD, self.wanted.at_once, Path(folder))

    def _start(self, number: int, subject: Subject, caches: str, servers: int, folder: Path) -> bool:
        """Whether all of them came up and answered. None starts once the time is over."""
        if time.monotonic() >= self._end:
            return False
        where = {"round": number, "arm": subject.name, "caches": caches, "at_once": servers}
        label = f"{number}-{subject.name}-{caches}-{servers}"
        logs = [self.logs / f"{label}-{index}.log" for index in range(servers)]
        with contextlib.ExitStack() as stack:
            launched = [self._server(subject, log, folder) for log in logs]
            for one in launched:
                stack.callback(one.stop)
                one.launch()
            up = self._come_up(launched, where)
            # Not before all are up: an answer takes time from those that still start.
            good = [self._answers(launched[i], seconds, where | {"server": i}) for i, seconds in up.items()]
        return len(good) == servers and all(good)

    def _come_up(self, launched: Sequence[Server], where: dict[str, Any]) -> dict[int, float]:
        """Seconds that each took which came up, in their order. Those that will not are stopped at once."""
        up: dict[int, float] = {}
        waiting = dict(enumerate(launched))
        while waiting:
            for i, one in list(waiting.items()):
                try:
                    seconds = one.poll()
                except ServerError as error:
                    one.stop()
                    self._failed(where | {"server": i}, error)
                    del waiting[i]
                    continue
                if seconds is not None:
                    up[i] = seconds
                    del waiting[i]
            if waiting:
                time.sleep(POLL_SECONDS)
        return dict(sorted(up.items()))

    def _server(self, subject: Subject, log: Path, folder: Path) -> Server:
        flags = list(subject.flags)
        if self.wanted.speculation == MTP:
            config = speculative_config(self.wanted.speculative_tokens)
            flags += ["--speculative-config", json.dumps(config)]
        environment = dict(subject.environment) | own_caches(folder)
        if Path(subject.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        return Server(
            subject.model,
            flags,
            log=log,
            cpu=self._cpu,
            environment=environment,
            start_seconds=self.wanted.start_seconds,
        )

    def _answers(self, server: Server, seconds: float, where: dict[str, Any]) -> bool:
        """Whether it does, which the record then says."""
        try:
            begin = time.monotonic()
            answer = server.complete(PROMPT, ANSWER, ignore_eos=True)["text"]
            took = time.monotonic() - begin
        except ServerError as error:
            self._failed(where, error)
            return False
        start = where | {"start_seconds": round(seconds, 2), "answer_seconds": round(took, 2)}
        start |= {"answer": answer, "host_peak_mib": server.peak_host_bytes() >> 20}
        self.record["starts"].append(start | _facts(server.log_text()))
        self.say(f"{_named(where)}: ready after {seconds:.1f} s")
        self._keep()
        return True

    def _failed(self, where: dict[str, Any], error: ServerError) -> None:
        self.record["failures"].append(where | {"error": _shortened(str(error))})
        self.say(f"{_named(where)}: failed: {error}")
        self._keep()

    def _keep(self) -> None:
        if self.out is not None:
            records.write(self.record, self.out)


def _named(where: dict[str, Any]) -> str:
    found = f"round {where['round']}, {where['arm']}, {where['caches']} caches"
    return found + (f", {where['at_once']} at once, server {where['server']}" if where["at_once"] > 1 else "")


def _shortened(error: str) -> str:
    """What went wrong stands before the end of the log, which is long."""
    return error if len(error) <= 4000 else f"{error[:1000]}\n...\n{error[-3000:]}"


def own_caches(folder: Path) -> dict[str, str]:
    """Variables that put there what vLLM, its libraries and the plugin compile, and leave downloads alone."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return {
        "XDG_CACHE_HOME": str(folder),
        "HF_HOME": os.environ.get("HF_HOME") or os.path.join(home, "huggingface"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "TVM_FFI_CACHE_DIR": str(folder / "tvm-ffi"),
    }


def _facts(log: str) -> dict[str, Any]:
    """Of the log; the plugin's lines of all models of a server, a draft's too, added up."""
    found = observe.facts(log)
    if counts := PROGRAMS.findall(log):
        found["compiled"] = sum(int(compiled) for compiled, _ in counts)
        found["from_cache"] = sum(int(cached) for _, cached in counts)
        found["waited_seconds"] = round(sum(map(float, WAITED.findall(log))), 2)
    return found


# ---- what a record says ----------------------------------------------------------------------------

Case = tuple[str, str, int]  # arm, caches, servers at once
COLUMNS = {
    "start_seconds": "start s",
    "answer_seconds": "answer s",
    "load_seconds": "load s",
    "engine_seconds": "engine s",
    "compiled": "compiled",
    "from_cache": "from cache",
    "waited_seconds": "waited s",
}


def cases(record: dict[str, Any]) -> dict[Case, list[dict[str, Any]]]:
    found: dict[Case, list[dict[str, Any]]] = {}
    for start in record["starts"]:
        found.setdefault((start["arm"], start["caches"], start["at_once"]), []).append(start)
    return found


def different_answers(record: dict[str, Any]) -> list[str]:
    """Arms with the plugin whose starts did not all answer the same: they are deterministic."""
    names = {start["arm"] for start in record["starts"]} - {"stock"}
    said = {name: {s["answer"] for s in record["starts"] if s["arm"] == name} for name in names}
    return sorted(name for name, answers in said.items() if len(answers) > 1)


def text(record: dict[str, Any]) -> str:
    """Markdown: medians and spans, then what an arm takes more than stock with the same caches."""
    head = ["arm", "caches", "at once", "starts", *COLUMNS.values()]
    rows = [
        [arm, caches, str(servers), str(len(starts)), *(_span(starts, key) for key in COLUMNS)]
        for (arm, caches, servers), starts in cases(record).items()
    ]
    lines = [f"No {arm} arm: {reason}." for arm, reason in record["skipped"].items()]
    lines += [f"{arm}: the answers of its starts differ." for arm in different_answers(record)]
    lines += list(_differences(cases(record)))
    lines += [f"Failed: {_named(failure)}: {_cause(failure['error'])}" for failure in record["failures"]]
    return "\n\n".join([aligned(head, rows) if rows else "No server came up.", *lines]) + "\n"


def _cause(error: str) -> str:
    """The first line; where that announces the end of a log, with the error in it or else its last line."""
    first, *log = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    if not log or not first.endswith(":"):
        return first
    return f"{first} {next((line for line in log if ERROR.search(line)), log[-1])}"


def _differences(found: dict[Case, list[dict[str, Any]]]) -> Iterator[str]:
    for (arm, caches, servers), starts in found.items():
        base = found.get(("stock", caches, 1))
        if arm != "stock" and servers == 1 and base:
            more = _middle(starts, "start_seconds") - _middle(base, "start_seconds")
            few = ", one start each" if len(starts) == len(base) == 1 else ""
            yield f"{arm} - stock, {caches} caches: {more:+.1f} s{few}."


def _values(starts: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [start[key] for start in starts if start.get(key) is not None]


def _middle(starts: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(_values(starts, key))


def _span(starts: Sequence[dict[str, Any]], key: str) -> str:
    values = _values(starts, key)
    if not values:
        return ""
    span = "" if min(values) == max(values) else f" ({min(values):.4g} to {max(values):.4g})"
    return f"{statistics.median(values):.4g}{span}"
