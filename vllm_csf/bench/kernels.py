"""Times one expert layer in three arms, in one run: compressed scales, native scales, vLLM's Marlin.

`vllm-csf bench kernels` runs this. The record, written anew after every point:

    {"machine": {...}, "commit": ..., "protocol": {...}, "skipped": {arm: reason}, "checks": [...],
     "failures": [...],
     "rows": [{"geometry", "E", "H", "I", "topk", "tokens", "routing", "arm",
               "us", "us_min", "us_max", "gb_s", "tflop_s"}]}

us: the median of the replays, and the extremes. gb_s: bytes of the experts that were hit, once, over the
median. tflop_s: 6 T topk H I operations over the median. checks: of every arm the relative error against
FP64, and of csf whether its output is native's, bit for bit.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import arms, layers, machine, records, timing
from .arms import Arm
from .geometries import ARMS, EXCEPTIONS, TOKENS, LayerGeometry
from .routing import route

FRESH_ROUTES = 32
FRESH_BYTES = 1 << 30  # of made-up inputs that lie ready on the device
CHECKED_TOKENS = (1, 8, 64, 1024)


@dataclass(frozen=True)
class Wanted:
    """What to measure. seconds: of replaying, for each geometry, token count and routing."""

    geometries: Sequence[LayerGeometry]
    tokens: Sequence[int] = TOKENS
    routings: Sequence[str] = ("uniform",)
    arms: Sequence[str] = ARMS
    exceptions: float = EXCEPTIONS
    seconds: float = 1.0
    commit: str = "unknown"


@dataclass
class Session:
    """One run: its record, where it is kept, whom it tells."""

    wanted: Wanted
    out: Path | None
    say: Callable[[str], None]
    record: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        w = self.wanted
        properties = torch.cuda.get_device_properties(0)
        about = machine.describe() | {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "copy_gb_s": round(machine.copy_rate(), 1),
        }
        reason = arms.missing_peer() if "marlin" in w.arms else "not asked for"
        self.record = {
            "machine": about,
            "commit": w.commit,
            "protocol": {
                "what": "whole layer, replayed as a graph with fresh routes and activations, arms in turn",
                "exceptions": w.exceptions,
                "seconds": w.seconds,
                "floor_us": round(timing.floor(), 2),
            },
            "skipped": {"marlin": reason} if reason else {},
            "checks": [],
            "failures": [],
            "rows": [],
        }
        if reason:
            self.say(f"no marlin arm: {reason}")

    def keep(self) -> None:
        if self.out is not None:
            records.write(self.record, self.out)

    def failed(self, error: Exception, **where: Any) -> None:
        """Notes what did not run; goes on unless the device itself is lost."""
        text = f"{type(error).__name__}: {error}".strip()
        self.record["failures"].append(where | {"error": text[:2000]})
        self.say(f"failed: {where}: {text}")
        self.keep()
        torch.cuda.synchronize()  # raises where an earlier kernel has broken the context


def run(wanted: Wanted, out: Path | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The record. Raises BenchError without a CUDA device, RuntimeError where it is lost on the way."""
    if not torch.cuda.is_available():
        raise records.BenchError("the kernels are measured on a CUDA device, and there is none")
    session = Session(wanted, out, say)
    session.begin()
    try:
        for geometry in wanted.geometries:
            _geometry(session, geometry)
            gc.collect()
            torch.cuda.empty_cache()
        session.record["machine"]["copy_gb_s_at_end"] = round(machine.copy_rate(), 1)
        session.record["machine"]["gpus_at_end"] = machine.gpus()
    finally:
        session.keep()
    return session.record


def _geometry(session: Session, geometry: LayerGeometry) -> None:
    began = time.perf_counter()
    try:
        held = _hold(session, geometry)
    except torch.OutOfMemoryError as error:
        session.failed(error, geometry=geometry.name)
        return
    session.say(f"{geometry.name}: {', '.join(held)} ready after {time.perf_counter() - began:.0f} s")
    for routing in session.wanted.routings:
        for tokens in session.wanted.tokens:
            try:
                session.record["rows"] += _point(session.wanted, geometry, held, routing, tokens)
            except (RuntimeError, ValueError, LookupError) as error:
                session.failed(error, geometry=geometry.name, routing=routing, tokens=tokens)
            session.keep()


def _hold(session: Session, geometry: LayerGeometry) -> dict[str, Arm]:
    """The layer in every arm that works, checked."""
    wanted, record = session.wanted, session.record
    names = [name for name in ("csf", "native") if name in wanted.arms]
    ours = arms.OurArms(geometry, names, max(wanted.tokens))
    stack = layers.random_stack(
        geometry.experts, geometry.hidden, geometry.width, wanted.exceptions, device="cuda"
    )
    stack = replace(stack, alpha13=stack.alpha13[:, :1].repeat(1, 2))  # Marlin has one for both
    found = ours.hold(stack)
    if "marlin" in wanted.arms and "marlin" not in record["skipped"]:
        try:
            found.append(arms.peer_arm(stack))
        except (RuntimeError, ValueError, AssertionError, AttributeError, TypeError) as error:
            session.failed(error, geometry=geometry.name, arm="marlin")
    held = {arm.name: arm for arm in found}
    for name in list(held):
        try:
            record["checks"].append(_check(geometry, stack, held, name, max(wanted.tokens)))
        except (RuntimeError, AssertionError, TypeError) as error:
            del held[name]
            session.failed(error, geometry=geometry.name, arm=name)
    return held


def _check(
    geometry: LayerGeometry, stack: layers.Stack, held: dict[str, Arm], name: str, most: int
) -> dict[str, Any]:
    """Error of a call of 8 tokens against FP64; of csf, equality with native for several token counts."""
    inputs = _inputs(geometry, "uniform", min(8, most), 1)[0]
    truth = layers.truth(stack, inputs.x, inputs.ids, inputs.weights)
    got = held[name].call(inputs.x, inputs.ids, inputs.weights).double()
    error = ((got - truth).norm() / truth.norm()).item()
    found: dict[str, Any] = {"geometry": geometry.name, "arm": name, "relative_error": float(f"{error:.3g}")}
    if name == "csf" and "native" in held:
        found["equals_native"] = all(
            torch.equal(held["csf"].call(i.x, i.ids, i.weights), held["native"].call(i.x, i.ids, i.weights))
            for tokens in CHECKED_TOKENS
            if tokens <= most
            for i in _inputs(geometry, "uniform", tokens, 2)
        )
    return found


def _inputs(geometry: LayerGeometry, routing: str, tokens: int, count: int) -> list[timing.Inputs]:
    """Fresh inputs, as many as `count` where they fit."""
    count = max(1, min(count, FRESH_BYTES // (2 * tokens * geometry.hidden)))
    g = torch.Generator(device="cuda").manual_seed(tokens)
    found = []
    for seed in range(count):
        x = torch.randn(tokens, geometry.hidden, generator=g, device="cuda", dtype=torch.bfloat16)
        ids, weights = route(routing, tokens, geometry.experts, geometry.topk, seed, "cuda")
        found.append(timing.Inputs(x, ids, weights))
    return found


def _point(
    wanted: Wanted, geometry: LayerGeometry, held: dict[str, Arm], routing: str, tokens: int
) -> list[dict[str, Any]]:
    fresh = _inputs(geometry, routing, tokens, FRESH_ROUTES)
    hit = statistics.mean(len(inputs.ids.unique()) for inputs in fresh)
    calls = {name: arm.call for name, arm in held.items()}
    times = timing.measure(calls, fresh, timing.Rounds(wanted.seconds))
    g = geometry
    rows = []
    for name, found in times.items():
        us = statistics.median(found)
        rows.append(
            {
                "geometry": g.name,
                "E": g.experts,
                "H": g.hidden,
                "I": g.width,
                "topk": g.topk,
                "tokens": tokens,
                "routing": routing,
                "arm": name,
                "us": round(us, 2),
                "us_min": round(min(found), 2),
                "us_max": round(max(found), 2),
                "gb_s": round(hit * g.weights * held[name].weight_bytes / us / 1e3, 1),
                "tflop_s": round(2 * tokens * g.topk * g.weights / us / 1e6, 2),
            }
        )
    return rows
