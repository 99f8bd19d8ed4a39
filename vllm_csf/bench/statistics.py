"""Medians, spreads, and ratios with an interval that says how far they are to be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
CONFIDENCE = 0.95
# Of Student's t, two-sided, with 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)


@dataclass(frozen=True)
class Ratio:
    """Of medians. low, high: a 95 % interval; None where one round is all there is."""

    value: float
    low: float | None
    high: float | None

    @property
    def decided(self) -> bool:
        """Whether the difference is larger than the noise."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.value:.3f} (one round)"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})" + ("" if self.decided else ", noise")


def ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """a over b, measured in the same rounds, in order: the rounds are drawn again, with both values of one.

    Raises ValueError where there are no rounds, or not as many of one as of the other.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} rounds, expected the same number, at least one")
    value = statistics.median(a) / statistics.median(b)
    if len(a) == 1:
        return Ratio(value, None, None)
    return Ratio(value, *_interval([list(a), list(b)], paired=True, seed=seed))


def independent_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """a over b of different runs, whose rounds have nothing to do with each other."""
    if not a or not b:
        raise ValueError(f"{len(a)} and {len(b)} rounds, expected at least one of each")
    value = statistics.median(a) / statistics.median(b)
    if len(a) == 1 or len(b) == 1:
        return Ratio(value, None, None)
    return Ratio(value, *_interval([list(a), list(b)], paired=False, seed=seed))


def _interval(values: list[list[float]], paired: bool, seed: int) -> tuple[float, float]:
    """The wider of two: rounds drawn again and again, which flatters few of them, and Student's."""
    drawn, student = _drawn(values, paired, seed), _student(values, paired)
    return min(drawn[0], student[0]), max(drawn[1], student[1])


def _student(values: list[list[float]], paired: bool) -> tuple[float, float]:
    """Around the mean of the logarithms."""
    above, below = ([math.log(v) for v in one] for one in values)
    if paired:
        above, below = [a - b for a, b in zip(above, below, strict=True)], [0.0, 0.0]
    middle = statistics.mean(above) - statistics.mean(below)
    error = math.sqrt(sum(statistics.variance(one) / len(one) for one in (above, below)))
    freedom = len(above) - 1 if paired else min(len(above), len(below)) - 1
    reach = error * (STUDENT[freedom - 1] if freedom <= len(STUDENT) else 2.0)
    return math.exp(middle - reach), math.exp(middle + reach)


def _drawn(values: list[list[float]], paired: bool, seed: int) -> tuple[float, float]:
    draw = np.random.default_rng(seed)
    picks = [draw.integers(len(one), size=(RESAMPLES, len(one))) for one in values]
    if paired:
        picks[1] = picks[0]
    above, below = (np.median(np.asarray(one)[pick], axis=1) for one, pick in zip(values, picks, strict=True))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(above / below, [tail, 100 - tail])
    return float(low), float(high)


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median, 0 of one value."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0
