"""Activations between the two products of an expert: one description for every execution.

Gated kinds take (gate, up); the others take the only half. All compute in float32.

    silu           silu(gate) * up                       with a limit: gate <= limit, |up| <= limit
    gelu           gelu(gate) * up
    gelu_tanh      gelu(gate, tanh approximation) * up
    swiglu_oai     g * sigmoid(alpha * g) * (u + beta)   g = gate <= limit, |u = up| <= limit
    swiglu_step    min(silu(gate), limit) * clamp(up, -limit, limit)
    situ           beta * tanh(gate / beta) * sigmoid(gate) * up
                   with a limit: up -> limit * tanh(up / limit)
    relu2          relu(x) ** 2, not gated only
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

GATED_KINDS = frozenset({"silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglu_step", "situ"})
PLAIN_KINDS = frozenset({"silu", "gelu", "gelu_tanh", "relu2"})
_NEEDS_LIMIT = frozenset({"swiglu_oai", "swiglu_step"})


@dataclass(frozen=True)
class Activation:
    """kind as in the table above; raises ValueError for a combination that the table does not hold."""

    kind: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        kinds = GATED_KINDS if self.gated else PLAIN_KINDS
        if self.kind not in kinds:
            raise ValueError(
                f"activation is {self.kind!r} (gated: {self.gated}), expected one of {sorted(kinds)}"
            )
        if self.kind in _NEEDS_LIMIT and self.limit is None:
            raise ValueError(f"activation {self.kind!r} has no limit, expected a number")
        if self.kind == "situ" and self.beta <= 0:
            raise ValueError(f"activation 'situ' has beta {self.beta}, expected a positive number")

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h: float32 [..., G, I] with G = 2 (gate, up) or 1; returns float32 [..., I]."""
        if not self.gated:
            return self._plain(h[..., 0, :])
        return self._gated(h[..., 0, :], h[..., 1, :])

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "relu2":
            return functional.relu(x).square()
        return self._gate(x)

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gelu":
            return functional.gelu(x)
        if self.kind == "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        return functional.silu(x)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.kind == "situ":
            if self.limit is not None:
                up = self.limit * torch.tanh(up / self.limit)
            return self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate) * up
        if self.kind == "swiglu_step":
            assert self.limit is not None
            return functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.kind == "swiglu_oai":
            return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)
        return self._gate(gate) * up


SILU = Activation()
