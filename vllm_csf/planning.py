"""What a start decides before anything is compiled or allocated: a plan for each geometry of expert layers.

A plan is plain frozen data. It says which program serves which number of tokens, for both types of
routing ids, and what that takes of device memory. Layers that have equal plans share programs and scratch,
those of a draft model too. Once the programs are loaded the plan is all there is: a call that it does not
declare is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .kernels import layout
from .kernels.activation import Activation
from .kernels.compiled.build import UndeclaredProgramError
from .kernels.compiled.program import Program
from .kernels.moe import programs
from .kernels.moe.experts import pad_to_tile
from .kernels.moe.programs import Choice, Geometry

PLAN_VERSION = 1
ID_TYPES = ("int32", "int64")


@dataclass(frozen=True)
class Limits:
    """What the engine promises: no call has more than `tokens` tokens.

    capture_sizes: token counts that it captures graphs for; speculative_tokens: that a step verifies for
    each sequence besides its own. Both lie within `tokens` and are here to be seen.
    """

    tokens: int
    capture_sizes: tuple[int, ...] = ()
    speculative_tokens: int = 0


@dataclass(frozen=True)
class LayerFacts:
    """A rank's part of an expert layer. `width`: of an expert on this rank, before padding to a tile."""

    experts: int
    global_experts: int
    hidden: int
    width: int
    topk: int
    activation: Activation
    mapped: bool


@dataclass(frozen=True)
class Step:
    """`first` to `last` tokens, inclusive, served by `programs`, one for each of `ID_TYPES`."""

    first: int
    last: int
    choice: Choice
    programs: tuple[Program, ...]
    scratch_bytes: int


@dataclass(frozen=True)
class Plan:
    """`geometry`: its `wide_ids` stands for neither id type. `resident_bytes`: of a layer, without the
    exceptions among its scales, which only the weights tell. Calls with more tokens than the last step
    serves run in pieces of it."""

    version: int
    geometry: Geometry
    limits: Limits
    steps: tuple[Step, ...]
    resident_bytes: int

    @property
    def piece(self) -> int:
        return self.steps[-1].last

    @property
    def scratch_bytes(self) -> int:
        return max(step.scratch_bytes for step in self.steps)

    @property
    def preparation(self) -> tuple[Program, ...]:
        """The programs that bring a layer's weights into their resident form."""
        return programs.preparation(self.geometry.arch, self.geometry.native)

    def programs(self) -> Iterator[Program]:
        """Those that serve calls."""
        for step in self.steps:
            yield from step.programs

    @property
    def name(self) -> str:
        g = self.geometry
        return (
            f"plan {self.version} of {g.experts} experts of {g.global_experts}, H {g.hidden}, I {g.inner}, "
            f"top {g.topk}, up to {self.limits.tokens} tokens, on {g.arch}"
        )

    def step_for(self, tokens: int) -> Step:
        """Raises UndeclaredProgramError where the plan has none."""
        for step in self.steps:
            if step.first <= tokens <= step.last:
                return step
        raise UndeclaredProgramError(f"a program for {tokens} tokens is not declared by {self.name}")

    def check(self, tokens: int, topk: int, mapped: bool) -> None:
        """Raises UndeclaredProgramError for a call that no program of this plan was declared for."""
        g = self.geometry
        if tokens > self.limits.tokens or (topk, mapped) != (g.topk, g.mapped):
            raise UndeclaredProgramError(
                f"a program for {tokens} tokens, top {topk}, {'an' if mapped else 'no'} expert map is not "
                f"declared by {self.name}, {'an' if g.mapped else 'no'} expert map"
            )

    def __str__(self) -> str:
        lines = [f"{self.name}: scratch {self.scratch_bytes} bytes, a layer {self.resident_bytes} bytes"]
        for step in self.steps:
            sizes = [size for size in self.limits.capture_sizes if step.first <= size <= step.last]
            captured = f", captured at {', '.join(map(str, sizes))}" if sizes else ""
            for ids, program in zip(ID_TYPES, step.programs, strict=True):
                lines.append(f"  {step.first} to {step.last} tokens, {ids} ids: {program.name}{captured}")
        return "\n".join(lines)


def geometry_of(facts: LayerFacts, arch: str, multiprocessors: int) -> Geometry:
    return Geometry(
        experts=facts.experts,
        global_experts=facts.global_experts,
        hidden=facts.hidden,
        inner=pad_to_tile(facts.width),
        topk=facts.topk,
        activation=facts.activation,
        mapped=facts.mapped,
        wide_ids=False,
        arch=arch,
        multiprocessors=multiprocessors,
    )


def make_plan(geometry: Geometry, limits: Limits, choices: tuple[Choice, ...] | None = None) -> Plan:
    """Every program that a call within the limits can need; larger calls than the last one takes run in
    pieces, so that with those all are needed. choices: other ones than the table of `programs` has."""
    steps: list[Step] = []
    first = 1
    for choice in choices if choices is not None else programs.choices(geometry):
        if first > limits.tokens:
            break
        wanted = tuple(programs.declared(replace(geometry, wide_ids=w), choice) for w in (False, True))
        last = min(choice.tokens, limits.tokens)
        scratch = programs.workspace_bytes(geometry, choice, last)
        steps.append(Step(first, last, choice, wanted, scratch))
        first = last + 1
    return Plan(PLAN_VERSION, geometry, limits, tuple(steps), _resident_bytes(geometry))


def _resident_bytes(g: Geometry) -> int:
    """Of a layer in the form of `kernels.layout`, without `records` and `dense`."""
    total = 0
    for rows, k, gated in ((2 * g.inner, g.hidden, True), (g.hidden, g.inner, False)):
        shape = layout.Shape(g.experts, rows, k, gated, g.native)
        blocks = shape.experts * shape.row_blocks
        total += blocks * (shape.k_tiles * shape.tile_bytes + layout.TILE_ROWS + 8 * shape.slices)
        total += shape.experts * (16 + (8 if gated else 4))  # starts and global scales
    return total + 4 * flag_words(g.multiprocessors)


def flag_words(multiprocessors: int) -> int:
    """int32 words through which the warps of two launches of two CTAs a multiprocessor meet."""
    return 2 * 2 * multiprocessors * 8
