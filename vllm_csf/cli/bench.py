"""``vllm-csf bench``: kernels, serving, starts and quality, measured; tables and comparisons of records."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.geometries import ARMS, EXCEPTIONS, NAMED, ROUTINGS, TOKENS
from . import bench_starts
from .arguments import above_zero, at_least_one, not_negative, positive, seed, share
from .bench_arguments import (
    arms,
    check_speculation,
    more_flags,
    numbers,
    one_of,
    speculative_tokens,
    start_seconds,
    subjects_of,
)

if TYPE_CHECKING:
    from ..bench.geometries import LayerGeometry


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, help_, declare, run_ in (
        ("kernels", "time one expert layer: compressed, native, vLLM's own", _kernels, run_kernels),
        ("serve", "serve a checkpoint in three arms, drive the servers, compare them", _serve, run_serve),
        ("starts", bench_starts.HELP, bench_starts.configure, bench_starts.run),
        ("quality", "ask all arms the same and compare every log probability", _quality, run_quality),
        ("compare", "what changed from one record of serving to another", _compare, run_compare),
        ("table", "print a record of the kernels as Markdown, and draw it", _table, run_table),
    ):
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        declare(command)
        command.set_defaults(run_bench=run_)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.run_bench(arguments) or 0)


# ---- kernels ---------------------------------------------------------------------------------------


def _kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", help="measure its expert layers, not the named ones")
    parser.add_argument("--out", type=Path, help="record (JSON); a figure (SVG) is drawn beside it")
    parser.add_argument(
        "--geometry",
        type=one_of(tuple(NAMED)),
        default=list(NAMED),
        metavar="NAME,...",
        help=f"some of {', '.join(NAMED)} (default: all)",
    )
    tokens = ",".join(map(str, TOKENS))
    parser.add_argument(
        "--tokens", type=numbers, default=list(TOKENS), metavar="N,...", help=f"of a call (default: {tokens})"
    )
    parser.add_argument(
        "--routing",
        type=one_of(ROUTINGS),
        default=["uniform"],
        metavar=",".join(ROUTINGS),
        help="how tokens choose experts; zipf and hot are uneven (default: uniform)",
    )
    parser.add_argument(
        "--arms", type=one_of(ARMS), default=list(ARMS), metavar=",".join(ARMS), help="default: all"
    )
    parser.add_argument(
        "--exceptions", type=share, default=EXCEPTIONS, help=f"share of the scales (default: {EXCEPTIONS})"
    )
    parser.add_argument(
        "--seconds", type=above_zero, default=1.0, help="of replaying at each point, at most (default: 1)"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        default=1,
        metavar="N",
        help="measure the layers of a checkpoint as one of N ranks holds them (default: 1)",
    )
    parser.add_argument("--topk", type=positive, metavar="K", help="experts a token, if not in config.json")
    parser.add_argument("--commit", help="for the record, where no git tells")


def run_kernels(arguments: argparse.Namespace) -> int:
    from ..bench import kernel_tables, machine, records

    records.claim(arguments.out)
    geometries = [NAMED[name] for name in arguments.geometry]
    if arguments.checkpoint:
        geometries = geometries_of(arguments)
    from ..bench.kernels import Wanted, run

    wanted = Wanted(
        geometries,
        tokens=arguments.tokens,
        routings=arguments.routing,
        arms=arguments.arms,
        exceptions=arguments.exceptions,
        seconds=arguments.seconds,
        commit=machine.commit(arguments.commit),
    )
    record = run(wanted, arguments.out, lambda text: print(text, flush=True))
    print(kernel_tables.markdown(record))
    if arguments.out:
        arguments.out.with_suffix(".svg").write_text(kernel_tables.figure(record))
    return 1 if record["failures"] else 0


def geometries_of(arguments: argparse.Namespace) -> list[LayerGeometry]:
    """The different expert layers of a checkpoint, as one of the ranks holds them."""
    from ..bench.geometries import LayerGeometry
    from ..loaders.checkpoint import open_checkpoint
    from ..loaders.errors import CheckpointError
    from .precompile import facts_of

    arguments.enable_expert_parallel = False
    with open_checkpoint(arguments.checkpoint) as checkpoint:
        facts = dict.fromkeys(facts_of(checkpoint, arguments))
        name = Path(checkpoint.root).name
    if not facts:
        raise CheckpointError(f"{arguments.checkpoint}: no experts in FP4, nothing to measure")
    return [
        LayerGeometry(
            f"{name}-TP{arguments.tensor_parallel_size}" + (f"-{i}" if i else ""),
            one.experts,
            one.hidden,
            one.width,
            one.topk,
        )
        for i, one in enumerate(facts)
    ]


# ---- serve -----------------------------------------------------------------------------------------

LOADS = ("64:128:1,8,32",)
MOST_ROUNDS = 1000


def loads(text: str) -> list[tuple[int, int, int]]:
    """PROMPT:OUTPUT:CONCURRENCY,... as triples."""
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected PROMPT:OUTPUT:CONCURRENCY[,CONCURRENCY...]")
    prompt, output = positive(parts[0]), positive(parts[1])
    return [(prompt, output, concurrency) for concurrency in numbers(parts[2])]


def _serve(parser: argparse.ArgumentParser) -> None:
    arms(parser)
    parser.add_argument(
        "--load",
        type=loads,
        action="append",
        metavar="PROMPT:OUTPUT:CONCURRENCY,...",
        help=f"tokens of a request, and how many run at a time; repeatable (default: {LOADS[0]})",
    )
    parser.add_argument(
        "--rounds", type=positive, help="turns of each arm (default: 3, with --duration as many as fit)"
    )
    parser.add_argument(
        "--duration", type=above_zero, metavar="SECONDS", help="begin nothing later; starts are counted in"
    )
    parser.add_argument(
        "--repeats", type=positive, default=1, help="windows of a load in a turn (default: 1)"
    )
    parser.add_argument(
        "--waves", type=positive, default=4, help="requests of a window for each at a time (default: 4)"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start arm after arm and keep all servers up, so that windows alternate",
    )
    parser.add_argument(
        "--overlap-starts",
        action="store_true",
        help="with --together: start the next as soon as one has its weights; starts are not timed then",
    )
    parser.add_argument(
        "--uniform-routing",
        action="store_true",
        help="send tokens to experts at random, in all arms alike, by vLLM's simulation; for made-up weights",
    )
    parser.add_argument(
        "--speculation",
        choices=("auto", "off", "mtp", "both"),
        default="auto",
        help="auto: both, where the checkpoint has an MTP layer",
    )
    speculative_tokens(parser)
    parser.add_argument(
        "--synthetic-acceptance",
        type=at_least_one,
        metavar="L",
        help="tokens a verified draft yields, made up",
    )
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="T", help="of sampling (default: 0, greedy)"
    )
    more_flags(parser, "vllm serve")
    start_seconds(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    from ..bench import machine, records, serve_report, serving, subjects
    from ..bench.server import has_cuda

    config = subjects.read_config(arguments.checkpoint)
    records.claim(arguments.out)
    check_speculation(arguments, config)
    if arguments.synthetic_acceptance is not None and not has_cuda():
        raise records.BenchError(
            "--synthetic-acceptance needs a CUDA device: vLLM's CPU build has no kernel for it"
        )
    if arguments.overlap_starts and not arguments.together:
        raise records.BenchError("--overlap-starts needs --together: else one server is up at a time")
    kinds = {"auto": ["off", "mtp"] if subjects.has_mtp(config) else ["off"], "both": ["off", "mtp"]}
    found, skipped = subjects_of(arguments)
    if arguments.uniform_routing and not has_cuda() and any(subject.name == "stock" for subject in found):
        raise records.BenchError(
            "--uniform-routing with a stock arm needs a CUDA device: the experts of vLLM's CPU build refuse "
            "the indices of its simulation; leave stock out of --arms"
        )
    given = arguments.load or [loads(text) for text in LOADS]
    wanted = serving.Wanted(
        checkpoint=arguments.checkpoint,
        subjects=found,
        loads=[serving.Load(*load) for group in given for load in group],
        speculations=kinds.get(arguments.speculation, [arguments.speculation]),
        speculative_tokens=arguments.speculative_tokens,
        synthetic_acceptance=arguments.synthetic_acceptance,
        rounds=arguments.rounds or (3 if arguments.duration is None else MOST_ROUNDS),
        duration=arguments.duration,
        repeats=arguments.repeats,
        waves=arguments.waves,
        temperature=arguments.temperature,
        together=arguments.together,
        overlap_starts=arguments.overlap_starts,
        uniform_routing=arguments.uniform_routing,
        start_seconds=arguments.start_seconds,
        commit=machine.commit(arguments.commit),
        skipped=skipped,
    )
    about = {"sha256": subjects.fingerprint(arguments.checkpoint)}
    record: dict[str, Any] = {}
    try:
        serving.run(wanted, record, arguments.out, lambda text: print(text, flush=True), about)
    finally:
        if record.get("windows"):
            print(serve_report.text(record))
            if arguments.out:
                arguments.out.with_suffix(".html").write_text(serve_report.html(record))
    return 1 if record["failures"] else 0


# ---- quality ---------------------------------------------------------------------------------------


def _quality(parser: argparse.ArgumentParser) -> None:
    arms(parser)
    parser.add_argument(
        "--text", type=Path, help="file whose perplexity is measured (default: made-up tokens)"
    )
    parser.add_argument("--prompts", type=positive, default=16, metavar="N", help="to answer (default: 16)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=48, metavar="N", help="of a prompt (default: 48)"
    )
    parser.add_argument("--tokens", type=positive, default=32, metavar="N", help="of an answer (default: 32)")
    parser.add_argument(
        "--context", type=positive, default=256, metavar="N", help="tokens of a piece of text (default: 256)"
    )
    parser.add_argument("--pieces", type=positive, default=32, metavar="N", help="at most (default: 32)")
    parser.add_argument(
        "--top", type=positive, default=20, metavar="K", help="log probabilities at a place (default: 20)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the prompts (default: 0)")
    more_flags(parser, "the engine")


def _check_lengths(arguments: argparse.Namespace, config: dict[str, Any]) -> None:
    from ..bench.records import BenchError

    most = config.get("max_position_embeddings")
    for flags, tokens in (
        ("--prompt-tokens and --tokens", arguments.prompt_tokens + arguments.tokens),
        ("--context", arguments.context),
    ):
        if isinstance(most, int) and tokens > most:
            raise BenchError(f"{flags}: {tokens} tokens, expected at most max_position_embeddings, {most}")


def run_quality(arguments: argparse.Namespace) -> int:
    from ..bench import machine, quality, records, subjects, texts

    records.claim(arguments.out)
    _check_lengths(arguments, subjects.read_config(arguments.checkpoint))
    found, skipped = subjects_of(arguments)
    prompts, scored = texts.choose(
        arguments.checkpoint,
        arguments.text,
        prompts=arguments.prompts,
        prompt_tokens=arguments.prompt_tokens,
        context=arguments.context,
        pieces=arguments.pieces,
        seed=arguments.seed,
    )
    wanted = quality.Wanted(
        checkpoint=arguments.checkpoint,
        subjects=found,
        prompts=prompts,
        scored=scored,
        tokens=arguments.tokens,
        top=arguments.top,
        text=arguments.text.name if arguments.text else None,
        commit=machine.commit(arguments.commit),
        skipped=skipped,
    )
    about = {"sha256": subjects.fingerprint(arguments.checkpoint)}
    record = quality.run(wanted, arguments.out, lambda text: print(text, flush=True), about)
    print(quality.text(record))
    differ = any(row["b"] == "native" and not row["identical"] for row in record["agreement"])
    return 1 if record["failures"] or differ else 0


# ---- records ---------------------------------------------------------------------------------------


def _table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, help="record of bench kernels")
    parser.add_argument("--figure", type=Path, help="where to draw it (default: beside the record, .svg)")


def run_table(arguments: argparse.Namespace) -> int:
    from ..bench import kernel_tables, records

    record = records.read(arguments.record, "kernels")
    figure = arguments.figure or arguments.record.with_suffix(".svg")
    records.claim(figure, "--figure")
    with records.whole(arguments.record):
        table, drawn = kernel_tables.markdown(record), kernel_tables.figure(record)
    print(table)
    figure.write_text(drawn)
    return 0


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="record of bench serve")
    parser.add_argument("after", type=Path, help="another one")


def run_compare(arguments: argparse.Namespace) -> int:
    from ..bench import records, serve_report

    before, after = (records.read(path, "serve") for path in (arguments.before, arguments.after))
    with records.whole(arguments.before, arguments.after):
        text, shared = serve_report.comparison(before, after), serve_report.in_common(before, after)
    print(text)
    return 0 if shared else 1
