"""``vllm-csf convert SOURCE OUT``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .. import __version__
from .arguments import positive
from .progress import bar, size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder of an NVFP4 checkpoint")
    parser.add_argument("out", type=Path, help="new folder, or that of an interrupted conversion")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="shards to work on at a time (default: 1)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from ..loaders import convert

    began = time.perf_counter()
    total = convert.source_bytes(arguments.source)
    with bar(total, "B", "convert", arguments.quiet) as progress:
        tool = f"vllm-csf {__version__}"
        result = convert.convert(arguments.source, arguments.out, tool, arguments.jobs, progress)
    seconds = time.perf_counter() - began
    print(
        f"{result.shards} shards, {size(result.source_bytes)} -> {size(result.target_bytes)}, "
        f"{result.converted} converted now in {seconds:.1f} s "
        f"({result.source_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s)"
    )
    return 0
