"""Times the preparation of layers at load: ``python -m vllm_csf.bench.preparation [OUT.json]``.

Of each layer, from tensors that lie on the device as they do when all of a layer's have come, to the resident
ones: by the packing programs from plain scales (`plain`) and from CSF streams (`csf`), and by torch from
plain scales (`torch`). The host's clock, the device waited for on both sides, after warm-up; the median of
the rounds. Needs torch, CUDA and the CuTe DSL, no vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..cute import CuteExecution, device_facts
from ..kernels.activation import SILU
from ..kernels.compiled.cache import ProgramCache
from ..kernels.reference import ExpertLayer, ScalePlanes
from ..kernels.scales import encoder
from ..planning import LayerFacts, Limits
from ..startup import Startup
from . import machine, records
from .geometries import EXCEPTIONS, NAMED, LayerGeometry
from .layers import random_stack

LAYERS = ("Qwen3-235B-TP1", "GLM-Flash-TP4", "DSV3-TP8")
ROUNDS, TORCH_ROUNDS = 9, 2


def layer_of(geometry: LayerGeometry, streams: bool) -> ExpertLayer:
    """Random weights on the GPU, as `Intake.finish` hands them over."""
    g = geometry
    stack = random_stack(g.experts, g.hidden, g.width, EXCEPTIONS, device="cuda")
    scales13 = planes_of(stack.scale13.view(2 * g.experts, g.width, g.hidden // 16), streams)
    scales2 = planes_of(stack.scale2, streams)
    return ExpertLayer(stack.w13, stack.w2, scales13, scales2, stack.alpha13, stack.alpha2, SILU)


def planes_of(scales: torch.Tensor, streams: bool) -> ScalePlanes:
    """Of uint8 [P, R, C], compressed or as they are."""
    planes, rows, cols = scales.shape
    if not streams:
        return ScalePlanes.of_bytes(scales.reshape(planes, -1), rows, cols)
    found = encoder.encode(scales)
    offsets = torch.nn.functional.pad(found.counts.cumsum(0), (1, 0))
    return ScalePlanes(found.fixed, offsets, found.exceptions, rows, cols, int(found.counts.max()))


def milliseconds(call: Callable[[], object], rounds: int) -> list[float]:
    """Of each round but the first."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        made = call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1e3)
        del made
    return found[1:]


def executions(geometry: LayerGeometry, startup: Startup) -> tuple[CuteExecution, CuteExecution]:
    """One that packs by programs, and one that has none."""
    by_programs = CuteExecution()
    facts = LayerFacts(
        geometry.experts, geometry.experts, geometry.hidden, geometry.width, geometry.topk, SILU, False
    )
    plan = by_programs.plan(facts, Limits(1), torch.device("cuda", torch.cuda.current_device()))
    served = startup.declare(plan, ProgramCache())
    served.packer()
    by_programs.serve_by(served)
    return by_programs, CuteExecution()


def measure(names: list[str], say: Callable[[str], None] = print) -> dict[str, object]:
    arch, _ = device_facts(torch.device("cuda", torch.cuda.current_device()))
    rate = machine.copy_rate()
    startup, rows = Startup(), []
    for name in names:
        geometry = NAMED[name]
        by_programs, by_torch = executions(geometry, startup)
        for arm, streams, execution in (
            ("plain", False, by_programs),
            ("csf", True, by_programs),
            ("torch", False, by_torch),
        ):
            layer = layer_of(geometry, streams)
            rounds = TORCH_ROUNDS if arm == "torch" else ROUNDS
            times = milliseconds(partial(execution.prepare, layer), rounds)
            size = layer_bytes(layer)
            row: dict[str, object] = {"geometry": name, "E": geometry.experts, "H": geometry.hidden}
            row |= {"I": geometry.width, "arm": arm, "ms": round(statistics.median(times), 3)}
            row |= {"ms_min": round(min(times), 3), "ms_max": round(max(times), 3), "bytes": size}
            row |= {"copy_ms": round(size / rate / 1e6, 3)}
            rows.append(row)
            say(json.dumps(row))
            del layer
            torch.cuda.empty_cache()
    facts = {"gpu": torch.cuda.get_device_name(0), "arch": arch, "copy_gb_s": round(rate, 1)}
    return {"machine": facts | machine.versions(), "protocol": (__doc__ or "").split("\n\n")[1], "rows": rows}


def layer_bytes(layer: ExpertLayer) -> int:
    """That a preparation has to read (weights, scales as they came) and to write (weights, codes)."""
    weights = layer.w13.nbytes + layer.w2.nbytes
    planes = (layer.scales13, layer.scales2)
    scales = sum(p.fixed.shape[0] * p.rows * p.cols for p in planes)
    return 2 * weights + sum(p.fixed.nbytes for p in planes) + scales // 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the preparation of expert layers at load.")
    parser.add_argument("out", nargs="?", type=Path, help="JSON record")
    parser.add_argument("--layers", nargs="+", choices=list(NAMED), default=list(LAYERS))
    arguments = parser.parse_args()
    records.claim(arguments.out, "OUT")
    record = measure(arguments.layers)
    if arguments.out:
        records.write(record, arguments.out)


if __name__ == "__main__":
    main()
