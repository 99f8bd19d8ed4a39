"""KL divergence, perplexity and agreement, against numbers worked out otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_csf.bench import quality, texts
from vllm_csf.bench.records import BenchError


def place(logits: torch.Tensor, top: int) -> dict[str, float]:
    logs = logits.double().log_softmax(-1)
    return {str(int(i)): float(logs[i]) for i in logs.topk(top).indices}


def exact(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = (x.double().log_softmax(-1) for x in (p, q))
    return float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))


@pytest.fixture
def logits():
    g = torch.Generator().manual_seed(0)
    p = 3 * torch.randn(50, generator=g)
    return p, p + 0.3 * torch.randn(50, generator=g)


def test_divergence_is_exact_over_the_whole_vocabulary(logits):
    p, q = logits
    found = quality.divergence(place(p, 50), place(q, 50))
    assert found == pytest.approx(exact(p, q), rel=1e-9)


def test_divergence_over_the_best_is_a_close_lower_bound(logits):
    p, q = logits
    found = quality.divergence(place(p, 20), place(q, 20))
    assert 0.5 * exact(p, q) < found <= exact(p, q)


def test_divergence_of_equals_is_zero(logits):
    assert quality.divergence(place(logits[0], 20), place(logits[0], 20)) == 0.0


def test_perplexity_of_even_guesses_is_their_number():
    even = {str(t): math.log(1 / 8) for t in range(8)}
    assert quality.perplexity([[even, even], [even]], [[0, 1, 2], [3, 4]]) == pytest.approx(8)


def result(answers, logprobs, scored) -> dict:
    return {"answers": answers, "answer_logprobs": logprobs, "scored": scored}


def test_agreement_ends_at_the_first_difference():
    same = {"1": -0.5, "2": -1.5}
    a = result([[1, 2, 3], [4, 5, 6]], [[-0.1, -0.2, -0.3], [-0.4, -0.5, -0.6]], [[same, same]])
    b = result([[1, 2, 3], [4, 9, 6]], [[-0.1, -0.2, -0.35], [-0.4, -9.0, -9.0]], [[same, same]])
    found = quality.agreement(a, b)
    assert not found["identical"]
    assert (found["answers"], found["answers_equal"]) == (2, 1)
    assert (found["tokens"], found["tokens_until_difference"]) == (6, 4)
    assert found["max_logprob_difference"] == pytest.approx(0.05)
    assert found["mean_kl"] == found["max_kl"] == 0
    assert found["top_token_equal"] == 1.0
    assert quality.agreement(a, a)["identical"]


@pytest.mark.parametrize("kind", ["answer_logprobs", "scored"])
def test_one_bit_is_enough_to_differ(kind):
    a = result([[1]], [[-0.5]], [[{"1": -0.5}]])
    bit = math.nextafter(-0.5, 0)
    b = a | {kind: [[bit]] if kind == "answer_logprobs" else [[{"1": bit}]]}
    assert not quality.agreement(a, b)["identical"]


SIZES = {"prompts": 5, "prompt_tokens": 7, "context": 16, "pieces": 3, "seed": 0}


def test_made_up_prompts_hold_no_special_tokens_and_depend_on_the_seed(checkpoint):
    folder = str(checkpoint("qwen3-moe", "modelopt"))
    prompts, scored = texts.choose(folder, None, **SIZES)
    assert [len(p) for p in prompts] == [7] * 5
    assert min(min(p) for p in prompts) > 2
    assert scored == prompts[: texts.MADE_UP_PIECES]
    assert texts.choose(folder, None, **SIZES)[0] == prompts
    assert texts.choose(folder, None, **SIZES | {"seed": 1})[0] != prompts


def test_a_text_is_cut_into_pieces_whose_beginnings_are_asked(checkpoint, tmp_path):
    path = tmp_path / "text"
    path.write_text("0123456789" * 10)  # a token each
    prompts, scored = texts.choose(str(checkpoint("qwen3-moe", "modelopt")), path, **SIZES)
    assert [len(s) for s in scored] == [16] * 3
    assert prompts[:3] == [s[:7] for s in scored]
    assert len(prompts) == 5
    path.write_text("1")
    with pytest.raises(BenchError, match="has 1 tokens, expected at least 2"):
        texts.choose(str(checkpoint("qwen3-moe", "modelopt")), path, **SIZES)
