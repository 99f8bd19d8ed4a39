"""Carries the plans of a model out: programs come while weights load, and are ready with the last layer."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .kernels.compiled import build
from .kernels.compiled.build import Account, Build, ProgramSet
from .kernels.compiled.cache import ProgramCache
from .planning import Plan, Step


class Served:
    """A plan and, once it is carried out, its programs. Shared by all layers whose plans are equal."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._lasts = [step.last for step in plan.steps]
        self._functions: list[tuple[Callable, ...]] = []
        self._programs: ProgramSet | None = None  # keeps them loaded

    @property
    def ready(self) -> bool:
        return self._programs is not None

    def load(self, programs: ProgramSet) -> None:
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
    try_out: Callable[[], None] | None = None


@dataclass
class Startup:
    """Of one model, with the draft in its checkpoint.

    `declare` for every layer, `try_with` when a layer has its weights, `finish` after the last one.
    """

    served: dict[Plan, Served] = field(default_factory=dict)
    _underway: dict[Plan, _Underway] = field(default_factory=dict)
    _reclaimed: int = 0

    def declare(self, plan: Plan, cache: ProgramCache) -> Served:
        """The plan's programs begin to come, in the background. Equal plans get one object."""
        if plan not in self.served:
            if not self._underway:
                self._reclaimed += build.reclaim()  # nothing is captured while a model is built
            self.served[plan] = Served(plan)
            wanted = Build(plan.programs(), cache, owner=plan.name)
            wanted.start()
            self._underway[plan] = _Underway(self.served[plan], wanted)
        return self.served[plan]

    def try_with(self, plan: Plan, call: Callable[[], None]) -> None:
        """`call` runs each program of the plan once on a layer. Device code is loaded by a first call, which
        must be neither one that a graph captures nor one after free memory was measured."""
        if (underway := self._underway.get(plan)) is not None:
            underway.try_out = call

    def finish(self) -> Account | None:
        """Waits for the programs and tries them. None where nothing new was declared.

        Raises CompileError naming a program that does not compile.
        """
        if not self._underway:
            return None
        total = Account(reclaimed=self._reclaimed)
        for underway in self._underway.values():
            underway.served.load(underway.build.finish())
            total.add(underway.build.account)
            if underway.try_out is not None:
                underway.try_out()
        self._underway.clear()
        self._reclaimed = 0
        return total


def release_cached(device: torch.device, pooled: bool) -> None:
    """Give freed blocks back to the device: source tensors are smaller than what they are packed into, so the
    next layer cannot use them. pooled: the allocator is one that sleeps, whose pools the engine trims."""
    if device.type == "cuda" and not pooled:
        torch.cuda.empty_cache()
