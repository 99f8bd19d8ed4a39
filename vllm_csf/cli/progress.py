"""The progress bar of the commands: on stderr, and only where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int, unit: str, title: str, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields what is to be told of each piece of work; bytes are shown with their rate and the time left."""
    from tqdm import tqdm

    scaled = unit == "B"
    with tqdm(
        total=total,
        unit=unit,
        unit_scale=scaled,
        unit_divisor=1024 if scaled else 1000,
        desc=title,
        disable=quiet or not sys.stderr.isatty(),
        file=sys.stderr,
    ) as shown:
        yield shown.update


def size(nbytes: float) -> str:
    """12.34 MiB."""
    value, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f} {unit}"
