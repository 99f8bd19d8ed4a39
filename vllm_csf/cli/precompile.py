"""``vllm-csf precompile CHECKPOINT``: fills the cache of compiled programs; needs no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .arguments import positive

if TYPE_CHECKING:  # torch comes with them
    from ..kernels.activation import Activation
    from ..loaders.checkpoint import Checkpoint
    from ..planning import LayerFacts, Plan

TOPK_KEYS = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_experts_per_token", "num_experts_per_token")
ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
# Programs do not depend on it; the scratch that is printed does. Of an H200.
MULTIPROCESSORS = 132
RANKS = "as of the server: ranks that share a layer (default: 1)"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder, or Hugging Face repository")
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHITECTURES,
        default=["sm_90a"],
        metavar="ARCH",
        help=f"of the GPUs: {', '.join(ARCHITECTURES)} (default: sm_90a)",
    )
    parser.add_argument("--tensor-parallel-size", "-tp", type=positive, default=1, metavar="N", help=RANKS)
    parser.add_argument(
        "--enable-expert-parallel",
        "-ep",
        action="store_true",
        help="as of the server: ranks share out experts",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=8192,
        metavar="N",
        help="as of the server: tokens of a step at most (default: 8192)",
    )
    parser.add_argument("--topk", type=positive, metavar="K", help="experts a token, if not in config.json")
    parser.add_argument("--cache-dir", help="as csf_cache_dir of the server (default: the user's cache)")
    parser.add_argument("--workers", type=positive, default=8, metavar="N", help="at most (default: 8)")
    parser.add_argument("--tuning", action="store_true", help="what a tuned start tries besides, too")
    parser.add_argument("--quiet", action="store_true", help="do not print the plans")


def run(arguments: argparse.Namespace) -> int:
    from ..kernels.compiled.build import Build
    from ..kernels.compiled.cache import ProgramCache
    from ..kernels.compiled.program import CompileError
    from ..loaders.checkpoint import open_checkpoint
    from ..loaders.errors import CheckpointError
    from ..tuning import candidate_programs

    cache = ProgramCache(arguments.cache_dir)
    if cache.folder.exists() and not cache.folder.is_dir():
        raise CheckpointError(f"--cache-dir is {cache.folder}, a file; expected a folder")
    with open_checkpoint(arguments.checkpoint) as checkpoint:
        plans = plans_of(checkpoint, arguments)
    if not plans:
        print(f"{arguments.checkpoint}: no experts in FP4, nothing to compile")
        return 0
    if not arguments.quiet:
        print(*plans, sep="\n", flush=True)
    programs = (p for plan in plans for p in (*plan.preparation, *plan.programs()))
    wanted = Build(programs, cache, workers=arguments.workers)
    try:
        wanted.finish()
    except CompileError as error:
        print(f"vllm-csf precompile: {error}", file=sys.stderr)
        return 1
    account = wanted.account
    if arguments.tuning:
        others = (p for plan in plans for p in candidate_programs(plan, wide_ids=(False, True)))
        tried = Build(others, cache, workers=arguments.workers, optional=True)
        tried.finish()
        account.add(tried.account)
    print(
        f"{account.compiled} programs compiled in {account.compile_seconds:.1f} s, "
        f"{account.from_cache} were there, in {cache.folder}"
    )
    return 0


def plans_of(checkpoint: Checkpoint, arguments: argparse.Namespace) -> list[Plan]:
    """A plan for each architecture and geometry, as a server with these settings makes them."""
    from ..kernels.moe.epilogue import supported
    from ..loaders.errors import CheckpointError
    from ..planning import Limits, geometry_of, make_plan

    facts = dict.fromkeys(facts_of(checkpoint, arguments))
    for one in facts:
        if not supported(one.activation):
            raise CheckpointError(f"{checkpoint.root}: {one.activation} has no kernels, nothing to compile")
    limits = Limits(arguments.max_num_batched_tokens)
    with _named(checkpoint):
        geometries = [geometry_of(one, arch, MULTIPROCESSORS) for arch in arguments.arch for one in facts]
        return [make_plan(geometry, limits) for geometry in geometries]


def facts_of(checkpoint: Checkpoint, arguments: argparse.Namespace) -> list[LayerFacts]:
    """Of a rank, layer by layer."""
    from ..partition import padded_width
    from ..planning import LayerFacts

    ranks = arguments.tensor_parallel_size
    mapped = arguments.enable_expert_parallel and ranks > 1
    if not checkpoint.layers:
        return []
    with _named(checkpoint):
        topk, activation = arguments.topk or _topk(checkpoint), _activation(checkpoint)
        if topk > (most := min(layer.experts for layer in checkpoint.layers)):
            raise ValueError(f"{topk} experts a token, expected at most {most}, the experts of a layer")
    return [
        LayerFacts(
            experts=-(-layer.experts // ranks) if mapped else layer.experts,
            global_experts=layer.experts,
            hidden=layer.hidden,
            width=padded_width(layer.width, 1 if mapped else ranks),
            topk=topk,
            activation=activation,
            mapped=mapped,
        )
        for layer in checkpoint.layers
    ]


@contextmanager
def _named(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises CheckpointError for sizes or an activation that no kernel takes."""
    from ..loaders.errors import CheckpointError

    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.root}: {error}") from error


def _topk(checkpoint: Checkpoint) -> int:
    found = _setting(checkpoint, TOPK_KEYS, "give --topk")
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json has {found!r} experts a token, expected a whole number of at least 1")
    return found


def _activation(checkpoint: Checkpoint) -> Activation:
    from ..kernels.activation import Activation
    from ..loaders.recipes import text_config

    config = checkpoint.config
    limit = config.get("swiglu_limit", text_config(config).get("swiglu_limit"))
    if limit is not None and not isinstance(limit, int | float):
        raise ValueError(f"config.json has swiglu_limit {limit!r}, expected a number")
    return Activation(str(_setting(checkpoint, ACTIVATION_KEYS, "expected one")), limit=limit)


def _setting(checkpoint: Checkpoint, keys: tuple[str, ...], otherwise: str) -> Any:
    from ..loaders.errors import CheckpointError
    from ..loaders.recipes import text_config

    for config in (checkpoint.config, text_config(checkpoint.config)):
        for key in keys:
            if config.get(key) is not None:
                return config[key]
    raise CheckpointError(f"{checkpoint.root}: config.json has none of {', '.join(keys)}; {otherwise}")
