"""Whether the arms give the same answers: greedy tokens, log probabilities, KL divergence, perplexity.

Each arm is the real engine in a process of its own, asked the same. `vllm-csf bench quality` runs this. The
record: {"machine", "commit", "checkpoint", "settings", "skipped", "failures", "arms": [...],
"agreement": [...]}.

KL divergence: of the first arm's distribution from the second's, at every place of the scored sequences, over
the tokens that are among the top k of both; all others count as one. So it is a lower bound, exact where k
is the vocabulary, and zero where the engines agree.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import machine, records
from .records import BenchError
from .server import CPU_FLAGS, cpu_environment, has_cuda, log_tail
from .subjects import Subject, unless_given

PAIRS = (("csf", "native"), ("csf", "stock"), ("native", "stock"))
ROOM = 1  # of a scored sequence: the engine has to generate a token


@dataclass(frozen=True)
class Wanted:
    """prompts: to answer, with `tokens` tokens each; scored: sequences whose every token is judged; top: log
    probabilities at a place; text: whether `scored` is text, so that its perplexity means something."""

    checkpoint: str
    subjects: Sequence[Subject]
    prompts: Sequence[Sequence[int]]
    scored: Sequence[Sequence[int]]
    tokens: int = 32
    top: int = 20
    text: str | None = None
    commit: str = "unknown"
    skipped: dict[str, str] = field(default_factory=dict)


def run(
    wanted: Wanted, out: Path | None, say: Callable[[str], None], about: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The record. An arm that fails is in its failures."""
    record: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": wanted.commit,
        "checkpoint": {"name": Path(wanted.checkpoint).name, **(about or {})},
        "settings": {
            "prompts": len(wanted.prompts),
            "tokens": wanted.tokens,
            "scored_tokens": sum(len(s) - 1 for s in wanted.scored),
            "top": wanted.top,
            "text": wanted.text,
        },
        "skipped": wanted.skipped,
        "failures": [],
        "arms": [],
        "agreement": [],
    }
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-csf-quality-") as folder:
        for subject in wanted.subjects:
            try:
                found[subject.name] = result = ask(wanted, subject, Path(folder))
            except BenchError as error:
                record["failures"].append({"arm": subject.name, "error": str(error)[-4000:]})
                say(f"{subject.name}: failed: {error}")
                continue
            value = perplexity(result["scored"], wanted.scored)
            record["arms"].append(
                {"arm": subject.name, "perplexity": value, "start_seconds": result["seconds"]}
            )
            say(f"{subject.name}: answered; perplexity {value:.6g}")
            record["agreement"] = [
                {"a": a, "b": b, **agreement(found[a], found[b])} for a, b in PAIRS if {a, b} <= set(found)
            ]
            if out is not None:
                records.write(record, out)
    return record


def ask(wanted: Wanted, subject: Subject, folder: Path) -> dict[str, Any]:
    """What `quality_arm` says. Raises BenchError with the last lines of its output."""
    cpu = not has_cuda()
    longest = max(
        max(len(p) + wanted.tokens for p in wanted.prompts), max(len(s) + ROOM for s in wanted.scored)
    )
    flags = ["--model", subject.model, *(CPU_FLAGS if cpu else ()), *subject.flags]
    flags += unless_given(flags, "--max-model-len", longest)
    flags += ["--max-logprobs", str(wanted.top)]
    job, result = folder / f"{subject.name}.job.json", folder / f"{subject.name}.json"
    job.write_text(
        json.dumps(
            {
                "flags": flags,
                "prompts": [list(p) for p in wanted.prompts],
                "scored": [list(s) for s in wanted.scored],
                "tokens": wanted.tokens,
                "top": wanted.top,
            }
        )
    )
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if cpu:
        # Log probabilities bring in a helper that takes half a minute to compile.
        environment |= {**cpu_environment(1), "TORCHDYNAMO_DISABLE": "1"}
    if Path(subject.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    log = folder / f"{subject.name}.log"
    with log.open("wb") as file:
        status = subprocess.run(
            [sys.executable, "-m", "vllm_csf.bench.quality_arm", str(job), str(result)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment | subject.environment,
        ).returncode
    if status or not result.exists():
        raise BenchError(f"the engine ended with {status}:\n{log_tail(log)}")
    return json.loads(result.read_text())


# ---- arithmetic ------------------------------------------------------------------------------------

Place = dict[str, float]  # token (as JSON has it) -> log probability


def perplexity(scored: Sequence[Sequence[Place]], sequences: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log probability of every token but the first of each sequence."""
    logs = [
        place[str(token)]
        for places, sequence in zip(scored, sequences, strict=True)
        for place, token in zip(places, sequence[1:], strict=True)
    ]
    return math.exp(-sum(logs) / len(logs))


def divergence(p: Place, q: Place) -> float:
    """KL(p || q) over the tokens of both, all others as one."""
    common = p.keys() & q.keys()
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in common)
    rest = [max(0.0, 1 - sum(math.exp(x[token]) for token in common)) for x in (p, q)]
    # What rounding leaves of a whole vocabulary is no probability.
    if min(rest) > 1e-6:
        total += rest[0] * math.log(rest[0] / rest[1])
    return max(0.0, total)


def agreement(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of two arms. identical: every token and every log probability is the same number."""
    pairs = list(zip(a["answers"], b["answers"], strict=True))
    same = [_common(x, y) for x, y in pairs]
    differences = [
        abs(x - y)
        for n, one, other in zip(same, a["answer_logprobs"], b["answer_logprobs"], strict=True)
        for x, y in zip(one[:n], other[:n], strict=True)
    ]
    places = [
        (p, q)
        for one, other in zip(a["scored"], b["scored"], strict=True)
        for p, q in zip(one, other, strict=True)
    ]
    differences += [abs(p[token] - q[token]) for p, q in places for token in p.keys() & q.keys()]
    kl = [divergence(p, q) for p, q in places]
    tokens = sum(len(x) for x, _ in pairs)
    kinds = ("answers", "answer_logprobs", "scored")
    return {
        "identical": all(a[kind] == b[kind] for kind in kinds),
        "answers": len(pairs),
        "answers_equal": sum(n == len(x) for n, (x, _) in zip(same, pairs, strict=True)),
        "tokens": tokens,
        "tokens_until_difference": sum(same),
        "top_token_equal": sum(_best(p) == _best(q) for p, q in places) / len(places),
        "max_logprob_difference": max(differences, default=0.0),
        "mean_kl": sum(kl) / len(kl),
        "max_kl": max(kl),
    }


def _common(x: Sequence[int], y: Sequence[int]) -> int:
    """Tokens until the first that differs."""
    return next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))


def _best(place: Place) -> str:
    return max(place, key=place.__getitem__)


def text(record: dict[str, Any]) -> str:
    """For the terminal."""
    s = record["settings"]
    what = f"perplexity of {s['text']}" if s["text"] else "perplexity of made-up tokens"
    lines = [f"No {arm} arm: {reason}." for arm, reason in record["skipped"].items()]
    lines += [f"Failed: {f['arm']}: {f['error'].splitlines()[0]}" for f in record["failures"]]
    lines += [f"{arm['arm']}: {what} {arm['perplexity']:.6g}" for arm in record["arms"]]
    for row in record["agreement"]:
        same = "identical, bit for bit" if row["identical"] else "not identical"
        lines.append(
            f"{row['a']} and {row['b']}: {same}; {row['answers_equal']} of {row['answers']} answers and "
            f"{row['tokens_until_difference']} of {row['tokens']} tokens until a difference equal; "
            f"log probabilities within {row['max_logprob_difference']:.3g}; best token equal at "
            f"{100 * row['top_token_equal']:.2f} % of {s['scored_tokens']} places; KL (top {s['top']}, lower "
            f"bound) {row['mean_kl']:.3g} mean, {row['max_kl']:.3g} largest"
        )
    return "\n".join(lines) + "\n"
