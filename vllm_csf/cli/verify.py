"""``vllm-csf verify CHECKPOINT``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from .progress import bar, size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder of compressed experts")
    parser.add_argument("--source", type=Path, help="the checkpoint it was made from, to compare with")
    parser.add_argument(
        "--planes-only", action="store_true", help="do not check the bytes of everything but the scales"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from ..loaders.verify import verify

    with bar(0, "plane", "verify", arguments.quiet or arguments.json) as progress:
        report = verify(arguments.checkpoint, arguments.source, progress, arguments.planes_only)
    if arguments.json:
        print(json.dumps({"ok": report.ok} | asdict(report), indent=1))
    else:
        for finding in report.findings:
            print(f"FOUND  {finding}")
        share = 100 * report.exceptions / max(1, report.native_bytes)
        print(
            f"{report.planes} planes, {size(report.native_bytes)} native, {size(report.compressed_bytes)} "
            f"compressed, {share:.2f} % exceptions, {report.compared} parts compared, "
            f"{report.reproduced} files of the source reproduced: " + _verdict(len(report.findings))
        )
    return 0 if report.ok else 1


def _verdict(findings: int) -> str:
    return "sound" if not findings else "1 finding" if findings == 1 else f"{findings} findings"
