"""Servers of the serving tests, and what stock vLLM answers, each asked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from asking import ENVIRONMENT, FLAGS, Answer, Server, ask, has_cuda


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
