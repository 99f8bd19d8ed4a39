"""Names of expert tensors, for any model: `<module>.<expert>.<projection>.<part>`.

    model.layers.3.mlp.experts.17.up_proj.weight_scale.nvfp4_csf_fixed
    \\______ module _________/ |  \\proj./ \\_________ part __________/

The module is whatever path ends in a component named `experts`. Projections are gate/up/down_proj or
w1/w3/w2, or gate over up in one tensor (gate_up_proj, w13). Without an expert id the tensor holds all
experts along its first dimension, and its parts may hang on with `_` or (the weight) nothing at all.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from .codec import MXFP4, NVFP4, CodecSpec

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"

WEIGHT, SCALE, GLOBAL_SCALE, INPUT_SCALE = "weight", "scale", "global_scale", "input_scale"
SCALE_FIXED, SCALE_EXCEPTIONS = "scale_fixed", "scale_exceptions"
OTHER = "other"

_PROJECTIONS = {
    "gate_proj": GATE,
    "up_proj": UP,
    "down_proj": DOWN,
    "gate_up_proj": GATE_UP,
    "w1": GATE,
    "w3": UP,
    "w2": DOWN,
    "w13": GATE_UP,
}

# ModelOpt's scales are multipliers; compressed-tensors' `_global_scale` are divisors.
_PARTS = {
    "": WEIGHT,
    "weight": WEIGHT,
    "weight_packed": WEIGHT,
    "weight_scale": SCALE,
    "scale": SCALE,
    "weight_scale_2": GLOBAL_SCALE,
    "weight_global_scale": GLOBAL_SCALE,
    "input_scale": INPUT_SCALE,
    "input_global_scale": INPUT_SCALE,
}
_DIVISORS = ("weight_global_scale", "input_global_scale")
_STREAMS = {
    suffix: (part, spec)
    for spec in (NVFP4, MXFP4)
    for suffix, part in ((spec.fixed_suffix, SCALE_FIXED), (spec.exceptions_suffix, SCALE_EXCEPTIONS))
}

_NAME = re.compile(
    r"(?P<module>(?:.+\.)?experts)\.(?:(?P<expert>[0-9]{1,9})\.)?"
    # The longer names first: gate_up_proj_weight_scale must not end at gate_up_proj's prefix.
    rf"(?P<projection>{'|'.join(sorted(_PROJECTIONS, key=len, reverse=True))})(?:[._](?P<part>.*))?"
)


class ExpertName(NamedTuple):
    """What the name of an expert tensor says.

    expert: its id, or None where the tensor holds all experts of the module.
    projection: gate, up, down or gate_up. part: one of this module's part constants; `other` is a
    tensor that belongs to the projection but is none of those. divisor: the value divides.
    codec: of a stream, else None.
    """

    module: str
    expert: int | None
    projection: str
    part: str
    divisor: bool = False
    codec: CodecSpec | None = None


def parse(name: str) -> ExpertName | None:
    """What a tensor's name says, or None if it is no projection of a routed expert."""
    if "experts." not in name:
        return None
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    expert = match["expert"]
    tail = match["part"] or ""
    part, divisor, codec = _part(tail)
    return ExpertName(
        module=match["module"],
        expert=int(expert) if expert is not None else None,
        projection=_PROJECTIONS[match["projection"]],
        part=part,
        divisor=divisor,
        codec=codec,
    )


def is_stream(name: str) -> bool:
    """Whether a tensor is one of the streams of any plane, expert or not."""
    return name.endswith(tuple(_STREAMS))


def scale_of_stream(name: str) -> str:
    """The name of the scale tensor that a stream stands for."""
    for suffix in _STREAMS:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


@lru_cache(maxsize=256)  # a handful of parts, hundreds of thousands of tensors
def _part(tail: str) -> tuple[str, bool, CodecSpec | None]:
    for suffix, (part, spec) in _STREAMS.items():
        if tail.endswith(suffix):
            scale = _PARTS.get(tail.removesuffix(suffix))
            return (part if scale == SCALE else OTHER), False, spec
    return _PARTS.get(tail, OTHER), tail in _DIVISORS, None
