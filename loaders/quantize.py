"""Round-to-nearest NVFP4 as ModelOpt does it: FP4 values, an E4M3 scale per 16, one FP32 scale per tensor.

value = fp4 * e4m3 * global_scale,   global_scale = amax / (6 * 448)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 16
FP4_MAX, E4M3_MAX = 6.0, 448.0
# Halfway points between neighbouring FP4 magnitudes; ties go to the even code.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Quantized:
    """packed: uint8 [R, K/2], low nibble the even column; scale: E4M3 bytes uint8 [R, K/16]; FP32 scalar."""

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """FP32 [R, K]; the product with the global scale is the only rounding."""
        table = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES))
        pairs = torch.stack((table[(self.packed & 15).long()], table[(self.packed >> 4).long()]), -1)
        block = self.scale.view(torch.float8_e4m3fn).float().repeat_interleave(GROUP, -1)
        return pairs.flatten(-2) * block * self.global_scale


def global_scale(*weights: torch.Tensor) -> torch.Tensor:
    """The FP32 scale that tensors share, adjusted so that its reciprocal's reciprocal is itself.

    Checkpoints of other dialects store the reciprocal; both must mean the same number.
    """
    scale = torch.stack([w.abs().amax() for w in weights]).amax().float() / (FP4_MAX * E4M3_MAX)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    while 1 / (1 / scale) != scale:
        scale = torch.nextafter(scale, torch.tensor(torch.inf))
    return scale


def quantize(weight: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    """Quantises FP32 [R, K], K a multiple of 16, with a given global scale or its own."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, expected [R, K] with K a multiple of {GROUP}"
        )
    scale = global_scale(weight) if scale is None else scale
    blocks = weight.float().unflatten(-1, (-1, GROUP))
    wanted = blocks.abs().amax(-1) / FP4_MAX / scale
    stored = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = stored.float().unsqueeze(-1) * scale
    codes = fp4_codes(torch.where(step > 0, blocks / step, 0.0)).flatten(-2)
    return Quantized(codes[:, 0::2] | codes[:, 1::2] << 4, stored.view(torch.uint8), scale)


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes of FP32 values, ties to even, saturating at 6: uint8, same shape."""
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for border in _TIES_DOWN:
        codes += magnitude > border
    for border in _TIES_UP:
        codes += magnitude >= border
    return codes | (values < 0).to(torch.uint8) << 3
