"""Servers and checkpoints of the serving tests, each made once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from server import Server, has_cuda  # noqa: E402

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


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """A server on the CPU in float32; to be used in a `with` statement."""
    if has_cuda():
        pytest.skip("these servers run on the CPU build of vLLM; examples/serve_check.py is for CUDA")
    logs = tmp_path_factory.mktemp("logs")

    def make(model: Path, *flags: str, ranks: int = 1, environment: dict[str, str] | None = None) -> Server:
        log = logs / f"{len(list(logs.iterdir()))}.log"
        environment = ENVIRONMENT | (environment or {})
        return Server(model, [*FLAGS, *flags], log=log, cpu=True, ranks=ranks, environment=environment)

    return make


@pytest.fixture(scope="session")
def stock(checkpoint, serve) -> Callable[[str], list[Answer]]:
    """Answers of vLLM without the plugin, from the same weights dequantised."""
    answers: dict[str, list[Answer]] = {}

    def of(family: str) -> list[Answer]:
        if family not in answers:
            model = checkpoint(family, "dequantized")
            with serve(model, environment={"VLLM_PLUGINS": ""}) as server:
                answers[family] = ask(server)
                assert "csf" not in server.log_text().replace(str(model), "")
        return answers[family]

    return of
