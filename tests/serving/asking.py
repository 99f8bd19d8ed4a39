"""How the serving tests start servers and what they ask them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_csf.bench.server import Server, ServerError, has_cuda

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["ENVIRONMENT", "FLAGS", "ROOT", "Answer", "Server", "ServerError", "ask", "has_cuda"]

PROMPTS = ([5, 17, 33, 99], [7, 201, 120, 64, 64, 12, 31, 90], list(range(10, 60)), [42])
TOKENS = 16
FLAGS = ("--max-model-len", "256", "--max-num-seqs", "4")
ENVIRONMENT = {
    # The first request for log probabilities compiles a helper for half a minute.
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]


def ask(server: Server) -> list[Answer]:
    """Greedy answers to the prompts, over HTTP."""
    choices = [
        server.complete(p, TOKENS, logprobs=1, return_token_ids=True, ignore_eos=True) for p in PROMPTS
    ]
    return [Answer(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]
