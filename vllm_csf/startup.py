"""Carries the plans of a model out: programs come while weights load, and are ready with the last layer."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from .kernels.compiled import build
from .kernels.compiled.build import Account, Build, ProgramSet
from .kernels.compiled.cache import ProgramCache
from .kernels.compiled.program import Program
from .kernels.packer import Packer
from .planning import Plan, Step
from .tuning import MakeTimer, Outcome, Tuner, Tuning


class Preparation:
    """The programs that pack weights, on their way from now on: the first layer needs them first."""

    def __init__(self, programs: tuple[Program, ...], cache: ProgramCache) -> None:
        self._programs = programs
        self._build = Build(programs, cache, owner="the preparation of weights")
        self._build.start()
        self._loaded: ProgramSet | None = None
        self._account = Account()

    def settle(self) -> Account:
        """What was waited for since the last time."""
        account, self._account = self._account, Account()
        return account

    def packer(self) -> Packer:
        """Raises CompileError naming a program that does not compile."""
        if self._loaded is None:
            self._loaded = self._build.finish()
            self._account = self._build.account
        return Packer({program.config.step: self._loaded[program] for program in self._programs})


class Served:
    """A plan and, once it is carried out, its programs. Shared by all layers whose plans are equal. Tuning
    puts another plan in its place, of the same geometry and limits, before the programs are loaded."""

    def __init__(self, plan: Plan, preparation: Preparation | None = None) -> None:
        self.plan = plan
        self._preparation = preparation
        self._lasts: list[int] = []
        self._functions: list[tuple[Callable, ...]] = []
        self._programs: ProgramSet | None = None  # keeps them loaded

    def packer(self) -> Packer:
        """For the weights of a layer; see `Preparation`."""
        assert self._preparation is not None
        return self._preparation.packer()

    @property
    def ready(self) -> bool:
        return self._programs is not None

    def load(self, programs: ProgramSet) -> None:
        self._lasts = [step.last for step in self.plan.steps]
        self._functions = [tuple(programs[p] for p in step.programs) for step in self.plan.steps]
        self._programs = programs

    def program(self, tokens: int, wide_ids: bool) -> tuple[Step, Callable]:
        """For at most `plan.piece` tokens."""
        if not self.ready:
            raise RuntimeError(f"{self.plan.name}: its programs were not loaded before the first call")
        index = bisect.bisect_left(self._lasts, tokens)
        return self.plan.steps[index], self._functions[index][wide_ids]


@dataclass
class _Underway:
    served: Served
    build: Build
    cache: ProgramCache
    tuner: Tuner | None = None
    try_out: Callable[[], None] | None = None
    timer: MakeTimer | None = None


@dataclass
class Startup:
    """Of one model, with the draft in its checkpoint.

    `declare` for every layer, `try_with` when a layer has its weights, `finish` after the last one.
    """

    served: dict[Plan, Served] = field(default_factory=dict)
    _underway: dict[Plan, _Underway] = field(default_factory=dict)
    _preparations: dict[tuple[Program, ...], Preparation] = field(default_factory=dict)
    _reclaimed: int = 0
    tuned: list[tuple[Plan, Outcome]] = field(default_factory=list)

    def declare(self, plan: Plan, cache: ProgramCache, tuning: Tuning | None = None) -> Served:
        """The plan's programs begin to come, in the background. Equal plans get one object.

        tuning: the programs may be others than the table's, those of an earlier tuning if there was one.
        """
        if plan not in self.served:
            if not self._underway:
                self._reclaimed += build.reclaim()  # nothing is captured while a model is built
            self.served[plan] = served = Served(plan, self._preparation(plan, cache))
            tuner = Tuner(plan, tuning, cache) if tuning is not None else None
            if tuner is not None and (found := tuner.find()) is not None:
                served.plan, tuner = tuner.plan(found), None
                self.tuned.append((served.plan, found))
            wanted = Build(served.plan.programs(), cache, owner=served.plan.name)
            wanted.start()
            if tuner is not None:
                tuner.begin(wanted)
            self._underway[plan] = _Underway(served, wanted, cache, tuner)
        return self.served[plan]

    def _preparation(self, plan: Plan, cache: ProgramCache) -> Preparation:
        wanted = plan.preparation
        if wanted not in self._preparations:
            self._preparations[wanted] = Preparation(wanted, cache)
        return self._preparations[wanted]

    def try_with(self, plan: Plan, call: Callable[[], None], timer: MakeTimer | None = None) -> None:
        """`call` runs each program of the plan once on a layer. Device code is loaded by a first call, which
        must be neither one that a graph captures nor one after free memory was measured. timer: of the layer,
        for candidates."""
        if (underway := self._underway.get(plan)) is not None:
            underway.try_out, underway.timer = call, timer

    @property
    def underway(self) -> bool:
        """Whether something is declared that is not finished."""
        return bool(self._underway)

    def tuning_lines(self) -> list[str]:
        """For the log, once."""
        lines = [outcome.line(plan.name) for plan, outcome in self.tuned]
        self.tuned.clear()
        return lines

    def finish(self) -> Account | None:
        """Waits for the programs, tunes where that was asked for, and tries them. None where nothing new was
        declared. The account's seconds are all that the start waited, before the first layer for the programs
        that pack weights included.

        Raises CompileError naming a program that does not compile.
        """
        if not self._underway:
            return None
        began = time.perf_counter()
        total = Account(reclaimed=self._reclaimed)
        for preparation in self._preparations.values():
            total.add(preparation.settle())
        before = total.seconds
        for underway in self._underway.values():
            loaded = underway.build.finish()
            total.add(underway.build.account)
            if underway.tuner is not None and underway.timer is not None:
                loaded = self._tune(underway, underway.tuner, underway.timer, loaded, total)
            underway.served.load(loaded)
            del loaded
            if underway.try_out is not None:
                underway.try_out()
        self._underway.clear()
        total.reclaimed += build.reclaim()  # the candidates that lost
        self._reclaimed = 0
        total.seconds = before + time.perf_counter() - began
        return total

    def _tune(
        self, underway: _Underway, tuner: Tuner, timer: MakeTimer, own: ProgramSet, total: Account
    ) -> ProgramSet:
        """The programs of the plan that was chosen, in place of those of the table."""
        outcome, timed = tuner.tune(own, timer)
        plan = tuner.plan(outcome)
        self.tuned.append((plan, outcome))
        if plan is underway.served.plan:
            return own
        chosen = Build(plan.programs(), underway.cache, owner=plan.name)
        own = chosen.finish()
        del timed  # not sooner: the chosen ones among them are loaded
        total.add(replace(chosen.account, in_process=0))
        underway.served.plan = plan
        return own


def release_cached(device: torch.device, pooled: bool) -> None:
    """Give freed blocks back to the device: source tensors are smaller than what they are packed into, so the
    next layer cannot use them. pooled: the allocator is one that sleeps, whose pools the engine trims."""
    if device.type == "cuda" and not pooled:
        torch.cuda.empty_cache()
