"""``vllm-csf restore CHECKPOINT OUT``."""

from __future__ import annotations

import argparse
from pathlib import Path

from .progress import bar


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder that `convert` made")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from ..loaders import conversion
    from ..loaders.restore import restore

    total = sum(file.bytes for file in conversion.read_record(arguments.checkpoint).files)
    with bar(total, "B", "restore", arguments.quiet) as progress:
        count = restore(arguments.checkpoint, arguments.out, progress)
    print(f"{count} files restored, all with the SHA-256 of the source")
    return 0
