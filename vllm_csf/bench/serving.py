"""Measures real servers: starts them, drives them with vLLM's own client, keeps a record of every window.

    for each round, for each arm: start, warm up, measure every load, stop          (one by one)
    start arm after arm; for each round, for each load: measure every arm in turn; stop  (together)

The arm that begins changes from round to round. `vllm-csf bench serve` runs this. The record, written anew
after every window:

    {"machine": {...}, "commit": ..., "checkpoint": {...}, "settings": {...}, "skipped": {arm: reason},
     "failures": [...], "starts": [...], "windows": [...]}

An entry of starts has `others_up`: how many other servers were up, idle, while this one started. Starts that
overlap have no `start_seconds` and no `device_mib`, which others would be part of.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import machine, observe, records
from .client import Client
from .records import BenchError
from .server import Server, ServerError, has_cuda, terminable
from .subjects import Subject, unless_given

OFF, MTP = "off", "mtp"
WARM_OUTPUT = 8
WARM_TOKENS = 1 << 16  # prompts of a warm-up, all together, beyond the first
SETTLE_SECONDS = 0.3  # until the server's counters have seen its last step
ROOM = 16  # tokens of a sequence beside prompt and output, for drafts
UNIFORM_ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}


@dataclass(frozen=True)
class Load:
    """Prompt and output tokens of a request, and how many requests run at a time."""

    prompt: int
    output: int
    concurrency: int


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    speculations: some of `OFF` and `MTP`; synthetic_acceptance: tokens a verified draft yields, made up;
    rounds: how often each arm has its turn; repeats: windows of a load in a turn; waves: requests of a
    window for each that runs at a time; together: all arms' servers stay up side by side; overlap_starts: of
    those, one starts as soon as the one before has its weights; duration: no window and no start begins after
    so many seconds; uniform_routing: tokens go to experts at random, by vLLM's simulation, in all arms.
    """

    checkpoint: str
    subjects: Sequence[Subject]
    loads: Sequence[Load]
    speculations: Sequence[str] = (OFF,)
    speculative_tokens: int = 3
    synthetic_acceptance: float | None = None
    rounds: int = 3
    repeats: int = 1
    waves: int = 4
    temperature: float = 0.0
    together: bool = False
    overlap_starts: bool = False
    uniform_routing: bool = False
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
    """Fills the record, and keeps it in `out`, logs beside it; failures are in it. about: of the checkpoint.

    Raises KeyboardInterrupt when interrupted, after the servers have stopped and the record is written.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-csf-bench-") as folder, terminable():
        logs = out.with_name(out.stem + "-logs") if out else Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        session = _Session(wanted, record, out, say, logs)
        session.begin(about or {})
        try:
            session.measure()
        finally:
            session.keep()


@dataclass
class _Running:
    subject: Subject
    speculation: str
    server: Server
    warmed: set[Load] = field(default_factory=set)


class _Session:
    def __init__(
        self,
        wanted: Wanted,
        record: dict[str, Any],
        out: Path | None,
        say: Callable[[str], None],
        folder: Path,
    ) -> None:
        self.wanted, self.record, self.out, self.say, self.folder = wanted, record, out, say, folder
        self._numbers = itertools.count()
        self._lost: set[tuple[str, str]] = set()
        self._cpu = not has_cuda()
        self._end = time.monotonic() + (math.inf if wanted.duration is None else wanted.duration)

    def begin(self, about: dict[str, Any]) -> None:
        w = self.wanted
        shown = asdict(w)
        settings = {k: shown[k] for k in shown if k not in ("subjects", "commit", "skipped", "checkpoint")}
        settings["arms"] = {s.name: {"model": Path(s.model).name, "flags": s.flags} for s in w.subjects}
        self.record |= {
            "machine": machine.describe(),
            "commit": w.commit,
            "checkpoint": {"name": Path(w.checkpoint).name, **about},
            "settings": settings,
            "skipped": w.skipped,
            "failures": [],
            "starts": [],
            "windows": [],
        }
        for name, reason in w.skipped.items():
            self.say(f"no {name} arm: {reason}")

    def keep(self) -> None:
        if self.out is not None:
            records.write(self.record, self.out)

    def measure(self) -> None:
        environment = {"HF_HUB_OFFLINE": "1"} if Path(self.wanted.checkpoint).is_dir() else {}
        with Client(self.folder / "client.log", environment) as self._client:
            if self.wanted.together:
                for speculation in self.wanted.speculations:
                    if not self._over:
                        self._together(speculation)
                return
            for number in range(self.wanted.rounds):
                if self._over:
                    break
                for speculation in self.wanted.speculations:
                    for subject in turn(self.wanted.subjects, number):
                        self._alone(number, speculation, subject)

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._end

    # ---- orders ----------------------------------------------------------------------------------

    def _alone(self, number: int, speculation: str, subject: Subject) -> None:
        if (subject.name, speculation) in self._lost or self._over:
            return
        with contextlib.ExitStack() as stack:
            one = self._start(stack, number, speculation, subject)
            if one is None:
                return
            for load in self.wanted.loads:
                for repeat in range(self.wanted.repeats):
                    self._window(one, number, repeat, load)

    def _together(self, speculation: str) -> None:
        with contextlib.ExitStack() as stack:
            start = self._overlapping if self.wanted.overlap_starts else self._one_after_the_other
            running = start(stack, speculation)
            for number in range(self.wanted.rounds):
                if self._over:
                    break
                for load in self.wanted.loads:
                    for repeat in range(self.wanted.repeats):
                        for one in turn(running, number):
                            self._window(one, number, repeat, load)

    def _one_after_the_other(self, stack: contextlib.ExitStack, speculation: str) -> list[_Running]:
        running: list[_Running] = []
        for subject in self._in_time(speculation):
            one = self._start(stack, 0, speculation, subject, others_up=len(running))
            if one is not None:
                running.append(one)
        return running

    def _overlapping(self, stack: contextlib.ExitStack, speculation: str) -> list[_Running]:
        """Loading takes more memory than what is kept; what comes after it does not."""
        coming: list[tuple[_Running, dict[str, Any]]] = []
        loaded = observe.LOADED_ON_CPU if self._cpu else observe.LOADED
        for subject in self._in_time(speculation):
            one = self._launch(stack, speculation, subject)
            where = {"round": 0, "speculation": speculation, "arm": subject.name, "others_up": len(coming)}
            one.server.wait_for_log(loaded)
            coming.append((one, where))
        return [one for one, where in coming if self._ready(one, where)]

    def _in_time(self, speculation: str) -> Iterator[Subject]:
        for subject in self.wanted.subjects:
            if self._over:
                self.say(f"{subject.name}, speculation {speculation}: not started, time is up")
            else:
                yield subject

    # ---- servers ---------------------------------------------------------------------------------

    def _start(
        self,
        stack: contextlib.ExitStack,
        number: int,
        speculation: str,
        subject: Subject,
        others_up: int = 0,
    ) -> _Running | None:
        """None where it does not come up. The stack stops it.

        Nothing else may start meanwhile: loading takes more memory than what is kept, and what it takes is
        told by a difference.
        """
        before = _settled_mib()
        one = self._launch(stack, speculation, subject)
        where = {"round": number, "speculation": speculation, "arm": subject.name, "others_up": others_up}
        return one if self._ready(one, where, before) else None

    def _launch(self, stack: contextlib.ExitStack, speculation: str, subject: Subject) -> _Running:
        one = _Running(subject, speculation, self._server(subject, speculation))
        stack.callback(one.server.stop)
        one.server.launch()
        return one

    def _ready(self, one: _Running, where: dict[str, Any], before: int | None = None) -> bool:
        """Whether the server comes up, which the record then says.

        before: MiB of the device in use, where the difference is the server's own.
        """
        try:
            seconds = one.server.wait()
            start = where | self._facts(one.server)
        except ServerError as error:
            self._failed(one, error, **where)
            return False
        if before is not None and (after := machine.used_mib()) is not None:
            start["device_mib"] = after - before
        took = ""
        if not self.wanted.overlap_starts:
            start["start_seconds"] = round(seconds, 1)
            took = f" after {seconds:.0f} s"
        self.record["starts"].append(start)
        self.say(f"{one.subject.name}, speculation {one.speculation}: ready{took}")
        self.keep()
        return True

    def _server(self, subject: Subject, speculation: str) -> Server:
        w, flags = self.wanted, list(subject.flags)
        longest = max(load.prompt + load.output for load in w.loads) + ROOM
        most = max(load.concurrency for load in w.loads)
        for flag, value in (("--max-model-len", longest), ("--max-num-seqs", most)):
            flags += unless_given(flags, flag, value)
        if not any("enable-prefix-caching" in f for f in flags):
            flags.append("--no-enable-prefix-caching")
        if speculation == MTP:
            config = speculative_config(w.speculative_tokens, w.synthetic_acceptance)
            flags += ["--speculative-config", json.dumps(config)]
        log = self.folder / f"{next(self._numbers)}-{subject.name}-{speculation}.log"
        environment = dict(subject.environment) | (UNIFORM_ROUTING if w.uniform_routing else {})
        if Path(subject.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        return Server(
            subject.model,
            flags,
            log=log,
            cpu=self._cpu,
            environment=environment,
            start_seconds=w.start_seconds,
        )

    def _facts(self, server: Server) -> dict[str, Any]:
        found = observe.facts(server.log_text())
        found.setdefault("kv_tokens", observe.kv_tokens(server.text("/metrics")))
        found["host_peak_mib"] = server.peak_host_bytes() >> 20
        return found

    def _failed(self, one: _Running, error: Exception, **where: Any) -> None:
        """The arm is left out from now on."""
        self._lost.add((one.subject.name, one.speculation))
        one.server.stop()
        self.record["failures"].append(where | {"error": str(error)[-4000:]})
        self.say(f"{one.subject.name}, speculation {one.speculation}: failed: {error}")
        self.keep()

    # ---- windows ---------------------------------------------------------------------------------

    def _window(self, one: _Running, number: int, repeat: int, load: Load) -> None:
        if (one.subject.name, one.speculation) in self._lost or self._over:
            return
        where = {
            "round": number,
            "repeat": repeat,
            "speculation": one.speculation,
            "arm": one.subject.name,
            **asdict(load),
        }
        seed = 1 + number * self.wanted.repeats + repeat
        try:
            if load not in one.warmed:
                requests = min(load.concurrency, 1 + WARM_TOKENS // load.prompt)
                self._drive(one, load, requests, min(WARM_OUTPUT, load.output), seed=0)
                one.warmed.add(load)
            row = where | self._measured(one, load, seed)
        except (BenchError, ServerError) as error:
            # A ServerError has the end of the log already.
            tail = "" if isinstance(error, ServerError) else "\n" + one.server.log_tail()
            self._failed(one, BenchError(f"{error}{tail}"), **where)
            return
        self.record["windows"].append(row)
        self.say(_line(row))
        self.keep()

    def _measured(self, one: _Running, load: Load, seed: int) -> dict[str, Any]:
        before = observe.Counters.of(one.server.text("/metrics"))
        requests = self.wanted.waves * load.concurrency
        with machine.Watch() as watch:
            result = self._drive(one, load, requests, load.output, seed)
        time.sleep(SETTLE_SECONDS)
        spent = observe.Counters.of(one.server.text("/metrics")).since(before)
        if result["completed"] != requests:
            raise BenchError(f"{result['completed']} of {requests} requests were answered")
        return {"requests": requests, **figures(result, spent), **watch.medians}

    def _drive(self, one: _Running, load: Load, requests: int, output: int, seed: int) -> dict[str, Any]:
        arguments = {
            "--backend": "openai",
            "--base-url": one.server.url,
            "--model": one.subject.model,
            "--tokenizer": one.subject.model,
            "--dataset-name": "random",
            "--random-input-len": load.prompt,
            "--random-output-len": output,
            "--num-prompts": requests,
            "--max-concurrency": load.concurrency,
            "--temperature": self.wanted.temperature,
            "--seed": seed,
            "--percentile-metrics": "ttft,tpot,itl",
            "--metric-percentiles": "99",
            "--ready-check-timeout-sec": 0,
        }
        flags = [text for pair in arguments.items() for text in map(str, pair)]
        result = self.folder / f"window-{next(self._numbers)}.json"
        return self._client.run([*flags, "--ignore-eos", "--disable-tqdm"], result)


def speculative_config(tokens: int, acceptance: float | None = None) -> dict[str, Any]:
    """Of the checkpoint's own MTP layer, with the acceptance made up where that is asked for."""
    found: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": tokens}
    if acceptance is not None:
        found["rejection_sample_method"] = "synthetic"
        found["synthetic_acceptance_length"] = acceptance
    return found


def figures(result: dict[str, Any], spent: observe.Counters) -> dict[str, Any]:
    """Of a window: what vLLM's client saw, and what the server counted meanwhile."""
    seconds = result["duration"]
    acceptance = spent.acceptance_length
    return {
        "seconds": round(seconds, 3),
        "input_tokens": result["total_input_tokens"],
        "output_tokens": result["total_output_tokens"],
        "output_tok_s": round(result["output_throughput"], 2),
        "steps_s": round(spent.steps / seconds, 2),
        "acceptance": None if acceptance is None else round(acceptance, 3),
        **{
            f"{kind}_{of}_ms": round(result[f"{kind}_{of}_ms"], 3)
            for of in ("ttft", "tpot", "itl")
            for kind in ("mean", "median", "p99")
            if f"{kind}_{of}_ms" in result
        },
    }


def _settled_mib() -> int | None:
    """Device memory in use, once what a stopped server held is given back."""
    last = machine.used_mib()
    for _ in range(10):
        if not last:
            break
        time.sleep(0.5)
        now = machine.used_mib()
        if now == last:
            break
        last = now
    return last


def turn(items: Sequence[Any], number: int) -> list[Any]:
    """In the order of a round: each round begins with another one."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]


def _line(row: dict[str, Any]) -> str:
    accepted = "" if row["acceptance"] is None else f", {row['acceptance']:.2f} tokens a step accepted"
    return (
        f"round {row['round']}, {row['arm']}, speculation {row['speculation']}, {row['prompt']} + "
        f"{row['output']} tokens x {row['concurrency']}: {row['output_tok_s']:.1f} tok/s, "
        f"{row['steps_s']:.1f} steps/s{accepted}"
    )
