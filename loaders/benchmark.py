"""Speed of the codecs on one core: `python -m vllm_csf.loaders.benchmark`, in MB of scale bytes a second."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from .codec import MXFP4, NVFP4, CodecSpec, Plane, decode, encode_batch

# rows, columns of one plane; experts
SHAPES = ((768, 128, 64), (2048, 48, 64), (1408, 256, 24), (4096, 88, 24), (4096, 4096, 1))


def heavy_tailed(planes: int, rows: int, cols: int, spec: CodecSpec, spread: float) -> torch.Tensor:
    """Scale bytes uint8 [planes, rows, cols] around a centre of each row; `spread` in byte steps."""
    generator = torch.Generator().manual_seed(planes + rows + cols)
    centre = torch.randint(48, 64, (planes, rows, 1), generator=generator)
    noise = torch.randn(planes, rows, cols, generator=generator)
    tail = 1 + (torch.rand(planes, rows, cols, generator=generator) < 0.01) * 3
    unit = spread if spec is NVFP4 else spread / 12
    return (centre + (noise * unit * tail)).round().clamp(0, 126).to(torch.uint8)


def measure(work: Callable[[], object], megabytes: float, seconds: float) -> float:
    """MB/s of the fastest call within `seconds`."""
    best, stop = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return megabytes / best


def run(spec: CodecSpec, rows: int, cols: int, planes: int, spread: float, seconds: float) -> dict:
    """One record: the shape, the exceptions' share and both speeds."""
    scale = heavy_tailed(planes, rows, cols, spec, spread)
    encoded: list[Plane] = encode_batch(scale, spec)
    megabytes = scale.numel() / 1e6
    return {
        "codec": spec.name,
        "planes": planes,
        "rows": rows,
        "cols": cols,
        "exception_share": sum(p.exceptions.numel() for p in encoded) / scale.numel(),
        "encode_mb_per_s": measure(lambda: encode_batch(scale, spec), megabytes, seconds),
        "decode_mb_per_s": measure(lambda: [decode(p) for p in encoded], megabytes, seconds),
    }


def main() -> None:
    """Print a table, or JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON record a line")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.json:
        print("planes      shape   exceptions   encode   decode  MB/s  codec")
    for spec in (NVFP4, MXFP4):
        for rows, cols, planes in SHAPES:
            for spread in (2.5, 20.0):
                r = run(spec, rows, cols, planes, spread, arguments.seconds)
                if arguments.json:
                    print(json.dumps(r))
                    continue
                shape, share = f"{rows}x{cols}", f"{r['exception_share']:.2%}"
                speeds = f"{r['encode_mb_per_s']:8.0f} {r['decode_mb_per_s']:8.0f}"
                print(f"{planes:6d} {shape:>10} {share:>12} {speeds}        {spec.name}")


if __name__ == "__main__":
    main()
