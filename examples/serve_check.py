"""Serves a compressed checkpoint in this process and measures it against an independent model.

    python examples/serve_check.py COMPRESSED DEQUANTIZED --record record.json [--sleep] [--mtp 1]

COMPRESSED is what vLLM serves with the plugin: on CUDA in bfloat16 with CUDA graphs, on the CPU in
float32. DEQUANTIZED holds the same weights without quantization; Hugging Face transformers computes
its logits on the CPU in float32, for the very tokens that vLLM chose. Every token has to be the one
that the reference prefers, unless the reference is undecided within the tolerance of the data type,
and every log probability has to agree within that tolerance. Exit status 1 where one does not.
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

PROMPTS = (
    [5, 17, 33, 99],
    [7, 201, 120, 64, 64, 64, 12, 31, 250, 3, 90],
    list(range(10, 74)),
    [42],
    [250 - i % 97 for i in range(150)],
)
# Largest difference of a log probability. bfloat16 activations carry 8 bits through every layer.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}


@dataclass
class Comparison:
    """Of one run's tokens with the reference."""

    tokens: int = 0
    equal: int = 0
    undecided: int = 0
    wrong: int = 0
    largest_logprob_difference: float = 0.0

    def ok(self, tolerance: float) -> bool:
        return not self.wrong and self.largest_logprob_difference <= tolerance


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
    tolerance: float = 0.0
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    ok: bool = False


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
    record.tolerance = TOLERANCE[record.dtype]
    options: dict[str, Any] = {"enforce_eager": not cuda, "enable_sleep_mode": cuda and arguments.sleep}
    if cuda:
        options["gpu_memory_utilization"] = 0.5
    if arguments.execution != "auto":
        options["additional_config"] = {"csf_execution": arguments.execution}
    if arguments.mtp:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": arguments.mtp}
    began = time.perf_counter()
    llm = vllm.LLM(
        str(arguments.compressed),
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


def generate(llm: Any, tokens: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log probabilities, a pair for each prompt."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
    pairs = []
    for output in outputs:
        chosen = output.outputs[0]
        ids = list(chosen.token_ids)
        pairs.append((ids, [step[token].logprob for step, token in zip(chosen.logprobs, ids, strict=True)]))
    return pairs


class Reference:
    """Log probabilities of the unquantised model, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, prompt: list[int], answer: list[int]) -> Any:
        """[answer tokens, vocabulary], each row given all that stands before its token."""
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + answer])).logits[0]
        return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def compare(reference: Reference, run: list[tuple[list[int], list[float]]], tolerance: float) -> Comparison:
    result = Comparison()
    for prompt, (answer, found) in zip(PROMPTS, run, strict=True):
        for row, token, logprob in zip(reference.logprobs(prompt, answer), answer, found, strict=True):
            best = float(row.max())
            result.tokens += 1
            if float(row[token]) == best:
                result.equal += 1
            elif best - float(row[token]) <= tolerance:
                result.undecided += 1
            else:
                result.wrong += 1
            difference = abs(float(row[token]) - logprob)
            result.largest_logprob_difference = max(result.largest_logprob_difference, difference)
    return result


def check_sleep(llm: Any, tokens: int) -> dict[str, list[tuple[list[int], list[float]]]]:
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("compressed", type=Path)
    parser.add_argument("dequantized", type=Path)
    parser.add_argument("--record", type=Path, help="write what was found as JSON")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--mtp", type=int, default=0, help="speculative tokens from the checkpoint's MTP layer"
    )
    parser.add_argument("--load-format", default="auto", choices=["auto", "csf"])
    parser.add_argument("--execution", default="auto", choices=["auto", "cute", "reference"])
    parser.add_argument("--dtype", choices=sorted(TOLERANCE))
    parser.add_argument("--sleep", action="store_true", help="also sleep and wake at both levels (CUDA)")
    arguments = parser.parse_args()
    prepare_environment()
    record, lines = Record(model=arguments.compressed.name), PluginLines()
    logging.getLogger("vllm.csf").addFilter(lines)
    llm = start(arguments, record)
    runs = {"first": generate(llm, arguments.tokens), "again": generate(llm, arguments.tokens)}
    runs["after reload"] = (llm.collective_rpc("reload_weights"), generate(llm, arguments.tokens))[1]
    if arguments.sleep and torch_has_cuda():
        runs |= check_sleep(llm, arguments.tokens)
    reference = Reference(arguments.dequantized)
    compared = {name: compare(reference, run, record.tolerance) for name, run in runs.items()}
    record.runs = {name: asdict(comparison) for name, comparison in compared.items()}
    record.plugin_lines = lines.lines
    record.ok = bool(lines.lines) and all(c.ok(record.tolerance) for c in compared.values())
    text = json.dumps(asdict(record), indent=1)
    print(text)
    if arguments.record:
        arguments.record.write_text(text + "\n")
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.exit(main())
