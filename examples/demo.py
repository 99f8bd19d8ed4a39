"""Makes a small mixture-of-experts checkpoint, compresses it, serves it, asks it. `make demo` runs this.

    python examples/demo.py [--keep FOLDER]

The weights are random, so the answer is noise; it is the server, the checkpoint and the memory that
are real. Runs on a CUDA device if there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_csf.bench.server import Server, ServerError, has_cuda

PROMPT = "The scales of this model are"
FLAGS = ("--quantization", "csf_nvfp4", "--max-model-len", "256", "--max-num-seqs", "4")
LINE = re.compile(
    r"csf_nvfp4: (?P<layers>\d+) expert layers, block scales (?P<native>[\d.]+ \w+) native, "
    r"(?P<resident>[\d.]+ \w+) resident \((?P<share>[\d.]+) %\), (?P<exceptions>\d+) exceptions "
    r"\((?P<exception_share>[\d.]+) %\), scratch (?P<scratch>[\d.]+ \w+), execution (?P<execution>\w+)"
)


def tool(*arguments: str) -> None:
    """Run the `vllm-csf` command of this environment."""
    print(f"\n$ vllm-csf {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "vllm_csf.cli", *arguments], check=True)


def memory_table(log: str) -> str:
    """What the server said of its memory at start."""
    found = LINE.search(log)
    if found is None:
        raise ServerError("the server's log has no line of the plugin")
    rows = (
        ("expert layers", found["layers"]),
        ("block scales, native", found["native"]),
        ("block scales, resident", f"{found['resident']} ({found['share']} %)"),
        ("exceptions", f"{found['exceptions']} ({found['exception_share']} % of the scales)"),
        ("scratch, shared by all layers", found["scratch"]),
        ("execution", found["execution"]),
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def run(folder: Path) -> None:
    native, compressed = folder / "native", folder / "compressed"
    tool("make-example", str(native))
    tool("convert", str(native), str(compressed))
    print(f"\n$ vllm serve {compressed} {' '.join(FLAGS)}", flush=True)
    began = time.perf_counter()
    with Server(compressed, FLAGS, log=folder / "server.log") as server:
        print(f"ready after {time.perf_counter() - began:.0f} s on the {'GPU' if has_cuda() else 'CPU'}")
        print(f"\ncompletion of {PROMPT!r}:\n  {server.complete(PROMPT)['text']!r}")
        print(f"\nchat, {PROMPT!r}:\n  {server.chat(PROMPT)['message']['content']!r}")
        print(f"\nmemory:\n{memory_table(server.log_text())}")
        print("(a tiny example with ten times the exceptions of published models: those keep some 52 %)")
    print("\nserver stopped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the checkpoints here and keep them")
    arguments = parser.parse_args()
    try:
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            run(arguments.keep)
        else:
            with tempfile.TemporaryDirectory(prefix="vllm-csf-demo-") as folder:
                run(Path(folder))
    except (ServerError, subprocess.CalledProcessError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
