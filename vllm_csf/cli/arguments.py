"""The parser of the commands, and types of arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

USAGE = 2
LIMIT = 2**63


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line, as every other error is."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return int(_number(text, int, "a whole number of at least 1", lambda value: value >= 1))


def seed(text: str) -> int:
    """What torch takes as one, without its negative numbers."""
    return int(_number(text, int, "a whole number of at least 0", lambda value: value >= 0))


def above_zero(text: str) -> float:
    return _number(text, float, "a number above 0", lambda value: value > 0)


def not_negative(text: str) -> float:
    return _number(text, float, "a number of at least 0", lambda value: value >= 0)


def at_least_one(text: str) -> float:
    return _number(text, float, "a number of at least 1", lambda value: value >= 1)


def share(text: str) -> float:
    return _number(text, float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _number(
    text: str, kind: Callable[[str], float], expected: str, allowed: Callable[[float], bool]
) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not abs(value) < LIMIT or not allowed(value):  # the first is true of NaN
        raise argparse.ArgumentTypeError(f"is {text!r}, expected {expected}")
    return value
