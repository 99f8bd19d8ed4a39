"""``vllm-csf make-example OUT``."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--family", default="qwen3-moe", help="qwen3-moe, or glm4-moe with an MTP layer")
    parser.add_argument(
        "--layout", default="modelopt", help="modelopt, compressed-tensors, csf, container or dequantized"
    )
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "hidden", "width", "experts", "topk"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from ..loaders.example import make_example

    names = ("layers", "hidden", "width", "experts", "topk")
    sizes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        made = make_example(arguments.out, arguments.family, arguments.layout, arguments.seed, **sizes)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        print(f"vllm-csf make-example: {error}")
        return 2
    print(made)
    return 0
