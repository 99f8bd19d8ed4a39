"""The encoder's search: which window of byte values covers most bytes of a row."""

from __future__ import annotations

import numpy as np

# Bins counted at a time: the counts of a block stay in the core's cache.
_BLOCK_BINS = 1 << 16


def lowest_best_bases(rows: np.ndarray, window: int) -> np.ndarray:
    """For each row of uint8 [n, C] the lowest base whose window covers most of its bytes: uint8 [n].

    window: a power of two. Bases are 0 .. 256 - window.
    """
    top, bottom = rows.max(axis=1), rows.min(axis=1)
    # Where one window covers the whole row, the lowest such window ends at the row's largest byte.
    base = np.maximum(top, window - 1) - np.uint8(window - 1)
    wide = np.flatnonzero(top - bottom >= window)
    if wide.size:
        base[wide] = _by_counting(rows[wide], int(bottom[wide].min()), int(top[wide].max()), window)
    return base


def _by_counting(rows: np.ndarray, lowest: int, highest: int, window: int) -> np.ndarray:
    """`lowest_best_bases` by a histogram of each row over the byte values lowest .. highest."""
    # A best window holds at least one byte, so it starts at lowest - window + 1 or above.
    first = max(lowest - window + 1, 0)
    bins = max(highest - first + 1, window)
    windows = bins - window + 1
    step = min(max(_BLOCK_BINS // bins, 1), len(rows))
    dtype, key_dtype = _count_dtypes(rows.shape[1])
    # The key orders windows by count, then by the lower base.
    tie_break = (255 - first - np.arange(windows)).astype(key_dtype)
    offset = np.arange(step, dtype=np.int64)[:, None] * bins - first
    base = np.empty(len(rows), np.uint8)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        slots = (block + offset[: len(block)]).reshape(-1)
        total = np.bincount(slots, minlength=len(block) * bins).astype(dtype)
        span = 1
        # Each turn doubles the bins in a sum. The sums run on from row to row: one long loop instead of
        # many short ones; only those that start behind a row's last window mix two rows.
        while span < window:
            total[:-span] += total[span:]
            span *= 2
        key = total.reshape(-1, bins)[:, :windows].astype(key_dtype)
        key <<= 8
        key |= tie_break
        base[start : start + len(block)] = 255 - (key.max(axis=1) & 255)
    return base


def _count_dtypes(width: int) -> tuple[type[np.unsignedinteger], type[np.unsignedinteger]]:
    """The smallest types that hold a count up to `width`, and such a count with 8 more bits."""
    if width < 1 << 8:
        return np.uint8, np.uint16
    if width < 1 << 16:
        return np.uint16, np.uint32
    return np.uint32, np.uint64
