"""One layer's experts in device memory and the call of the decode program on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import layout
from ..layout import PreparedMatrix


@dataclass(frozen=True)
class PreparedExperts:
    """w13 [2 I, H] and w2 [H, I] of E local experts, I padded to a multiple of 64.

    alpha13: FP32 [E, 2], the global scales of gate and up; alpha2: FP32 [E].
    """

    w13: PreparedMatrix
    w2: PreparedMatrix
    alpha13: torch.Tensor
    alpha2: torch.Tensor

    @property
    def experts(self) -> int:
        return self.w13.shape.experts

    @property
    def hidden(self) -> int:
        return self.w13.shape.k

    @property
    def inner(self) -> int:
        return self.w2.shape.k

    def addresses(self) -> list[int]:
        """The device addresses in the order of the host function's arguments."""
        out = []
        for matrix, alpha in ((self.w13, self.alpha13), (self.w2, self.alpha2)):
            out += [t.data_ptr() for t in (*matrix.tensors(), alpha)]
        return out


def prepare(
    w13: torch.Tensor,
    scale13: torch.Tensor,
    w2: torch.Tensor,
    scale2: torch.Tensor,
    alpha13: torch.Tensor,
    alpha2: torch.Tensor,
    native: bool = False,
) -> PreparedExperts:
    """Packs checkpoint-order tensors of one layer on their device.

    w13 uint8 [E, 2 I, H/2] (gate rows, then up rows), scale13 uint8 [E, 2 I, H/16], w2 uint8 [E, H, I/2],
    scale2 uint8 [E, H, I/16], alpha13 FP32 [E, 2], alpha2 FP32 [E].
    """
    experts, rows, hidden = w13.shape[0], w13.shape[1], w13.shape[2] * 2
    inner = -(-rows // 2 // layout.TILE_K) * layout.TILE_K
    up = layout.Shape(experts, 2 * inner, hidden, gated=True, native=native)
    down = layout.Shape(experts, hidden, inner, gated=False, native=native)
    return PreparedExperts(
        w13=layout.pack(
            layout.pad(w13, 2 * inner, hidden // 2, halves=2), layout.pad(scale13, 2 * inner, hidden // 16, halves=2), up
        ),
        w2=layout.pack(layout.pad(w2, hidden, inner // 2), layout.pad(scale2, hidden, inner // 16), down),
        alpha13=alpha13.to(torch.float32).contiguous(),
        alpha2=alpha2.to(torch.float32).contiguous(),
    )


@dataclass(frozen=True)
class Workspace:
    """Scratch of one call, shared by all layers of a geometry.

    Contents do not outlive the call, except that `flags` are zero before and after it.
    """

    entries: torch.Tensor
    pairs: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    partials: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def allocate(
        cls, tokens: int, topk: int, hidden: int, inner: int, workers: int, units: int, device: torch.device | str
    ) -> Workspace:
        """For calls of up to `tokens` tokens; `workers` warps with `units` accumulator fragments each."""
        pairs = tokens * topk

        def ints(n: int) -> torch.Tensor:
            return torch.empty(n, dtype=torch.int32, device=device)

        return cls(
            entries=ints(2 * (1 + pairs)),
            pairs=ints(pairs),
            h=torch.empty(pairs, inner, dtype=torch.bfloat16, device=device),
            y=torch.empty(pairs, hidden, dtype=torch.float32, device=device),
            partials=torch.empty(workers, units * 128, dtype=torch.float32, device=device),
            flags=torch.zeros(2 * workers, dtype=torch.int32, device=device),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.entries, self.pairs, self.h, self.y, self.partials, self.flags)


def run(
    program: Callable,
    experts: PreparedExperts,
    workspace: Workspace,
    x: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    out: torch.Tensor,
    expert_map: torch.Tensor | None,
    ctas: int,
) -> torch.Tensor:
    """Enqueues the layer on the current stream: out[t] = sum over k of router[t, k] * expert(ids[t, k])(x[t])."""
    tokens = x.shape[0]
    if tokens == 0:
        return out
    global_experts = expert_map.numel() if expert_map is not None else experts.experts
    program(
        x,
        out.data_ptr(),
        ids.data_ptr(),
        router.data_ptr(),
        expert_map.data_ptr() if expert_map is not None else 0,
        tokens,
        experts.hidden,
        experts.inner,
        global_experts,
        experts.experts,
        *experts.addresses(),
        *(t.data_ptr() for t in workspace.tensors()),
        ctas,
    )
    return out
