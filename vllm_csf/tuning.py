"""Tuning, where it is asked for: candidates for the table of programs are timed on a layer's real weights,
within a budget of time and memory, and the choice is kept beside the compiled programs.

It is a start's only decision that a clock takes part in, so it is made once: whoever has the lock of an entry
times, the other ranks and later starts read what came of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .kernels.compiled.build import Build, ProgramSet
from .kernels.compiled.cache import ProgramCache, environment
from .kernels.compiled.program import Program
from .kernels.moe import candidates, programs
from .kernels.moe.candidates import Trial
from .kernels.moe.programs import Choice, DecodeChoice, Geometry, PrefillChoice
from .planning import Plan, make_plan

logger = logging.getLogger("vllm.csf")

FIELD = "tuning"
FIELDS = "seconds and memory_mib"
FORMAT = 1
ROUNDS = 7  # of each trial; the first one warms up
GAIN = 0.02  # a candidate has to be faster by so much: two tunings of equal candidates agree
KINDS: dict[str, type] = {kind.kind: kind for kind in (DecodeChoice, PrefillChoice)}


class TrialTimer(Protocol):
    """Of candidates on one layer."""

    def ready(self, choice: Choice) -> bool:
        """Whether a call of `choice.tokens` tokens can be timed at all."""

    def __call__(self, choice: Choice, tokens: int, number: int) -> float:
        """Seconds of a call, in the round of that number; raises where the candidate cannot serve it."""


# (geometry, the table's programs, the candidates', bytes of device memory) -> timer
MakeTimer = Callable[[Geometry, ProgramSet, ProgramSet, int], TrialTimer]


@dataclass(frozen=True)
class Budget:
    """What tuning may take of a start. seconds: from the last layer's weights to the choice, waiting for
    candidates to be compiled included; memory_mib: of device memory, given back afterwards."""

    seconds: float = 60.0
    memory_mib: int = 2048


def parse_budget(value: Any) -> Budget | None:
    """Of `quantization_config`'s field `tuning`: true, false, or an object with some fields of Budget.

    Raises ValueError for everything else.
    """
    if value is None or value is False:
        return None
    if value is True:
        return Budget()
    if not isinstance(value, dict):
        raise ValueError(
            f"quantization_config.{FIELD} is {value!r}, expected true, false or an object with {FIELDS}"
        )
    known = {field.name for field in dataclasses.fields(Budget)}
    if unknown := sorted(set(value) - known):
        raise ValueError(
            f"quantization_config.{FIELD} has {', '.join(map(repr, unknown))}, expected {FIELDS}"
        )
    return Budget(
        seconds=float(_positive(value, "seconds", (int, float), "a number of seconds above 0")),
        memory_mib=int(_positive(value, "memory_mib", (int,), "a whole number of MiB above 0")),
    )


def _positive(value: dict[str, Any], name: str, kinds: tuple[type, ...], expected: str) -> Any:
    found = value.get(name, getattr(Budget(), name))
    fits = not isinstance(found, bool) and isinstance(found, kinds)
    if not fits or not 0 < found < float("inf"):
        raise ValueError(f"quantization_config.{FIELD}.{name} is {found!r}, expected {expected}")
    return found


@dataclass(frozen=True)
class Tuning:
    """A budget and the device it is spent on, by its name."""

    budget: Budget
    device: str


@dataclass(frozen=True)
class Outcome:
    """`choices`: a table to make the plan of. `tried` of `wanted` programs and token counts were timed; not
    `timely`: because the time was over. `seconds`: that it took. `compiled`: programs, since the start;
    `changed`: steps that are not the table's."""

    choices: tuple[Choice, ...]
    tried: int
    wanted: int
    timely: bool
    seconds: float
    source: str = "tuned"
    changed: int = 0
    compiled: int = 0

    def line(self, plan: str) -> str:
        if self.source != "tuned":
            return f"tuning: from cache in {self.seconds:.2f} s, {self.changed} steps not the table's; {plan}"
        short = "" if self.timely else ", stopped by its budget of time"
        return (
            f"tuning: tuned in {self.seconds:.1f} s, {self.tried} of {self.wanted} candidates timed{short}, "
            f"{self.compiled} programs compiled for it, {self.changed} steps not the table's; {plan}"
        )


# ---- which is fastest ------------------------------------------------------------------------------


@dataclass
class Race:
    """The candidates of a plan against the clock."""

    timer: TrialTimer
    deadline: float
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.tried = 0
        self.timely = True
        self._failed: set[Choice] = set()

    def run(self, trials: Sequence[Trial]) -> list[Choice]:
        """The choice for each trial; the table's own where time was over or nothing is faster."""
        return [self._winner(trial) for trial in trials]

    def _winner(self, trial: Trial) -> Choice:
        own = trial.choices[0]
        able = [c for c in trial.choices if self.timer.ready(c) and replace(c, tokens=0) not in self._failed]
        if own not in able or not self._in_time():
            return own
        times: dict[Choice, list[float]] = {choice: [] for choice in able}
        for number in range(ROUNDS):
            for choice in tuple(times):
                if not self._in_time():
                    return own
                if (seconds := self._time(choice, trial.tokens, number)) is None:
                    del times[choice]
                elif number:
                    times[choice].append(seconds)
        self.tried += len(times)
        if own not in times:
            return own
        medians = {choice: statistics.median(found) for choice, found in times.items()}
        best = min(medians, key=lambda choice: medians[choice])
        return best if medians[best] < (1 - GAIN) * medians[own] else own

    def _in_time(self) -> bool:
        self.timely = self.timely and self.clock() < self.deadline
        return self.timely

    def _time(self, choice: Choice, tokens: int, number: int) -> float | None:
        try:
            return self.timer(choice, tokens, number)
        except Exception as error:
            logger.warning(
                "csf_nvfp4: tuning goes on without %s: %s: %s", choice, type(error).__name__, error
            )
            self._failed.add(replace(choice, tokens=0))
            return None


# ---- what is kept ----------------------------------------------------------------------------------


class ChoiceCache:
    """The entry of one plan: the table that was chosen for it. Keyed as programs are, and by the device, the
    candidates and how they are compared."""

    def __init__(self, cache: ProgramCache, plan: Plan, device: str) -> None:
        self._cache = cache
        self._plan = plan
        self._trials = trials_of(plan)
        facts = {
            "format": FORMAT,
            "rule": [ROUNDS, GAIN],
            "device": device,
            "geometry": dataclasses.asdict(plan.geometry),
            "trials": [[t.tokens, [_as_json(c) for c in t.choices]] for t in self._trials],
        }
        text = f"{environment()}\n{json.dumps(facts, sort_keys=True)}"
        self.key = hashlib.sha256(text.encode()).hexdigest()
        self._device = device

    @property
    def path(self) -> Path:
        return self._cache.folder / f"tuning-{self._plan.geometry.arch}-{self.key[:32]}.json"

    def lock(self) -> AbstractContextManager[bool]:
        return self._cache.lock_path(self.path, wait=True)

    def find(self, budget: Budget) -> Outcome | None:
        """What a tuning came to that had all the time and memory it needed, or at least this budget."""
        began = time.perf_counter()
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
        except OSError:
            return None
        try:
            if head.decode() != hashlib.sha256(body).hexdigest():
                raise ValueError("its checksum is another one")
            entry = json.loads(body)
            choices = self._choices(entry)
            less = entry["seconds"] < budget.seconds or entry["memory_mib"] < budget.memory_mib
            whole = entry["tried"] == entry["wanted"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("csf_nvfp4: %s is damaged, it is made anew: %s", self.path, error)
            return None
        if less and not whole:
            return None
        seconds = time.perf_counter() - began
        return Outcome(choices, entry["tried"], entry["wanted"], True, seconds, "cache")

    def _choices(self, entry: dict[str, Any]) -> tuple[Choice, ...]:
        if entry["key"] != self.key:
            raise ValueError("it is of another plan")
        choices = tuple(_from_json(fields) for fields in entry["choices"])
        tokens = [choice.tokens for choice in choices]
        if not tokens or tokens != sorted(set(tokens)) or tokens[-1] != self._trials[-1].tokens:
            raise ValueError(f"its choices take {tokens} tokens")
        return choices

    def store(self, outcome: Outcome, budget: Budget) -> None:
        entry = {
            "key": self.key,
            "plan": self._plan.name,
            "device": self._device,
            "seconds": budget.seconds,
            "memory_mib": budget.memory_mib,
            "tried": outcome.tried,
            "wanted": outcome.wanted,
            "choices": [_as_json(choice) for choice in outcome.choices],
        }
        body = json.dumps(entry, sort_keys=True).encode()
        self._cache.write(self.path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _as_json(choice: Choice) -> dict[str, Any]:
    return {"kind": choice.kind, **dataclasses.asdict(choice)}


def _from_json(fields: dict[str, Any]) -> Choice:
    fields = dict(fields)
    choice = KINDS[fields.pop("kind")](**fields)
    if not all(type(value) in (int, bool) for value in fields.values()):
        raise ValueError(f"{fields} are not all whole numbers or switches")
    return choice


# ---- a start's part --------------------------------------------------------------------------------


def trials_of(plan: Plan) -> tuple[Trial, ...]:
    return candidates.trials(plan.geometry, plan.limits.tokens)


def candidate_programs(plan: Plan, wide_ids: Iterable[bool] = (False,)) -> list[Program]:
    """Of a plan's candidates, for these types of routing ids, those that the table has excepted."""
    own = set(plan.programs())
    geometries = [replace(plan.geometry, wide_ids=wide) for wide in wide_ids]
    found = (programs.declared(g, c) for t in trials_of(plan) for c in t.choices for g in geometries)
    return [program for program in dict.fromkeys(found) if program not in own]


class Tuner:
    """Of one plan in one start. `begin` while weights load, `tune` when a layer has them."""

    def __init__(self, plan: Plan, tuning: Tuning, cache: ProgramCache) -> None:
        self._plan = plan
        self._budget = tuning.budget
        self._kept = ChoiceCache(cache, plan, tuning.device)
        self._cache = cache
        self._candidates: Build | None = None

    def find(self) -> Outcome | None:
        """What an earlier start or another rank chose."""
        found = self._kept.find(self._budget)
        return found and self._counted(found)

    def begin(self, after: Build) -> None:
        """Candidates are compiled in the background, when the plan's own programs have been."""
        self._candidates = Build(
            candidate_programs(self._plan), self._cache, f"{self._plan.name}, tuning", optional=True
        )
        self._candidates.start(after)

    def tune(self, own: ProgramSet, make_timer: MakeTimer) -> tuple[Outcome, ProgramSet | None]:
        """The choice, and the programs that were timed (to be let go). One process at a time."""
        began = time.perf_counter()
        with self._kept.lock():
            if (found := self.find()) is not None:
                return replace(found, seconds=time.perf_counter() - began), None
            outcome, timed = self._time(own, make_timer)
            if outcome.tried:
                self._kept.store(outcome, self._budget)
        return self._counted(outcome), timed

    def _time(self, own: ProgramSet, make_timer: MakeTimer) -> tuple[Outcome, ProgramSet]:
        assert self._candidates is not None
        began = time.perf_counter()
        deadline = began + self._budget.seconds
        logger.info("csf_nvfp4: tuning %s, for %g s at most", self._plan.name, self._budget.seconds)
        # What is left is for timing, which takes a few seconds.
        timed = self._candidates.take(0.8 * self._budget.seconds)
        trials = trials_of(self._plan)
        wanted = sum(len(trial.choices) for trial in trials)
        timer = make_timer(self._plan.geometry, own, timed, self._budget.memory_mib << 20)
        race = Race(timer, deadline)
        choices = candidates.merged(race.run(trials))
        seconds = time.perf_counter() - began
        compiled = self._candidates.account.compiled
        return Outcome(choices, race.tried, wanted, race.timely, seconds, compiled=compiled), timed

    def _counted(self, outcome: Outcome) -> Outcome:
        """Says how many steps are not the table's."""
        own = {replace(step.choice, tokens=0) for step in self._plan.steps}
        tables = {step.last for step in self._plan.steps}
        changed = [c for c in outcome.choices if replace(c, tokens=0) not in own or c.tokens not in tables]
        return replace(outcome, changed=len(changed))

    def plan(self, outcome: Outcome) -> Plan:
        """The plan that serves by what was chosen."""
        if not outcome.changed and len(outcome.choices) == len(self._plan.steps):
            return self._plan
        return make_plan(self._plan.geometry, self._plan.limits, outcome.choices)
