"""Ratios and their intervals: they hold the truth about as often as they say."""

from __future__ import annotations

import random

import pytest

from vllm_csf.bench.statistics import independent_ratio, ratio, spread


def test_a_ratio_is_of_medians():
    assert ratio([2, 4, 9], [1, 2, 3]).value == 2
    assert independent_ratio([2, 4, 9], [1, 2]).value == pytest.approx(4 / 1.5)


def test_what_both_arms_share_of_the_noise_cancels():
    drift = [1.0, 1.5, 0.7, 1.2, 2.0]
    found = ratio([1.1 * d for d in drift], drift)
    assert found.low == pytest.approx(1.1)
    assert found.high == pytest.approx(1.1)
    assert found.decided
    assert not independent_ratio([1.1 * d for d in drift], drift).decided


@pytest.mark.parametrize("rounds", [3, 5, 12])
def test_equal_arms_are_seldom_told_apart(rounds):
    draw = random.Random(rounds)
    wrong = sum(
        ratio(*([draw.lognormvariate(0, 0.1) for _ in range(rounds)] for _ in "ab")).decided
        for _ in range(200)
    )
    assert wrong <= 20  # 5 % of 200 are 10, with a standard deviation of 3


def test_a_large_difference_is_told():
    draw = random.Random(1)
    a, b = ([m * draw.lognormvariate(0, 0.01) for _ in range(5)] for m in (1.2, 1.0))
    found = ratio(a, b)
    assert found.decided
    assert found.low < 1.2 < found.high
    assert "noise" not in str(found)


def test_one_round_has_no_interval():
    found = ratio([2.0], [1.0])
    assert (found.low, found.high, found.decided) == (None, None, False)
    assert str(found) == "2.000 (one round)"


@pytest.mark.parametrize("pair", [([], []), ([1.0], [1.0, 2.0])])
def test_rounds_have_to_match(pair):
    with pytest.raises(ValueError, match="rounds, expected the same number"):
        ratio(*pair)


def test_spread():
    assert spread([9, 10, 12]) == pytest.approx(0.3)
    assert spread([5]) == 0
