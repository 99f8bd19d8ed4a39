"""What tuning may choose instead of the table in `programs`: other forms of a program, and the program of the
neighbouring regime, at token counts around those where the table changes.

Every candidate computes the same layer. All prefill programs give the same bits; decode programs may add the
parts of K in another order, so that they differ in the last digits, from each other and from prefill.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import programs
from .programs import KINDS, Choice, DecodeChoice, Geometry

# Fields to change, one set at a time; `ctas` counts CTAs a multiprocessor here. Only what differs from the
# table's choice and fits into shared memory is tried.
TEAM: tuple[dict[str, int], ...] = (
    {"chunk_tiles": 2, "stages": 4},
    {"split_up": 4, "split_down": 2},
    {"split_up": 8, "split_down": 1},
)
RUN: tuple[dict[str, int], ...] = (
    {"chunk_tiles": 1, "stages": 4},
    {"blocks": 1, "chunk_tiles": 4},
    {"warps": 8, "ctas": 2, "min_ctas": 2},
    {"warps": 8, "ctas": 1, "min_ctas": 0, "stages": 4},  # twice the registers: nothing spills
)
STAGES = (-1, 1)  # of a prefill program's ring, beside the table's
# Instead of prefill's widest work tiles: the form that rebuilds a weight for more tokens.
ONE_FRAGMENT: tuple[dict[str, int], ...] = tuple(
    {"tile": tile, "stages": 3, "fragments": 1} for tile in (160, 192, 224)
)
WIDEST = 128  # work tiles of which that is tried

APART = 3  # token counts that are tried within a regime lie so many times apart


@dataclass(frozen=True)
class Trial:
    """Programs that can serve a call of `tokens` tokens, the table's own first; `tokens` is theirs too."""

    tokens: int
    choices: tuple[Choice, ...]


def trials(g: Geometry, most: int) -> tuple[Trial, ...]:
    """For calls of up to `most` tokens, by rising token count; the last count is the largest that one call of
    a program is given."""
    table = programs.choices(g)
    found: list[Trial] = []
    first = 1
    for index, choice in enumerate(table):
        if first > most:
            break
        near = [choice, *(table[i] for i in (index - 1, index + 1) if 0 <= i < len(table))]
        near += alternatives(g, choice)
        last = min(choice.tokens, most)
        for tokens in _counts(first, last):
            able = dict.fromkeys(replace(c, tokens=tokens) for c in near if tokens <= most_tokens(g, c))
            found.append(Trial(tokens, tuple(able)))
        first = last + 1
    return tuple(found)


def _counts(first: int, last: int) -> list[int]:
    """`last`, and below it down to `first`."""
    found = {1} if first == 1 else set()
    while last >= first:
        found.add(last)
        last //= APART
    return sorted(found)


def most_tokens(g: Geometry, choice: Choice) -> int:
    """Of a call that the program of a choice can take, whatever the table gives it."""
    if isinstance(choice, DecodeChoice) and choice.own_pairs:
        return choice.own_pairs // g.topk
    return programs.WIDE_CHUNK_TOKENS


def alternatives(g: Geometry, choice: Choice) -> Iterator[Choice]:
    """Other forms of the same program."""
    for changes in _changes(choice):
        fields: dict[str, Any] = dict(changes)
        if "ctas" in fields:
            fields["ctas"] *= g.multiprocessors
        other = replace(choice, **fields)
        if other != choice and fits(g, other):
            yield other


def _changes(choice: Choice) -> tuple[Mapping[str, int], ...]:
    if isinstance(choice, DecodeChoice):
        return TEAM if choice.split_up > 1 or choice.split_down > 1 else RUN
    rings = tuple({"stages": choice.stages + more} for more in STAGES if choice.stages + more > 1)
    return rings + (ONE_FRAGMENT if choice.tile == WIDEST and choice.fragments == 2 else ())


def fits(g: Geometry, choice: Choice) -> bool:
    """Whether the CTAs of a program that are to share a multiprocessor find the shared memory for it."""
    kind = KINDS[choice.kind]
    config = getattr(importlib.import_module(kind.module), f"{kind.name}_config")(g, choice)
    shared = choice.min_ctas if isinstance(choice, DecodeChoice) else choice.per_sm
    # What a multiprocessor has is 1 KiB more than one CTA can use, which is what each of them takes besides.
    room = (programs.shared_memory(g.arch) + 1) * 1024 // max(1, shared) - 1024
    try:
        return all(config.gemm(gated).shared_bytes <= room for gated in (True, False))
    except ValueError:  # the kernel's own opinion
        return False


def merged(winners: list[Choice]) -> tuple[Choice, ...]:
    """A table of the winners of trials, by rising token count: each serves what the one before does not."""
    kept: list[Choice] = []
    for winner in winners:
        if kept and replace(kept[-1], tokens=winner.tokens) == winner:
            kept.pop()
        kept.append(winner)
    return tuple(kept)
