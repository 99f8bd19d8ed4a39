"""``vllm-csf bench starts``."""

from __future__ import annotations

import argparse

from .arguments import above_zero, positive
from .bench_arguments import (
    arms,
    check_speculation,
    more_flags,
    speculative_tokens,
    start_seconds,
    subjects_of,
)

HELP = "start servers with empty and with filled caches, and time that"


def configure(parser: argparse.ArgumentParser) -> None:
    arms(parser, ("stock", "csf"))
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each arm (default: 3)")
    parser.add_argument(
        "--at-once",
        type=positive,
        default=1,
        metavar="N",
        help="also start N servers together on empty caches, of arms with the plugin",
    )
    parser.add_argument("--duration", type=above_zero, metavar="SECONDS", help="start nothing later")
    parser.add_argument("--speculation", choices=("off", "mtp"), default="off", help="default: off")
    speculative_tokens(parser)
    more_flags(parser, "vllm serve")
    start_seconds(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..bench import machine, records, starting, subjects
    from ..bench.server import has_cuda

    check_speculation(arguments, subjects.read_config(arguments.checkpoint))
    records.claim(arguments.out)
    shared = any(flag.startswith("--gpu-memory-utilization") for flag in arguments.server_args)
    if arguments.at_once > 1 and has_cuda() and not shared:
        raise records.BenchError(
            f"--at-once {arguments.at_once} needs --gpu-memory-utilization among --server-args: "
            "the servers share the device"
        )
    found, skipped = subjects_of(arguments)
    wanted = starting.Wanted(
        checkpoint=arguments.checkpoint,
        subjects=found,
        rounds=arguments.rounds,
        at_once=arguments.at_once,
        speculation=arguments.speculation,
        speculative_tokens=arguments.speculative_tokens,
        duration=arguments.duration,
        start_seconds=arguments.start_seconds,
        commit=machine.commit(arguments.commit),
        skipped=skipped,
    )
    about = {"sha256": subjects.fingerprint(arguments.checkpoint)}
    record = starting.run(wanted, arguments.out, lambda text: print(text, flush=True), about)
    print(starting.text(record))
    return 1 if record["failures"] or starting.different_answers(record) else 0
