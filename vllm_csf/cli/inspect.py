"""``vllm-csf inspect CHECKPOINT``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .progress import bar, size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder, or Hugging Face repository")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from ..loaders.summary import summarize

    with bar(0, "layer", "inspect", arguments.quiet or arguments.json) as progress:
        found = summarize(arguments.checkpoint, progress)
    if arguments.json:
        totals = {name: getattr(found, name) for name in ("native_bytes", "compressed_bytes", "exceptions")}
        print(json.dumps(asdict(found) | totals, indent=1))
        return 0
    print(f"{found.root}: layout {found.layout}, {found.tensors} tensors")
    for name, dtype in found.other_experts.items():
        print(f"  {name}: experts in {dtype}, served as they are")
    if not found.layers:
        print("  no experts in FP4")
        return 0
    head = f"{'experts':>8}{'H':>7}{'I':>7}{'native':>13}{'compressed':>13}{'ratio':>8}{'exc.':>8}"
    print(f"  {'layer':<44}{head}")
    for layer in found.layers:
        ratio = _percent(layer.compressed_bytes, layer.native_bytes)
        share = _percent(layer.exceptions, layer.native_bytes, 2)
        sizes = f"{size(layer.native_bytes):>13}{size(layer.compressed_bytes):>13}{ratio:>8}{share:>8}"
        print(f"  {layer.name:<44}{layer.experts:>8}{layer.hidden:>7}{layer.width:>7}{sizes}")
    print(
        f"  block scales {size(found.native_bytes)} -> {size(found.compressed_bytes)} "
        f"({_percent(found.compressed_bytes, found.native_bytes)}), "
        f"{_percent(found.exceptions, found.native_bytes, 2)} exceptions"
    )
    print("  worst planes:")
    for plane in found.worst:
        print(f"    {100 * plane.ratio:6.1f} %  {plane.exceptions} exceptions  {plane.name}")
    for layer in found.layers:
        if layer.unequal_global_scales:
            count = layer.unequal_global_scales
            print(f"  {layer.name}: gate and up of {count} experts have different global scales")
    return 0


def _percent(part: float, whole: float, digits: int = 1) -> str:
    return f"{100 * part / max(1, whole):.{digits}f} %"
