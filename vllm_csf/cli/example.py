"""``vllm-csf make-example OUT``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .arguments import USAGE, positive, seed

# Those of loaders.example, which is too heavy to import for a help text; a test compares them.
FAMILIES = ("qwen3-moe", "glm4-moe")
LAYOUTS = ("modelopt", "compressed-tensors", "csf", "container", "dequantized")
SIZES = {
    "layers": "without the MTP layer",
    "hidden": "hidden size, a multiple of 32",
    "width": "intermediate size of an expert, a multiple of 32",
    "experts": "of a layer",
    "topk": "experts a token",
    "heads": "of attention, a multiple of --kv-heads",
    "kv-heads": "of keys and values",
    "head-dim": "a multiple of 8 up to 512; vLLM's CPU build takes 32, 64, 80, 96, 112, 128 and more",
    "vocabulary": "tokens, at least 259",
    "positions": "longest sequence",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument(
        "--family",
        default=FAMILIES[0],
        choices=FAMILIES,
        help=f"glm4-moe has an MTP layer (default: {FAMILIES[0]})",
    )
    parser.add_argument(
        "--layout",
        default=LAYOUTS[0],
        choices=LAYOUTS,
        help=f"dequantized: the same numbers as an unquantised FP32 checkpoint (default: {LAYOUTS[0]})",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the weights (default: 0)")
    parser.add_argument(
        "--unequal-gate-up", action="store_true", help="gate and up get global scales of their own"
    )
    parser.add_argument(
        "--no-weights",
        action="store_true",
        help="only configuration and tokenizer, for --load-format csf_made_up or dummy",
    )
    sizes = parser.add_argument_group("sizes")
    for name, help_ in SIZES.items():
        sizes.add_argument(f"--{name}", type=positive, metavar="N", help=help_)


def run(arguments: argparse.Namespace) -> int:
    from ..loaders.errors import CheckpointError
    from ..loaders.example import make_example

    names = (name.replace("-", "_") for name in SIZES)
    sizes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        made = make_example(
            arguments.out,
            arguments.family,
            arguments.layout,
            arguments.seed,
            arguments.unequal_gate_up,
            weights=not arguments.no_weights,
            **sizes,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        print(f"vllm-csf make-example: {error}", file=sys.stderr)
        return USAGE
    print(made)
    return 0
