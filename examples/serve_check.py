"""Serves a compressed checkpoint in this process and measures it against an independent model.

    python examples/serve_check.py COMPRESSED DEQUANTIZED --record record.json [--sleep] [--mtp 1]
    python examples/serve_check.py DEQUANTIZED --recheck record.json

COMPRESSED is what vLLM serves with the plugin: on CUDA in bfloat16 with CUDA graphs, on the CPU in
float32. DEQUANTIZED holds the same weights without quantization; Hugging Face transformers computes
its logits on the CPU in float32, for the very tokens that vLLM chose. Tokens and log probabilities have to
agree up to rounding, whose bounds `routed_reference.py` derives, and `agreement.py` says when. Exit status 1
where they do not. The record holds what the server answered: --recheck compares that once more, without
vLLM or a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agreement import EXPLAINED_SHARE, LEAST_TOLERANCE, Answer, Comparison, compare
from routed_reference import SIGMAS, Reference

PROMPTS = (
    [5, 17, 33, 99],
    [7, 201, 120, 64, 64, 64, 12, 31, 250, 3, 90],
    list(range(10, 74)),
    [42],
    [250 - i % 97 for i in range(150)],
)


@dataclass
class Record:
    model: str
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    dtype: str = ""
    cuda_graphs: str = ""
    capture_sizes: list[int] = field(default_factory=list)
    start_seconds: float = 0.0
    plugin_lines: list[str] = field(default_factory=list)
    rule: dict[str, float] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    ok: bool = False

    def judge(self, reference: Reference) -> None:
        """Compares the answers of every run; equal runs once."""
        self.rule = {
            "sigmas": SIGMAS,
            "least_tolerance": LEAST_TOLERANCE[self.dtype],
            "explained_share": EXPLAINED_SHARE,
        }
        done: dict[str, Comparison] = {}
        for name, answers in self.answers.items():
            key = json.dumps([asdict(answer) for answer in answers])
            if key not in done:
                done[key] = compare(reference, answers)
            self.runs[name] = {"ok": done[key].ok, **asdict(done[key])}
        self.ok = bool(self.plugin_lines and self.runs) and all(run["ok"] for run in self.runs.values())

    @classmethod
    def read(cls, path: Path) -> Record:
        """Raises KeyError or TypeError for something that is no record."""
        fields = json.loads(path.read_text())
        answers = {
            name: [Answer(**answer) for answer in answers] for name, answers in fields["answers"].items()
        }
        return cls(**(fields | {"answers": answers, "runs": {}, "ok": False}))

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(_compact(asdict(self)) + "\n")

    def show(self) -> None:
        """Prints all but the answers, which are many numbers."""
        fields = asdict(self)
        print(json.dumps({name: value for name, value in fields.items() if name != "answers"}, indent=1))


def _compact(fields: dict[str, Any]) -> str:
    """JSON with an answer on a line."""
    kept: dict[str, list[str]] = {}
    lines: dict[str, str] = {}
    for run, answers in fields["answers"].items():
        kept[run] = [f"@{run}@{number}@" for number in range(len(answers))]
        lines |= {f'"@{run}@{number}@"': json.dumps(answer) for number, answer in enumerate(answers)}
    text = json.dumps(fields | {"answers": kept}, indent=1)
    for mark, line in lines.items():
        text = text.replace(mark, line)
    return text


class PluginLines(logging.Filter):
    """Collects the plugin's lines; the engine runs in this process.

    A filter that lets everything pass: vLLM configures its loggers anew when an engine starts, which
    drops handlers and keeps filters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True


def prepare_environment() -> None:
    """Before vLLM is imported."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def start(arguments: argparse.Namespace, record: Record) -> Any:
    import torch
    import vllm

    cuda = torch_has_cuda()
    record.device = torch.cuda.get_device_name() if cuda else platform.processor() or "cpu"
    record.versions = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    record.dtype = arguments.dtype or ("bfloat16" if cuda else "float32")
    options: dict[str, Any] = {"enforce_eager": not cuda, "enable_sleep_mode": cuda and arguments.sleep}
    if cuda:
        # A fixed size, so that nothing else on the device changes what is measured.
        options |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 30}
    if arguments.execution != "auto":
        options["additional_config"] = {"csf_execution": arguments.execution}
    if arguments.mtp:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": arguments.mtp}
    began = time.perf_counter()
    llm = vllm.LLM(
        str(arguments.models[0]),
        quantization="csf_nvfp4",
        load_format=arguments.load_format,
        dtype=record.dtype,
        max_model_len=256,
        max_num_seqs=8,
        **options,
    )
    record.start_seconds = round(time.perf_counter() - began, 1)
    compilation = llm.llm_engine.vllm_config.compilation_config
    record.cuda_graphs = str(compilation.cudagraph_mode)
    record.capture_sizes = list(compilation.cudagraph_capture_sizes or [])
    return llm


def torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def generate(llm: Any, tokens: int) -> list[Answer]:
    """Greedy ones."""
    from vllm_csf.bench import quality_arm

    found = quality_arm.generate(llm, [list(prompt) for prompt in PROMPTS], tokens)
    return [Answer(list(p), ids, logs) for p, ids, logs in zip(PROMPTS, *found, strict=True)]


def check_sleep(llm: Any, tokens: int) -> dict[str, list[Answer]]:
    """Answers after sleeping at level 1, and at level 2 with the weights loaded anew."""
    runs = {}
    llm.sleep(level=1)
    llm.wake_up()
    runs["after sleep level 1"] = generate(llm, tokens)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    runs["after sleep level 2"] = generate(llm, tokens)
    return runs


def serve(arguments: argparse.Namespace) -> Record:
    prepare_environment()
    record, lines = Record(model=arguments.models[0].name), PluginLines()
    logging.getLogger("vllm.csf").addFilter(lines)
    llm = start(arguments, record)
    runs = {"first": generate(llm, arguments.tokens), "again": generate(llm, arguments.tokens)}
    runs["after reload"] = (llm.collective_rpc("reload_weights"), generate(llm, arguments.tokens))[1]
    if arguments.sleep and torch_has_cuda():
        runs |= check_sleep(llm, arguments.tokens)
    record.answers, record.plugin_lines = runs, lines.lines
    return record


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="CHECKPOINT", help="see above")
    parser.add_argument("--record", type=Path, help="write what was found as JSON")
    parser.add_argument("--recheck", type=Path, metavar="RECORD", help="compare its answers, serve nothing")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--mtp", type=int, default=0, help="speculative tokens from the checkpoint's MTP layer"
    )
    parser.add_argument("--load-format", default="auto", choices=["auto", "csf"])
    parser.add_argument("--execution", default="auto", choices=["auto", "cute", "reference"])
    parser.add_argument("--dtype", choices=sorted(LEAST_TOLERANCE))
    parser.add_argument("--sleep", action="store_true", help="also sleep and wake at both levels (CUDA)")
    arguments = parser.parse_args(words)
    wanted = 1 if arguments.recheck else 2
    if len(arguments.models) != wanted:
        parser.error(f"{len(arguments.models)} checkpoints, expected {wanted}")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    record = Record.read(arguments.recheck) if arguments.recheck else serve(arguments)
    record.write(arguments.record)  # what was answered is kept, should the comparison not come to its end
    record.judge(Reference(arguments.models[-1], record.dtype))
    record.write(arguments.record)
    record.show()
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.exit(main())
