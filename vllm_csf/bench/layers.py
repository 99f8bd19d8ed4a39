"""Random expert layers and their truth in FP64, for measurements and tests. Needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.moe import experts as moe
from ..kernels.packer import Packer
from .routing import route

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Stack:
    """FP4 bytes, scale bytes and global scales of one layer, as `moe.experts.prepare` takes them."""

    w13: torch.Tensor
    scale13: torch.Tensor
    w2: torch.Tensor
    scale2: torch.Tensor
    alpha13: torch.Tensor
    alpha2: torch.Tensor

    def prepare(self, native: bool, packer: Packer | None = None) -> moe.PreparedExperts:
        """The layer as the kernels take it, with compressed or native scales, packed by torch or `packer`."""
        sources = self.w13, self.scale13, self.w2, self.scale2, self.alpha13, self.alpha2
        return moe.prepare(*sources, native=native, packer=packer)


def random_stack(
    experts: int,
    hidden: int,
    width: int,
    share: float,
    seed: int = 0,
    device: str = "cpu",
    wild: bool = False,
) -> Stack:
    """`share` of the scale bytes are any finite positive ones (`wild`: zero and subnormals too)."""
    g = torch.Generator(device=device).manual_seed(seed)

    def draw(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, size, generator=g, device=device, dtype=torch.int32).to(torch.uint8)

    def scales(size: tuple[int, ...]) -> torch.Tensor:
        usual = draw(44, 58, size)
        odd = torch.rand(size, generator=g, device=device) < share
        return torch.where(odd, draw(0 if wild else 8, 127, size), usual)

    def alphas(size: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(size, generator=g, device=device) * 0.01 + 0.005

    return Stack(
        w13=draw(0, 256, (experts, 2 * width, hidden // 2)),
        scale13=scales((experts, 2 * width, hidden // 16)),
        w2=draw(0, 256, (experts, hidden, width // 2)),
        scale2=scales((experts, hidden, width // 16)),
        alpha13=alphas((experts, 2)),
        alpha2=alphas((experts,)),
    )


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP64 weights without their global scale."""
    table = torch.tensor(FP4, dtype=torch.float64, device=packed.device)
    values = torch.stack((table[(packed & 15).int()], table[(packed >> 4).int()]), -1).flatten(-2)
    return values * scale.view(torch.float8_e4m3fn).to(torch.float64).repeat_interleave(16, -1)


def truth(stack: Stack, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's output in FP64; ids outside the experts add nothing."""
    width = stack.w13.shape[1] // 2
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        if not 0 <= expert < stack.w13.shape[0]:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        h = x.double()[token] @ dequantize(stack.w13[expert], stack.scale13[expert]).T
        gate = h[:, :width] * stack.alpha13[expert, 0].double()
        up = h[:, width:] * stack.alpha13[expert, 1].double()
        y = (gate * torch.sigmoid(gate) * up) @ dequantize(stack.w2[expert], stack.scale2[expert]).T
        out.index_add_(0, token, y * (stack.alpha2[expert].double() * weights[token, slot].double())[:, None])
    return out


def random_routing(
    tokens: int, experts: int, topk: int, seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform; see `routing.route`."""
    return route("uniform", tokens, experts, topk, seed, device)
