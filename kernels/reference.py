"""The expert layer in plain torch, straight from compressed block scales (CPU and CUDA).

What it computes, for token t with activations x and routed experts e of weight r:

    w13, w2  = fp4 * e4m3                     exact in float32 (6 significant bits)
    h        = round(act(alpha13 * (x @ w13^T)))   float32 accumulation, rounded to x.dtype once
    out[t]   = sum_e r * alpha2 * (h @ w2^T)       float32, rounded to x.dtype once

The global scales (alpha) stay out of the operands. Gate and up keep an alpha each. Scales stay
compressed; the planes of the experts in use are decoded into one scratch shared by all layers.

Two ways through the experts, same arithmetic:

* grouped: visits the experts that were hit. Reads the routing on the host, so it is not for
  CUDA graph capture.
* fixed: shapes depend on the number of tokens alone, no host synchronisation. Captured graphs
  use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .activation import Activation

SLAB_ROWS = 16
GROUP = 16
POSITION_BITS = 24
POSITION_MASK = (1 << POSITION_BITS) - 1
# What a group of experts may take of the scratch before it is split. Large enough for tens of
# experts of a small model, small beside the weights of a large one.
GROUP_BYTES = 256 << 20
MAX_GROUP = 16


@dataclass(frozen=True)
class ScalePlanes:
    """P planes of equal shape [rows, cols], compressed, or kept as they are for a comparison.

    fixed: uint8 [P, rows / 16 * 16 * (1 + cols / 2)], the slabs as stored in a checkpoint.
    offsets: int64 [P + 1]; plane p owns entries[offsets[p] : offsets[p + 1]].
    entries: int32 [capacity]; low 24 bits row * cols + col, high 8 bits the byte.
    longest: no plane has more exceptions than this; a host number, so that it can size tensors.
    native: `fixed` holds the scale bytes themselves, uint8 [P, rows * cols], and there are no exceptions.
    """

    fixed: torch.Tensor
    offsets: torch.Tensor
    entries: torch.Tensor
    rows: int
    cols: int
    longest: int
    native: bool = False

    @classmethod
    def of_bytes(cls, scales: torch.Tensor, rows: int, cols: int) -> ScalePlanes:
        """Native, of uint8 [P, rows * cols]."""
        offsets = torch.zeros(scales.shape[0] + 1, dtype=torch.int64, device=scales.device)
        return cls(
            scales, offsets, torch.empty(0, dtype=torch.int32, device=scales.device), rows, cols, 0, True
        )

    def expand(self) -> ScalePlanes:
        """The same scales, native."""
        if self.native:
            return self
        size, device = self.rows * self.cols, self.fixed.device
        index = torch.arange(self.fixed.shape[0], device=device)
        out = torch.empty(len(index), size + 1, dtype=torch.uint8, device=device)
        scale = decode_planes(self, index, out).reshape(-1, size).contiguous()
        return ScalePlanes.of_bytes(scale, self.rows, self.cols)


@dataclass(frozen=True)
class ExpertLayer:
    """E experts of hidden size H and width I; G is 2 with a gated activation (gate over up), else 1.

    w13: uint8 [E, G * I, H / 2]; w2: uint8 [E, H, I / 2]; low nibble is the even column.
    scales13: G * E planes [I, H / 16], plane e * G + g; scales2: E planes [H, I / 16].
    alphas13: float32 [E, G]; alphas2: float32 [E]: global scales as multipliers.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    scales13: ScalePlanes
    scales2: ScalePlanes
    alphas13: torch.Tensor
    alphas2: torch.Tensor
    activation: Activation

    @property
    def experts(self) -> int:
        return self.w2.shape[0]

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    @property
    def width(self) -> int:
        return 2 * self.w2.shape[2]


class Scratch:
    """One growing buffer of a device, shared by every layer that runs there one after the other."""

    def __init__(self, device: torch.device | str) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def reserve(self, nbytes: int) -> None:
        """Grow to nbytes. Captured graphs hold the old address: grow before the first capture."""
        if nbytes > self.nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._buffer.device)

    def take(self, nbytes: int) -> torch.Tensor:
        self.reserve(nbytes)
        return self._buffer[:nbytes]


def scratch_bytes(experts: int, hidden: int, width: int, gated: bool) -> int:
    """Bytes of scratch that a layer of this geometry uses."""
    return group_size(experts, hidden, width, gated) * _bytes_per_expert(hidden, width, gated)


def group_size(experts: int, hidden: int, width: int, gated: bool) -> int:
    """Experts whose weights are decoded at a time."""
    fit = GROUP_BYTES // _bytes_per_expert(hidden, width, gated)
    return max(1, min(fit, experts, MAX_GROUP))


def decode_planes(planes: ScalePlanes, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Decode planes[index] into out.

    index: int64 [S]; out: uint8 [S, rows * cols + 1], whose last column is a dump for the lanes of
    planes with fewer exceptions than the longest. Returns the E4M3 bytes, uint8 [S, rows, cols].
    """
    S, R, C = index.shape[0], planes.rows, planes.cols
    if planes.native:
        return planes.fixed[index].view(S, R, C)
    slabs = planes.fixed[index].view(S, R // SLAB_ROWS, SLAB_ROWS * (1 + C // 2))
    base = slabs[:, :, :SLAB_ROWS].unsqueeze(-1)
    codes = slabs[:, :, SLAB_ROWS:].view(S, R // SLAB_ROWS, SLAB_ROWS, C // 2)
    image = out[:, : R * C].view(S, R // SLAB_ROWS, SLAB_ROWS, C // 2, 2)
    torch.add(codes & 15, base, out=image[..., 0])
    torch.add(codes >> 4, base, out=image[..., 1])
    if planes.longest:
        lane = torch.arange(planes.longest, device=index.device)
        start = planes.offsets[index].unsqueeze(1)
        count = planes.offsets[index + 1].unsqueeze(1) - start
        words = planes.entries[(start + lane).clamp_(max=planes.entries.shape[0] - 1)]
        position = torch.where(lane < count, words & POSITION_MASK, R * C)
        out.scatter_(1, position.long(), ((words >> POSITION_BITS) & 255).to(torch.uint8))
    return out[:, : R * C].view(S, R, C)


def nibble_table(device: torch.device) -> torch.Tensor:
    """FP4 values of every byte, float32 [256, 2], low nibble first.

    Built by arithmetic on the device: a constant copied from the host could not be captured, and
    one cached beside the weights would be lost when the engine sleeps at level 2.
    """
    byte = torch.arange(256, device=device)
    nibble = torch.stack((byte & 15, byte >> 4), dim=1)
    magnitude = (nibble & 7).float()
    # 0 .5 1 1.5 2 3 4 6: steps of a half to 2, of 1 to 4, of 2 beyond.
    value = magnitude / 2 + (magnitude - 4).clamp_(min=0) / 2 + (magnitude - 6).clamp_(min=0)
    return torch.where(nibble >= 8, -value, value)


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Exact weights without their global scale.

    packed: uint8 [..., K / 2]; scale: E4M3 bytes, uint8 [..., K / 16]; out: float32 [..., K].
    """
    torch.index_select(table, 0, packed.reshape(-1).int(), out=out.view(-1, 2))
    groups = out.view(*scale.shape, GROUP)
    groups.mul_(scale.view(torch.float8_e4m3fn).float().unsqueeze(-1))
    return out


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> torch.Tensor:
    """Local expert of every slot, int64; -1 where the slot is not ours (or is no expert at all)."""
    ids = topk_ids.long()
    known = experts if expert_map is None else expert_map.shape[0]
    inside = (ids >= 0) & (ids < known)
    if expert_map is not None:
        ids = expert_map[ids.clamp(0, known - 1)].long()
    return torch.where(inside & (ids >= 0) & (ids < experts), ids, -1)


def forward(
    layer: ExpertLayer,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    scratch: Scratch | None = None,
    fixed_shapes: bool = False,
) -> torch.Tensor:
    """Routed output of the layer's experts.

    x: [T, H] in float32, bfloat16 or float16; topk_weights: [T, k]; topk_ids: int32 or int64 [T, k],
    global ids if expert_map (int [global experts], -1 for experts of other ranks) is given.
    Returns [T, H] in x.dtype. Raises ValueError where the shapes do not agree.
    """
    _check_inputs(layer, x, topk_weights, topk_ids, apply_router_weight_on_input)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if x.shape[0] and topk_ids.shape[1]:
        run = _Run(layer, scratch or Scratch(x.device), x.dtype)
        ids = local_ids(topk_ids, expert_map, layer.experts)
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            x, weights = (x * topk_weights.to(x.dtype)), torch.ones_like(weights)
        if not fixed_shapes:
            _grouped(run, x, weights, ids, out)
        elif ids.numel() <= layer.experts:
            _fixed_by_slot(run, x, weights, ids, out)
        else:
            _fixed_by_expert(run, x, weights, ids, out)
    return out.to(x.dtype)


class _Run:
    """Decoded experts of one call: scratch views, and the two products."""

    def __init__(self, layer: ExpertLayer, scratch: Scratch, dtype: torch.dtype) -> None:
        self.layer = layer
        self.dtype = dtype
        self.table = nibble_table(layer.w2.device)
        shape = (layer.experts, layer.hidden, layer.width, layer.activation.gated)
        self.group = group_size(*shape)
        self._floats, self._bytes = _split(scratch.take(scratch_bytes(*shape)), self.group, *shape[1:])

    def groups(self, experts: torch.Tensor) -> Iterator[slice]:
        for start in range(0, experts.shape[0], self.group):
            yield slice(start, start + self.group)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x: float32 [S, T, H] (or [1, T, H] for all), experts: int64 [S]; float32 [S, T, H]."""
        layer, S = self.layer, experts.shape[0]
        halves = 2 if layer.activation.gated else 1
        planes = (experts.unsqueeze(1) * halves + torch.arange(halves, device=x.device)).view(-1)
        w13 = self._decode(layer.w13, layer.scales13, experts, planes)
        h = torch.matmul(x, w13.view(S, halves * layer.width, layer.hidden).transpose(1, 2))
        h = h.view(S, -1, halves, layer.width) * layer.alphas13[experts].view(S, 1, halves, 1)
        h = layer.activation(h).to(self.dtype).float()
        w2 = self._decode(layer.w2, layer.scales2, experts, experts)
        y = torch.matmul(h, w2.view(S, layer.hidden, layer.width).transpose(1, 2))
        return y * layer.alphas2[experts].view(S, 1, 1)

    def _decode(
        self, packed: torch.Tensor, planes: ScalePlanes, experts: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        n, R, C = index.shape[0], planes.rows, planes.cols
        scale = decode_planes(planes, index, self._bytes[: n * (R * C + 1)].view(n, R * C + 1))
        weights = self._floats[: n * R * C * GROUP].view(n, R, C * GROUP)
        return dequantize(packed[experts], scale, self.table, weights)


def _grouped(run: _Run, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    for expert in torch.unique(ids[ids >= 0]).tolist():
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        experts = torch.full((1,), expert, dtype=torch.long, device=x.device)
        y = run(x[token].float().unsqueeze(0), experts)[0]
        out.index_add_(0, token, y * weights[token, slot].unsqueeze(1))


def _fixed_by_slot(
    run: _Run, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
) -> None:
    k = ids.shape[1]
    token = torch.arange(ids.numel(), device=x.device) // k
    flat = ids.reshape(-1)
    share = torch.where(flat >= 0, weights.reshape(-1), 0.0)
    for part in run.groups(flat):
        y = run(x[token[part]].float().unsqueeze(1), flat[part].clamp(min=0)).squeeze(1)
        # A remote slot runs expert 0, whose output may be NaN: select, do not multiply by zero.
        y = torch.where(flat[part].unsqueeze(1) >= 0, y * share[part].unsqueeze(1), 0.0)
        out.index_add_(0, token[part], y)


def _fixed_by_expert(
    run: _Run, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
) -> None:
    everyone = torch.arange(run.layer.experts, device=x.device)
    rows = x.float().unsqueeze(0)
    for part in run.groups(everyone):
        hit = ids.unsqueeze(0) == everyone[part].view(-1, 1, 1)
        share = torch.where(hit, weights.unsqueeze(0), 0.0).sum(-1, keepdim=True)
        y = run(rows, everyone[part])
        out += torch.where(hit.any(-1, keepdim=True), y * share, 0.0).sum(0)


def _bytes_per_expert(hidden: int, width: int, gated: bool) -> int:
    scale_bytes, floats = _per_expert(hidden, width, gated)
    return scale_bytes + 4 * floats


def _per_expert(hidden: int, width: int, gated: bool) -> tuple[int, int]:
    """(scale bytes with their dump columns, float32 weights) of the larger of the two products."""
    halves = 2 if gated else 1
    elements = halves * hidden * width
    # Rounded up to 16 so that the float32 part stays aligned behind any number of experts.
    return -(-(elements // GROUP + halves) // 16) * 16, elements


def _split(
    buffer: torch.Tensor, group: int, hidden: int, width: int, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scale_bytes, floats = _per_expert(hidden, width, gated)
    border = 4 * floats * group
    return buffer[:border].view(torch.float32), buffer[border : border + scale_bytes * group]


def _check_inputs(
    layer: ExpertLayer,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> None:
    if x.dim() != 2 or x.shape[1] != layer.hidden:
        raise ValueError(f"activations have shape {tuple(x.shape)}, expected [tokens, {layer.hidden}]")
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"routing has ids {tuple(topk_ids.shape)} and weights {tuple(topk_weights.shape)}, "
            f"expected [{x.shape[0]}, k] for both"
        )
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(
            f"router weights on the input need one expert a token, found {topk_ids.shape[1]} a token"
        )
