"""Which program serves which number of tokens."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .. import layout
from ..activation import Activation
from ..compiled.build import Build, ProgramSet
from ..compiled.cache import ProgramCache
from ..compiled.program import Kind, Program
from ..packer import STEPS
from .experts import Workspace

OWN_PAIRS = 640  # up to so many pairs, CTAs route for themselves
TEAM_PAIRS = 20
# Warps that run at once on an H200. Teams are sized for these, so that programs do not depend on the device.
TEAM_WARPS = 132 * 16
LANES = 32  # where so many pairs are the most, a warp of each CTA routes alone
# A call with more tokens runs in pieces, so that its workspace stays bounded.
CHUNK_TOKENS = 1024
WIDE_CHUNK_TOKENS = 8192
THREADS_CAPACITY = 1024

_HERE = __name__.rpartition(".")[0]
_ABOVE = _HERE.rpartition(".")[0]
# The kinds of programs, by name. The module of a kind K that serves choices has `k_config(geometry, choice)`.
KINDS = {
    "decode": Kind("decode", f"{_HERE}.decode", "DecodeConfig", "compile_decode"),
    "prefill": Kind("prefill", f"{_HERE}.prefill", "PrefillConfig", "compile_prefill"),
    "pack": Kind("pack", f"{_ABOVE}.pack_kernels", "PackConfig", "compile_pack"),
}
Take = Callable[[int], torch.Tensor]  # a uint8 buffer of so many bytes


@dataclass(frozen=True)
class Geometry:
    """A layer as the programs see it. `inner`: the padded width of an expert on this rank.

    `experts`: on this rank; `global_experts`: in ids; `multiprocessors`: of the device.
    """

    experts: int
    global_experts: int
    hidden: int
    inner: int
    topk: int
    activation: Activation
    mapped: bool
    wide_ids: bool
    arch: str
    multiprocessors: int
    native: bool = False

    @property
    def capacity(self) -> int:
        return -(-self.experts // THREADS_CAPACITY) * THREADS_CAPACITY


@dataclass(frozen=True)
class DecodeChoice:
    """One program: up to `tokens` tokens a call, launched on `ctas` CTAs; see `DecodeConfig` for the rest."""

    kind: ClassVar[str] = "decode"

    tokens: int
    ctas: int
    n_tiles: int
    blocks: int
    chunk_tiles: int
    stages: int
    min_ctas: int
    split_up: int
    split_down: int
    own_pairs: int
    warps: int = 8

    @property
    def units(self) -> int:
        return 2 * self.blocks * self.n_tiles

    def workspace(self, take: Take, g: Geometry, tokens: int) -> Workspace:
        return Workspace.within(take, tokens, g.topk, g.hidden, g.inner, self.warps * self.ctas, self.units)


@dataclass(frozen=True)
class PrefillChoice:
    """As `DecodeChoice`, of a tensor-core program; see `PrefillConfig`, whose `tokens` is `tile` here."""

    kind: ClassVar[str] = "prefill"

    tokens: int
    ctas: int
    tile: int
    stages: int
    per_sm: int
    fragments: int = 2

    def workspace(self, take: Take, g: Geometry, tokens: int) -> Workspace:
        return Workspace.wide(take, tokens, g.topk, g.hidden, g.inner, g.experts)


Choice = DecodeChoice | PrefillChoice


def team_split(items: int, columns: int) -> int:
    """Warps (1, 2, 4 or 8) of a team that shares an item's K: as many as find work at once, but at least four
    tiles for each, and no more items one after the other than whole slices would give."""
    tiles = -(-columns // layout.TILE_K)
    for split in (8, 4, 2):
        whole = tiles // split >= layout.SLICE_TILES
        if tiles // split >= 4 and (items * split <= TEAM_WARPS or whole):
            return split
    return 1


def choices(g: Geometry) -> tuple[Choice, ...]:
    """The programs of a geometry, by token count; the last one takes every larger call in pieces.

    Measured on an H200 (docs/results/notes.md).
    """
    if number(g.arch) == 90:
        return _rising([*decode_choices(g), *prefill_choices(g)], WIDE_CHUNK_TOKENS)
    return _rising(decode_choices(g), CHUNK_TOKENS)


def _rising(found: list[Choice], most: int) -> tuple[Choice, ...]:
    """Those that take more tokens than the ones before them, up to `most` and the first that takes it."""
    kept: list[Choice] = []
    for found_choice in found:
        choice = replace(found_choice, tokens=min(found_choice.tokens, most))
        if kept and choice.tokens <= kept[-1].tokens:
            continue
        if kept and choice == replace(kept[-1], tokens=choice.tokens):
            kept.pop()
        kept.append(choice)
    return tuple(kept)


def _until(g: Geometry, tokens_per_expert: float) -> int:
    """Tokens of a call that give an expert so many on average."""
    return max(1, int(tokens_per_expert * g.global_experts / g.topk))


def decode_choices(g: Geometry) -> list[Choice]:
    """Teams win for a few tokens, work tiles of 8 tokens while experts have fewer than about 4.5 on average,
    of 16 up to about 16, of 32 beyond; on Hopper prefill programs take over at 12."""
    deep = shared_memory(g.arch) > 200
    # Two CTAs of 8 warps share an SM, or one of 16 where there is room: one of two runs ahead of the other.
    shape = {"ctas": g.multiprocessors, "min_ctas": 1, "warps": 16}
    if not deep:
        shape = {"ctas": 2 * g.multiprocessors, "min_ctas": 2, "warps": 8}

    def run(tokens: int, n_tiles: int, own: bool, **other: int) -> Choice:
        fields = {"blocks": 2, "chunk_tiles": 2, "stages": 2, **shape, **other}
        return DecodeChoice(
            tokens, n_tiles=n_tiles, split_up=1, split_down=1, own_pairs=OWN_PAIRS if own else 0, **fields
        )

    own, narrow = OWN_PAIRS // g.topk, _until(g, 4.5)
    few = max(1, TEAM_PAIRS // g.topk)
    found: list[Choice] = [_team(g, tokens, shape) for tokens in range(1, few + 1)]
    found.append(run(min(own, narrow), 1, True))
    if narrow > own:
        found.append(run(narrow, 1, False))
    medium = _until(g, 12 if number(g.arch) == 90 else 16)
    found += [run(min(own, medium), 2, True), run(medium, 2, False)]
    if number(g.arch) == 90:
        return found
    last = {"ctas": g.multiprocessors, "min_ctas": 0, "warps": 8, "stages": 4 if deep else 2}
    found.append(run(CHUNK_TOKENS, 4, False, **last))
    return found


def _team(g: Geometry, tokens: int, shape: dict[str, int]) -> Choice:
    pairs = tokens * g.topk
    up, down = 2 * g.inner // layout.TILE_ROWS, g.hidden // layout.TILE_ROWS
    return DecodeChoice(
        tokens,
        n_tiles=1,
        blocks=1,
        chunk_tiles=4,
        stages=2,
        split_up=team_split(pairs * up, g.hidden),
        split_down=team_split(pairs * down, g.inner),
        own_pairs=LANES if pairs <= LANES else OWN_PAIRS,
        **shape,
    )


def prefill_choices(g: Geometry) -> list[Choice]:
    """Work tiles of 32 tokens with two CTAs a multiprocessor while experts have up to 28 tokens on average,
    of 64 up to 56, of 128 beyond; between 136 and 176, where two tiles of 128 would be half empty, of 192."""
    sms = g.multiprocessors
    wide = PrefillChoice(WIDE_CHUNK_TOKENS, sms, tile=128, stages=4, per_sm=1)
    return [
        PrefillChoice(_until(g, 28), 2 * sms, tile=32, stages=3, per_sm=2),
        PrefillChoice(_until(g, 56), sms, tile=64, stages=5, per_sm=1),
        replace(wide, tokens=_until(g, 136)),
        PrefillChoice(_until(g, 176), sms, tile=192, stages=3, per_sm=1, fragments=1),
        wide,
    ]


def number(arch: str) -> int:
    """90 of sm_90a."""
    return int("".join(c for c in arch if c.isdigit()))


def shared_memory(arch: str) -> int:
    """KiB that one CTA can use."""
    return {80: 163, 86: 99, 89: 99, 120: 99, 121: 99}.get(number(arch), 227)


def choice_for(options: tuple[Choice, ...], tokens: int) -> Choice:
    """The program that serves a call of `tokens` tokens (in pieces of the last one's size where larger)."""
    for choice in options:
        if tokens <= choice.tokens:
            return choice
    return options[-1]


def declared(g: Geometry, choice: Choice) -> Program:
    """The program of a choice. Needs no GPU, and compiles nothing."""
    kind = KINDS[choice.kind]
    config = getattr(importlib.import_module(kind.module), f"{kind.name}_config")(g, choice)
    return Program(kind, config, g.arch)


def preparation(arch: str, native: bool) -> tuple[Program, ...]:
    """The programs that pack a layer, one for each of `packer.STEPS`, whatever its geometry."""
    kind = KINDS["pack"]
    return tuple(Program(kind, kind.config_class()(step, native), arch) for step in STEPS)


def workspace(take: Take, g: Geometry, choice: Choice, tokens: int) -> Workspace:
    """Scratch for one call of a choice's program, out of `take(bytes)`; see `Workspace.within`."""
    return choice.workspace(take, g, tokens)


def workspace_bytes(g: Geometry, choice: Choice, tokens: int) -> int:
    """What `workspace` takes."""
    taken: list[int] = []

    def take(size: int) -> torch.Tensor:
        taken.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    workspace(take, g, choice, tokens)
    return sum(taken)


_kept = ProgramSet({}, "programs asked for one at a time")


@functools.cache
def _cache() -> ProgramCache:
    return ProgramCache()


def program(g: Geometry, choice: Choice) -> Callable:
    """The host function of a choice, for measurements and tests: compiled or taken from the user's cache when
    first asked for, and kept for the process. Serving declares its programs at start instead."""
    wanted = declared(g, choice)
    if wanted not in _kept.programs:
        _kept.add({wanted: Build([wanted], _cache()).finish()[wanted]})
    return _kept[wanted]
