"""One layer's experts in device memory and the call of the decode program on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import layout
from ..layout import PreparedMatrix
from ..packer import Packer


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
    packer: Packer | None = None,
) -> PreparedExperts:
    """Packs checkpoint-order tensors of one layer on their device.

    w13 uint8 [E, 2 I, H/2] (gate rows, then up rows), scale13 uint8 [E, 2 I, H/16], w2 uint8 [E, H, I/2],
    scale2 uint8 [E, H, I/16], alpha13 FP32 [E, 2], alpha2 FP32 [E]. packer: of a GPU, else torch packs.
    """
    return PreparedExperts(
        w13=prepare_matrix(w13, scale13, gated=True, native=native, packer=packer),
        w2=prepare_matrix(w2, scale2, gated=False, native=native, packer=packer),
        alpha13=alpha13.to(torch.float32).contiguous(),
        alpha2=alpha2.to(torch.float32).contiguous(),
    )


def prepare_matrix(
    weight: torch.Tensor,
    scale: torch.Tensor,
    gated: bool,
    native: bool = False,
    packer: Packer | None = None,
) -> PreparedMatrix:
    """One stack, uint8 [E, R, K/2] and [E, R, K/16]; the width of an expert is padded to a tile.

    `gated`: rows are gate over up, each half padded at its own end; else the columns are padded.
    """
    return prepare_groups(weight, [(slice(None), scale)], gated, native, packer)


def prepare_groups(
    weight: torch.Tensor,
    scales: Iterable[tuple[slice, torch.Tensor]],
    gated: bool,
    native: bool = False,
    packer: Packer | None = None,
) -> PreparedMatrix:
    """As `prepare_matrix`, with the scales of some experts at a time."""
    shape = _shape_of(weight, gated, native)
    halves = 2 if gated else 1
    padded = (
        (
            group,
            layout.pad(weight[group], shape.rows, shape.k // 2, halves),
            layout.pad_scales(scale, shape.rows, shape.k // layout.GROUP, halves),
        )
        for group, scale in scales
    )
    if packer is not None:
        return packer.pack_groups(padded, shape, weight.device)
    parts = [layout.pack(w, s, replace(shape, experts=w.shape[0])) for _, w, s in padded]
    return parts[0] if len(parts) == 1 else layout.concatenate(parts)


def _shape_of(weight: torch.Tensor, gated: bool, native: bool) -> layout.Shape:
    """Of the prepared form of uint8 [E, R, K/2]."""
    experts, rows, columns = weight.shape[0], weight.shape[1], weight.shape[2] * 2
    if gated:
        rows = 2 * pad_to_tile(rows // 2)
    else:
        columns = pad_to_tile(columns)
    return layout.Shape(experts, rows, columns, gated, native)


def pad_to_tile(width: int) -> int:
    """The width of an expert as the kernels see it."""
    return -(-width // layout.TILE_K) * layout.TILE_K


def slots(pairs: Any, experts: Any, least: Callable = min) -> Any:
    """Most slots that a prefill program gives to so many pairs: those of an expert start at multiples of
    eight. `least`: of two numbers, be they known when the program is compiled or not."""
    return (pairs + 7 * least(pairs, experts) + 7) // 8 * 8


@dataclass(frozen=True)
class Workspace:
    """Scratch of one call, shared by all layers of a geometry; contents do not outlive the call."""

    entries: torch.Tensor
    pairs: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    partials: torch.Tensor

    @classmethod
    def within(
        cls,
        take: Callable[[int], torch.Tensor],
        tokens: int,
        topk: int,
        hidden: int,
        inner: int,
        workers: int,
        units: int,
    ) -> Workspace:
        """Views of `take(bytes)`, a uint8 buffer, for calls of up to `tokens` tokens.

        `workers`: warps of a launch; `units`: accumulator fragments of a warp.
        """
        pairs = tokens * topk
        sizes = (8 * (1 + pairs), 4 * pairs, 2 * pairs * inner, 4 * pairs * hidden, workers * units * 512)
        aligned = [-(-size // 256) * 256 for size in sizes]
        parts = torch.split(take(sum(aligned)), aligned)
        dtypes = (torch.int32, torch.int32, torch.bfloat16, torch.float32, torch.float32)
        return cls(*(p.view(dtype) for p, dtype in zip(parts, dtypes, strict=True)))

    @classmethod
    def wide(
        cls,
        take: Callable[[int], torch.Tensor],
        tokens: int,
        topk: int,
        hidden: int,
        inner: int,
        experts: int,
    ) -> Workspace:
        """As `within`, of a prefill program: `y` is BF16, `partials` holds the rearranged tokens, BF16."""
        pairs = tokens * topk
        held = slots(pairs, experts)
        sizes = (8 * (1 + pairs), 4 * held, 2 * held * inner, 2 * pairs * hidden, 2 * tokens * hidden)
        aligned = [-(-size // 256) * 256 for size in sizes]
        parts = torch.split(take(sum(aligned)), aligned)
        dtypes = (torch.int32, torch.int32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
        return cls(*(p.view(dtype) for p, dtype in zip(parts, dtypes, strict=True)))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.entries, self.pairs, self.h, self.y, self.partials)


def run(
    program: Callable,
    experts: PreparedExperts,
    workspace: Workspace,
    flags: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    out: torch.Tensor,
    expert_map: torch.Tensor | None,
    ctas: int,
) -> torch.Tensor:
    """Enqueues out[t] = sum over k of router[t, k] * expert(ids[t, k])(x[t]) on the current stream.

    x, out: bf16 [T, H]; ids: int32 or int64 [T, k], as the program was compiled for; router: FP32 [T, k];
    expert_map: int32 [global experts] or None; flags: int32 [2 * warps * ctas] of the
    program, zero before and after.
    """
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
        flags.data_ptr(),
        ctas,
    )
    return out
