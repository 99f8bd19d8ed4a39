"""Made-up routings have the distribution that their name promises."""

from __future__ import annotations

import pytest
import torch

from vllm_csf.bench.geometries import ROUTINGS
from vllm_csf.bench.routing import route

EXPERTS, TOPK = 16, 4


def shares(kind: str, tokens: int = 20_000, seed: int = 0) -> torch.Tensor:
    """Of the tokens, how many go to each expert."""
    ids, _ = route(kind, tokens, EXPERTS, TOPK, seed, "cpu")
    return ids.flatten().long().bincount(minlength=EXPERTS) / tokens


@pytest.mark.parametrize("kind", ROUTINGS)
def test_ids_are_distinct_and_weights_sum_to_one(kind):
    ids, weights = route(kind, 500, EXPERTS, TOPK, 3, "cpu")
    assert ids.shape == weights.shape == (500, TOPK)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert set(ids.flatten().tolist()) <= set(range(EXPERTS))
    assert all(len(set(row)) == TOPK for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(500))


@pytest.mark.parametrize("kind", ROUTINGS)
def test_the_seed_decides(kind):
    first, again, other = (route(kind, 64, EXPERTS, TOPK, seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_uniform_is_even():
    # A share is the mean of 20,000 draws of probability 1/4: its standard deviation is 0.003.
    torch.testing.assert_close(shares("uniform"), torch.full((EXPERTS,), TOPK / EXPERTS), atol=0.015, rtol=0)


def test_zipf_is_drawn_by_weight_without_putting_back():
    """Against a simulation that draws one expert after the other."""
    g = torch.Generator().manual_seed(9)
    weights = 1 / torch.arange(1, EXPERTS + 1, dtype=torch.float64)
    drawn = torch.multinomial(weights.repeat(20_000, 1), TOPK, replacement=False, generator=g)
    want = drawn.flatten().bincount(minlength=EXPERTS) / 20_000
    found = shares("zipf").sort(descending=True).values
    torch.testing.assert_close(found, want.float(), atol=0.02, rtol=0)


def test_zipf_prefers_another_expert_with_another_seed():
    assert len({int(shares("zipf", 2_000, seed).argmax()) for seed in range(8)}) > 2


def test_hot_gives_one_expert_half_of_the_tokens():
    found = shares("hot").sort(descending=True).values
    assert found[0] == 0.5
    # The others share what is left: half of the tokens choose 3 of 15, half 4 of 15.
    torch.testing.assert_close(found[1:], torch.full((EXPERTS - 1,), 3.5 / 15), atol=0.015, rtol=0)


def test_one_token_of_a_hot_routing_goes_to_the_hot_expert():
    ids, _ = route("hot", 1, EXPERTS, TOPK, 0, "cpu")
    assert ids.shape == (1, TOPK)


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'even', expected one of uniform, zipf, hot"):
        route("even", 1, EXPERTS, TOPK, 0, "cpu")
