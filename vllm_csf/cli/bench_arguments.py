"""What the commands of ``vllm-csf bench`` share: their arms, what these are served with, comma lists."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.geometries import SERVED_ARMS
from .arguments import above_zero, positive

if TYPE_CHECKING:
    from ..bench.subjects import Subject


def numbers(text: str) -> list[int]:
    """1,2,4."""
    return [positive(part) for part in text.split(",")]


def one_of(names: tuple[str, ...]) -> type:
    """A comma list of some of the names, each once. A type, so that argparse shows what is wrong."""

    class Names(list):
        def __init__(self, text: str) -> None:
            super().__init__(text.split(","))
            if wrong := [name for name in self if name not in names]:
                raise argparse.ArgumentTypeError(f"has {wrong[0]!r}, expected some of {', '.join(names)}")
            if twice := [name for name in self if self.count(name) > 1]:
                raise argparse.ArgumentTypeError(f"has {twice[0]!r} more than once")

    return Names


def arms(parser: argparse.ArgumentParser, default: tuple[str, ...] = SERVED_ARMS) -> None:
    parser.add_argument("checkpoint", help="folder, or Hugging Face repository")
    parser.add_argument(
        "--arms",
        type=one_of(SERVED_ARMS),
        default=list(default),
        metavar=",".join(SERVED_ARMS),
        help="vLLM without the plugin, with native and with compressed scales "
        f"(default: {'all' if default == SERVED_ARMS else ','.join(default)})",
    )
    parser.add_argument("--stock", metavar="CHECKPOINT", help="what stock vLLM serves (default: the same)")
    parser.add_argument(
        "--made-up-weights",
        action="store_true",
        help="of a configuration that `make-example --no-weights` made: random, the same in all arms",
    )
    parser.add_argument("--out", type=Path, help="record (JSON), kept while it grows")
    parser.add_argument("--commit", help="for the record, where no git tells")


def more_flags(parser: argparse.ArgumentParser, of: str) -> None:
    for names, which in (("server", "all arms"), ("plugin", "native and csf"), ("stock", "stock")):
        parser.add_argument(
            f"--{names}-args", type=shlex.split, default=[], metavar="FLAGS", help=f"for {of}, {which}"
        )


def subjects_of(arguments: argparse.Namespace) -> tuple[list[Subject], dict[str, str]]:
    from ..bench import subjects
    from ..bench.server import has_cuda

    flags = subjects.Flags(
        arguments.server_args, arguments.plugin_args, arguments.stock_args, arguments.made_up_weights
    )
    cpu = not has_cuda()
    return subjects.subjects(arguments.arms, arguments.checkpoint, arguments.stock, flags, cpu)


def speculative_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculative-tokens", type=positive, default=3, metavar="N", help="drafted at a time (default: 3)"
    )


def start_seconds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-seconds",
        type=above_zero,
        default=900.0,
        metavar="S",
        help="a start that takes longer has failed (default: 900)",
    )


def check_speculation(arguments: argparse.Namespace, config: dict[str, Any]) -> None:
    from ..bench import records, subjects

    if arguments.speculation in ("mtp", "both") and not subjects.has_mtp(config):
        raise records.BenchError(
            f"--speculation is {arguments.speculation}, which needs an MTP layer, and {arguments.checkpoint} "
            "has none"
        )
