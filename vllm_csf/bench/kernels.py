"""Times one expert layer in three arms: compressed scales, native scales, vLLM's Marlin.

    python -m vllm_csf.bench.kernels --out docs/results/kernels-h200.json [--geometry NAME ...]

Whole operation, replayed as a CUDA graph, other random routing for every replay; the median of the
replays, in microseconds. Every arm's output is first compared with FP64 on a few tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.activation import SILU
from ..kernels.moe import experts as moe
from ..kernels.moe import programs
from . import layers

GEOMETRIES = {
    "GLM-Flash-TP4": (288, 4096, 512, 8),
    "Qwen3.8-TP2": (512, 2560, 320, 10),
    "Qwen3.8-TP1": (512, 2560, 640, 10),
    "Qwen3-235B-TP1": (128, 4096, 1536, 8),
    "Qwen3-30B-TP1": (128, 2048, 768, 8),
    "DSV3-TP8": (256, 7168, 256, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
EXCEPTIONS = 0.003
REPLAYS = 16
NATIVE_BYTES = 0.5 + 1 / 16  # a weight and its share of a scale

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Arm:
    name: str
    call: Call
    weight_bytes: float


def our_arm(name: str, stack: layers.Stack, topk: int) -> Arm:
    native = name == "native"
    prepared = stack.prepare(native)
    properties = torch.cuda.get_device_properties(0)
    geometry = programs.Geometry(
        prepared.experts,
        prepared.experts,
        prepared.hidden,
        prepared.inner,
        topk,
        SILU,
        mapped=False,
        wide_ids=False,
        arch=f"sm_{properties.major}{properties.minor}a",
        multiprocessors=properties.multi_processor_count,
        native=native,
    )
    options = programs.choices(geometry)
    flags = torch.zeros(32 * properties.multi_processor_count, dtype=torch.int32, device="cuda")
    buffer = torch.empty(0, dtype=torch.uint8, device="cuda")

    def take(size: int) -> torch.Tensor:
        nonlocal buffer
        if size > buffer.numel():
            buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        return buffer[:size]

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for start in range(0, x.shape[0], options[-1].tokens):
            part = slice(start, start + options[-1].tokens)
            choice = programs.choice_for(options, x[part].shape[0])
            workspace = moe.Workspace.within(
                take, x[part].shape[0], topk, prepared.hidden, prepared.inner, 8 * choice.ctas, choice.units
            )
            program = programs.program(geometry, choice)
            moe.run(
                program,
                prepared,
                workspace,
                flags,
                x[part],
                ids[part],
                weights[part],
                out[part],
                None,
                choice.ctas,
            )
        return out

    scales = prepared.w13.scale_bytes + prepared.w2.scale_bytes
    weights = stack.w13.numel() * 2 + stack.w2.numel() * 2
    return Arm(name, call, 0.5 + scales / weights)


def marlin_arm(stack: layers.Stack) -> Arm:
    from .peer import marlin

    return Arm("marlin", marlin(stack), NATIVE_BYTES)


def check(arm: Arm, stack: layers.Stack, topk: int) -> float:
    """Relative error of 8 tokens against FP64."""
    hidden, experts = stack.w2.shape[1], stack.w2.shape[0]
    g = torch.Generator(device="cuda").manual_seed(7)
    x = torch.randn(8, hidden, generator=g, device="cuda").bfloat16()
    ids, weights = layers.random_routing(8, experts, topk, 7, "cuda")
    truth = layers.truth(stack, x, ids, weights)
    return ((arm.call(x, ids, weights).double() - truth).norm() / truth.norm()).item()


def time_arm(arm: Arm, tokens: int, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    experts, hidden, width, topk = shape
    routings = [layers.random_routing(tokens, experts, topk, seed, "cuda") for seed in range(REPLAYS)]
    g = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g, device="cuda").bfloat16()
    ids, weights = (t.clone() for t in routings[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            arm.call(x, ids, weights)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            arm.call(x, ids, weights)
        times = []
        for fresh in (*routings[:4], *routings):
            ids.copy_(fresh[0])
            weights.copy_(fresh[1])
            torch.cuda._sleep(20000)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    times = times[4:]
    hit = statistics.mean(len(r[0].unique()) for r in routings)
    us = statistics.median(times)
    return {
        "arm": arm.name,
        "tokens": tokens,
        "us": round(us, 2),
        "us_min": round(min(times), 2),
        "us_max": round(max(times), 2),
        "gb_s": round(hit * 3 * hidden * width * arm.weight_bytes / us / 1e3, 1),
        "tflop_s": round(6 * tokens * topk * hidden * width / us / 1e6, 2),
        "experts_hit": round(hit, 1),
    }


def copy_rate() -> float:
    """GB/s of a device copy, read and written bytes counted."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * a.numel() / statistics.median(times) / 1e6


def machine() -> dict[str, Any]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver, max clock": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "copy_gb_s": round(copy_rate(), 1),
        **{name: version(name) for name in ("torch", "vllm", "nvidia-cutlass-dsl")},
    }


def run(names: list[str], tokens: list[int], with_peer: bool) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        experts, hidden, width, topk = shape = GEOMETRIES[name]
        stack = layers.random_stack(experts, hidden, width, EXCEPTIONS, device="cuda")
        stack = replace(stack, alpha13=stack.alpha13[:, :1].repeat(1, 2))
        for kind in ("csf", "native", *(("marlin",) if with_peer else ())):
            arm = marlin_arm(stack) if kind == "marlin" else our_arm(kind, stack, topk)
            error = check(arm, stack, topk)
            for count in tokens:
                found = {"geometry": name, "E": experts, "H": hidden, "I": width, "topk": topk}
                rows.append(found | {"routing": "uniform"} | time_arm(arm, count, shape) | {"error": error})
            del arm
            torch.cuda.empty_cache()
        print(table([r for r in rows if r["geometry"] == name]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line a token count: the arms' times, and the ratios that matter."""
    head = ("csf us", "native us", "marlin us", "csf/native", "marlin/csf", "csf GB/s")
    lines = [f"{'geometry':<16}{'tokens':>7}" + "".join(f"{h:>12}" for h in head)]
    for tokens in sorted({r["tokens"] for r in rows}):
        arms = {r["arm"]: r for r in rows if r["tokens"] == tokens}
        csf, native, peer = (arms.get(a) for a in ("csf", "native", "marlin"))
        if csf is None:
            continue
        times = [arm["us"] if arm else float("nan") for arm in (csf, native, peer)]
        ratios = (times[0] / times[1], times[2] / times[0])
        cells = [f"{t:>12.1f}" for t in times] + [f"{r:>12.3f}" for r in ratios] + [f"{csf['gb_s']:>12.0f}"]
        lines.append(f"{csf['geometry']:<16}{tokens:>7}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--geometry", nargs="*", choices=list(GEOMETRIES), default=list(GEOMETRIES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--no-peer", action="store_true", help="without vLLM's Marlin")
    arguments = parser.parse_args()
    record = {"machine": machine(), "commit": arguments.commit}
    record["rows"] = run(arguments.geometry, arguments.tokens, not arguments.no_peer)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
