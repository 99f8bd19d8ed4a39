"""Times the standalone decoder on cold caches: ``python -m vllm_csf.bench.decoder [OUT.json]``.

Of each layer, order and number of routed experts, 15 rounds of 16 launches. Before each launch more than
the L2 cache is written and fresh routes are copied in; the time is that between two events around the
launch. target_us: 1.15 x (bytes read + written) / copy rate + 2.5. Two more rows of each point tell what
the protocol itself costs: `empty`, a launch without a routed expert, and `copy`, torch's copy of as many
bytes, as cold. Needs torch, CUDA and the CuTe DSL, no vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..cute import device_facts
from ..kernels import layout
from ..kernels.compiled.build import Build
from ..kernels.compiled.cache import ProgramCache
from ..kernels.layout import PreparedMatrix
from ..kernels.moe.experts import prepare_matrix
from ..kernels.scales import decoder
from ..kernels.scales.decoder import DecoderConfig
from ..kernels.scales.planes import ORDERS
from .machine import copy_rate

LAYERS = ((512, 2560, 320), (288, 4096, 512))
ROUTED = (10, 40, 63)
ROUNDS, SAMPLES = 15, 16
FLUSH_BYTES = 256 << 20
EXCEPTIONS = 0.003
GROUP = 32  # experts packed at a time


@dataclass(frozen=True)
class Layer:
    config: DecoderConfig
    w13: PreparedMatrix
    w2: PreparedMatrix

    @property
    def experts(self) -> int:
        return self.w13.shape.experts

    def bytes_of(self, routed: int) -> int:
        """Read (the experts' share of all resident scale bytes) and written."""
        read = (self.w13.scale_bytes + self.w2.scale_bytes) / self.experts
        return round(routed * (read + sum(plane.nbytes for plane in self.config.planes)))


def random_scales(experts: int, rows: int, columns: int, share: float, seed: int) -> torch.Tensor:
    """uint8 [E, R, C] on the GPU; `share` of the bytes are any."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    size = (experts, rows, columns)
    usual = torch.randint(44, 58, size, generator=g, device="cuda", dtype=torch.uint8)
    wild = torch.randint(0, 256, size, generator=g, device="cuda", dtype=torch.uint8)
    return torch.where(torch.rand(size, generator=g, device="cuda") < share, wild, usual)


def prepare(scales: torch.Tensor, gated: bool) -> PreparedMatrix:
    """Packs a stack beside weights of zeros, group after group of experts."""
    parts = []
    for group in scales.split(GROUP):
        weight = torch.zeros(*group.shape[:2], group.shape[2] * 8, dtype=torch.uint8, device=scales.device)
        parts.append(prepare_matrix(weight, group, gated))
    return layout.concatenate(parts)


def random_layer(experts: int, config: DecoderConfig, share: float = EXCEPTIONS) -> Layer:
    up, down = (plane.columns for plane in config.planes)
    w13 = prepare(random_scales(experts, 2 * config.width, up, share, 1), gated=True)
    return Layer(config, w13, prepare(random_scales(experts, config.hidden, down, share, 2), gated=False))


def cold(call: Callable[[], object], before: Callable[[int], object]) -> list[float]:
    """Microseconds of 15 x 16 calls, the median of each round."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    medians = []
    for round_ in range(ROUNDS + 1):
        events = []
        for sample in range(SAMPLES):
            flush.fill_(sample)  # long enough that the host is ahead of what follows
            before(round_ * SAMPLES + sample)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        medians.append(statistics.median(a.elapsed_time(b) * 1e3 for a, b in events))
    return medians[1:]


def point(layer: Layer, program: Callable, routed: int, ctas: int) -> dict[str, list[float]]:
    """Round medians of the decoder, of a launch without routes and of a copy of as many bytes."""
    generator = torch.Generator().manual_seed(routed)
    fresh = [torch.randperm(layer.experts, generator=generator)[:routed] for _ in range(SAMPLES)]
    table = torch.stack(fresh).int().cuda()
    routes, nothing = table[0].clone(), torch.full_like(table[0], -1)
    out13, out2 = (
        torch.empty(layer.experts, p.nbytes, dtype=torch.uint8, device="cuda") for p in layer.config.planes
    )

    def expand(ids: torch.Tensor) -> None:
        decoder.run(program, layer.config, layer.w13, layer.w2, ids, out13, out2, ctas)

    def copy_in(sample: int) -> None:
        routes.copy_(table[sample % SAMPLES])

    half = layer.bytes_of(routed) // 2
    source, target = (torch.ones(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    return {
        "csf": cold(lambda: expand(routes), copy_in),
        "empty": cold(lambda: expand(nothing), copy_in),
        "copy": cold(lambda: target.copy_(source), copy_in),
    }


def configurations(threads: list[int]) -> list[tuple[int, DecoderConfig]]:
    return [
        (experts, DecoderConfig(hidden, width, order, threads=t))
        for experts, hidden, width in LAYERS
        for order in ORDERS
        for t in threads
    ]


def measure(threads: list[int], say: Callable[[str], None] = print) -> dict[str, object]:
    arch, sms = device_facts(torch.device("cuda", torch.cuda.current_device()))
    wanted = configurations(threads)
    programs = Build([decoder.declared(config, arch) for _, config in wanted], ProgramCache()).finish()
    rate = copy_rate()
    rows = []
    kept: tuple[tuple[int, int, int], Layer] | None = None
    for experts, config in wanted:
        key = (experts, config.hidden, config.width)
        if kept is None or kept[0] != key:
            kept = (key, random_layer(experts, config))
        layer = replace(kept[1], config=config)
        for routed in ROUTED:
            times = point(layer, programs[decoder.declared(config, arch)], routed, sms)
            size = layer.bytes_of(routed)
            for arm, us in times.items():
                row = {"E": experts, "H": config.hidden, "I": config.width, "order": config.order}
                row |= {"routed": routed, "threads": config.threads, "arm": arm, "bytes": size}
                row |= {"us": round(statistics.median(us), 2), "us_min": round(min(us), 2)}
                row |= {"us_max": round(max(us), 2), "target_us": round(1.15 * size / rate / 1e3 + 2.5, 2)}
                rows.append(row)
                say(json.dumps(row))
    machine = {"gpu": torch.cuda.get_device_name(0), "copy_gb_s": round(rate, 1), "torch": torch.__version__}
    return {"machine": machine, "protocol": (__doc__ or "").split("\n\n")[1], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the standalone decoder of scale planes.")
    parser.add_argument("out", nargs="?", type=Path, help="JSON record")
    parser.add_argument("--threads", type=int, nargs="+", default=[DecoderConfig(64, 64).threads])
    arguments = parser.parse_args()
    record = measure(arguments.threads)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
