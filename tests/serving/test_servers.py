"""Real servers, asked over HTTP: same tokens as stock vLLM on the dequantised weights, logprobs to 1e-4."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from asking import Answer, ServerError, ask

pytestmark = pytest.mark.server

QWEN, GLM = "qwen3-moe", "glm4-moe"
FLAG = ("--quantization", "csf_nvfp4")
LAZY = ("--load-format", "csf")
EXPERT_PARALLEL = ("--enable-expert-parallel",)
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    family: str
    layout: str
    flags: tuple[str, ...] = ()
    ranks: int = 1
    models: int = 1  # a draft reports its layers itself


CASES = {
    "layout A": Case(QWEN, "csf"),
    "layout B": Case(QWEN, "container", LAZY),
    "layout C": Case(QWEN, "compressed-tensors", FLAG),
    "layout A, tensor parallel, lazy": Case(QWEN, "csf", LAZY, ranks=2),
    "layout C, tensor and expert parallel": Case(QWEN, "modelopt", (*FLAG, *EXPERT_PARALLEL), ranks=2),
    "layout A, MTP": Case(GLM, "csf", MTP, models=2),
    # Slow beside what the others show already, but the one with everything at once.
    "layout C, MTP, tensor and expert parallel, lazy": Case(
        GLM, "modelopt", (*FLAG, *LAZY, *MTP, *EXPERT_PARALLEL), ranks=2, models=2
    ),
}


def assert_same(found: list[Answer], want: list[Answer]) -> None:
    for number, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.tokens == b.tokens, f"prompt {number}"
        assert a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE), f"prompt {number}"


# `make test` is to take ten minutes at most: the longest ones, and what engines in one process show as well
# (tests/plugin/test_engine.py reads layout C in both dialects).
SLOW = (
    "layout C",
    "layout C, MTP, tensor and expert parallel, lazy",
    "layout C, tensor and expert parallel",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=[pytest.mark.slow] if n in SLOW else []) for n, c in CASES.items()],
)
def test_same_answers_as_stock_vllm(case: Case, checkpoint, serve, stock) -> None:
    want = stock(case.family)
    with serve(checkpoint(case.family, case.layout), *case.flags, ranks=case.ranks) as server:
        assert_same(ask(server), want)
        lines = re.findall(r"csf_nvfp4: .*", server.log_text())
    assert len(lines) == case.models
    for line in lines:
        share = float(re.search(r"resident \(([\d.]+) %\)", line)[1])
        assert 50 < share < 100, line


def test_csf_checkpoint_without_the_plugin_fails_loudly(checkpoint, serve) -> None:
    """vLLM takes it for a ModelOpt checkpoint and must not get as far as serving it."""
    with (
        pytest.raises(ServerError, match="vllm serve ended with"),
        serve(checkpoint(QWEN, "csf"), environment={"VLLM_PLUGINS": ""}),
    ):
        pass
