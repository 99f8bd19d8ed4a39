"""Servers of the serving tests, and what stock vLLM answers, each asked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from asking import ENVIRONMENT, FLAGS, PROMPTS, TOKENS, Answer, Server, has_cuda

from vllm_csf.bench import quality
from vllm_csf.bench.subjects import WITHOUT_PLUGIN, Subject


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
def stock(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Answer]]:
    """Answers of vLLM's engine without the plugin, from the same weights dequantised.

    In one process: of a server on the CPU the three processes take most of its time with importing vLLM.
    """
    answers: dict[str, list[Answer]] = {}

    def of(family: str) -> list[Answer]:
        if family not in answers:
            folder = tmp_path_factory.mktemp(f"stock-{family}")
            model = str(checkpoint(family, "dequantized"))
            subject = Subject("stock", model, FLAGS, WITHOUT_PLUGIN)
            found = quality.ask(
                quality.Wanted(model, [subject], PROMPTS, PROMPTS[:1], TOKENS, top=1), subject, folder
            )
            answers[family] = [
                Answer(*pair) for pair in zip(found["answers"], found["answer_logprobs"], strict=True)
            ]
            assert "csf" not in (folder / "stock.log").read_text().replace(model, "")
        return answers[family]

    return of
