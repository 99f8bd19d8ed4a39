"""The ``vllm-csf`` command: one module a subcommand, loaded when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from .. import __version__
from .arguments import Parser

# Name, module and help. Arguments are declared by the module's `configure`, which imports nothing heavy.
COMMANDS = (
    ("inspect", "inspect", "what a checkpoint holds, and how small its scales get"),
    ("convert", "convert", "compress the block scales of an NVFP4 checkpoint"),
    ("verify", "verify", "decode and check every plane of a compressed checkpoint"),
    ("restore", "restore", "rebuild the source of a converted checkpoint, byte for byte"),
    ("precompile", "precompile", "compile the kernels for a checkpoint ahead of its first start"),
    ("bench", "bench", "measure kernels and serving beside stock vLLM; compare records"),
    ("make-example", "example", "make a small random checkpoint"),
)
FAILURE = 1


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="vllm-csf", description="NVFP4 experts with compressed block scales.")
    out.add_argument("--version", action="version", version=__version__, help="print it")
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, help_ in COMMANDS:
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        loaded = importlib.import_module(f".{module}", __name__)
        loaded.configure(command)
        command.set_defaults(run=loaded.run)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for findings and failures, 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names that the terminal's encoding does not have
            stream.reconfigure(errors="backslashreplace")
    given = parser().parse_args(arguments)
    from ..loaders.errors import CheckpointError, one_line

    try:
        return int(given.run(given) or 0)
    except CheckpointError as error:
        print(f"vllm-csf {given.command}: {error}", file=sys.stderr)
        return FAILURE
    except OSError as error:
        print(f"vllm-csf {given.command}: {one_line(error)}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt as stop:  # of its own accord it has no words
        print(": ".join([f"vllm-csf {given.command}: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
