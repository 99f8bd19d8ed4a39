"""``vllm-csf bench starts``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .arguments import above_zero, positive
from .bench_arguments import (
    arms,
    check_speculation,
    more_flags,
    speculative_tokens,
    start_seconds,
    subjects_of,
)

if TYPE_CHECKING:
    from ..bench.subjects import Subject

HELP = "start servers with empty and with filled caches, and time that"
# In JSON, and in the form --additional-config.csf_cache_dir; the other is vLLM's, in --compilation-config.
CACHE_FOLDER = re.compile(r'"((?:csf_)?cache_dir)"\s*:|^--?[\w-]+\.((?:csf_)?cache_dir)(?:=|$)')


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
    parser.add_argument(
        "--duration",
        type=above_zero,
        metavar="SECONDS",
        help="begin no start later; one that began is finished",
    )
    parser.add_argument("--speculation", choices=("off", "mtp"), default="off", help="default: off")
    speculative_tokens(parser)
    more_flags(parser, "vllm serve")
    start_seconds(parser)


def _check_caches(found: Sequence[Subject]) -> None:
    """What is compiled would be kept there, and no start but the first would find its caches empty."""
    from ..bench.records import BenchError

    for subject in found:
        for flag in subject.flags:
            if key := CACHE_FOLDER.search(flag):
                raise BenchError(
                    f"{key[1] or key[2]} is given for {subject.name} ({flag}), expected none: "
                    "starts have caches of their own"
                )


def _check_share(found: Sequence[Subject], at_once: int) -> None:
    from ..bench.records import BenchError
    from ..bench.server import has_cuda
    from ..bench.subjects import given

    together = [subject for subject in found if subject.name != "stock"]
    if at_once == 1 or not has_cuda() or all(given(s.flags, "--gpu-memory-utilization") for s in together):
        return
    raise BenchError(
        f"--at-once {at_once} needs --gpu-memory-utilization among --server-args or --plugin-args: "
        "the servers share the device"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..bench import machine, records, starting, subjects

    check_speculation(arguments, subjects.read_config(arguments.checkpoint))
    found, skipped = subjects_of(arguments)
    _check_caches(found)
    _check_share(found, arguments.at_once)
    records.claim(arguments.out)
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
    record: dict[str, Any] = {}
    try:
        starting.run(wanted, record, arguments.out, lambda text: print(text, flush=True), about)
    finally:
        if record:
            print(starting.text(record))
    bad = record["failures"] or not record["starts"] or starting.different_answers(record)
    return 1 if bad else 0
