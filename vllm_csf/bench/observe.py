"""What a server tells of itself: its metrics, and the lines of its log that hold numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

STEPS = "vllm:iteration_tokens_total_count"
GENERATED = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
CACHE = "vllm:cache_config_info"
# In the log, once weights have come and are arranged. The CPU build says no more than that they have come.
LOADED, LOADED_ON_CPU = "Model loading took", "Loading weights took"


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if (match := _SAMPLE.match(line)) is not None:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            found.append(Sample(match["name"], labels, float(match["value"])))
    return found


@dataclass(frozen=True)
class Counters:
    """Since the server's start, all engines together. steps: engine steps that gave at least one token."""

    steps: float = 0.0
    generated: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0

    @classmethod
    def of(cls, text: str) -> Counters:
        sums = dict.fromkeys((STEPS, GENERATED, DRAFTS, ACCEPTED), 0.0)
        for sample in parse(text):
            if sample.name in sums:
                sums[sample.name] += sample.value
        return cls(*sums.values())

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.steps - before.steps,
            self.generated - before.generated,
            self.drafts - before.drafts,
            self.accepted - before.accepted,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verified draft yields on average, the target's own included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


_LINES: dict[str, tuple[str, type]] = {
    "kv_tokens": (r"KV cache size: ([\d,]+) tokens", int),
    "weights_gib": (r"Model loading took ([\d.]+) GiB", float),
    "load_seconds": (r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds", float),
    "weights_seconds": (r"Loading weights took ([\d.]+) seconds", float),
    "engine_seconds": (r"init engine \(.*?\) took ([\d.]+) s", float),
    "graph_seconds": (r"Graph capturing finished in ([\d.]+) secs", float),
}


def facts(log: str) -> dict[str, Any]:
    """Numbers of a server's log, those that are there. plugin: what the plugin said, line by line."""
    found: dict[str, Any] = {}
    for name, (pattern, kind) in _LINES.items():
        if match := re.search(pattern, log):
            found[name] = kind(match[1].replace(",", ""))
    if "weights_seconds" in found:  # of the CPU build, which says nothing of the whole
        found.setdefault("load_seconds", found["weights_seconds"])
    if backend := re.search(r"Using '(\w+)' NvFp4 MoE backend", log):
        found["backend"] = backend[1]
    if said := re.findall(r"csf_nvfp4: .*", log):
        found["plugin"] = said
    return found


def kv_tokens(metrics: str) -> int | None:
    """Blocks times their size, where the log does not say it."""
    for sample in parse(metrics):
        blocks, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
        if sample.name == CACHE and blocks.isdigit() and size.isdigit():
            return int(blocks) * int(size)
    return None
