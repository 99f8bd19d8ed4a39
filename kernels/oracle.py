"""An expert layer in FP64 from uncompressed scales: the truth that executions are measured against.

Written from the number formats, on numpy, and without anything of the other modules, so that a
mistake there cannot hide here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


def fp4_value(nibble: int) -> float:
    """E2M1: sign, two exponent bits, one mantissa bit."""
    magnitude = FP4_MAGNITUDES[nibble & 7]
    return -magnitude if nibble & 8 else magnitude


def e4m3_value(byte: int) -> float:
    """E4M3 without infinities: bias 7, subnormals of 2^-9, NaN at 0x7F and 0xFF."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def dequantize(packed: np.ndarray, scale: np.ndarray, alpha: float) -> np.ndarray:
    """packed: uint8 [R, K / 2]; scale: E4M3 bytes, uint8 [R, K / 16]; returns float64 [R, K]."""
    fp4 = np.array([fp4_value(n) for n in range(16)])
    e4m3 = np.array([e4m3_value(b) for b in range(256)])
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2] = fp4[packed & 15]
    values[:, 1::2] = fp4[packed >> 4]
    return values * np.repeat(e4m3[scale], 16, axis=1) * alpha


def silu_gate(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def expert_layer(
    x: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    gate: list[np.ndarray],
    up: list[np.ndarray],
    down: list[np.ndarray],
    combine: Combine = silu_gate,
    weight_on_input: bool = False,
) -> np.ndarray:
    """Routed output, float64 [T, H], of experts given as dequantised matrices.

    gate, up: per expert [I, H]; down: per expert [H, I]. An id outside the list adds nothing.
    """
    out = np.zeros((x.shape[0], down[0].shape[0]))
    for t in range(x.shape[0]):
        for slot in range(topk_ids.shape[1]):
            e, share = int(topk_ids[t, slot]), float(topk_weights[t, slot])
            if not 0 <= e < len(down):
                continue
            row = x[t].astype(np.float64)
            if weight_on_input:
                row, share = row * share, 1.0
            out[t] += share * (down[e] @ combine(gate[e] @ row, up[e] @ row))
    return out
