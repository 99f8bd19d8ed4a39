"""Made-up routings: which experts a router that is even, skewed, or stuck on one expert would choose.

uniform  every set of `topk` experts is as likely as any other
zipf     the r-th most wanted expert is chosen with weight 1 / r; which one that is differs by seed
hot      one expert, another one for each seed, has half of the tokens; the rest is uniform
"""

from __future__ import annotations

import torch

from .geometries import ROUTINGS


def route(
    kind: str, tokens: int, experts: int, topk: int, seed: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [tokens, topk], distinct in a row, and weights float32 [tokens, topk] that sum to 1.

    Raises ValueError for a kind that is none of `ROUTINGS`.
    """
    if kind not in ROUTINGS:
        raise ValueError(f"routing is {kind!r}, expected one of {', '.join(ROUTINGS)}")
    g = torch.Generator(device=device).manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=g, device=device)
    if kind == "zipf":
        rank = 1 + torch.randperm(experts, generator=g, device=device)
        # The largest of log weight + Gumbel noise: drawing by weight without putting back.
        scores = -torch.log(-torch.log(scores.clamp(1e-20, 1 - 1e-7))) - torch.log(rank)
    if kind == "hot":
        hot = torch.randint(experts, (), generator=g, device=device)
        chosen = torch.randperm(tokens, generator=g, device=device)[: (tokens + 1) // 2]
        scores[:, hot] = -1.0
        scores[chosen, hot] = 2.0
    ids = scores.topk(topk, dim=1).indices.to(torch.int32)
    weights = torch.softmax(torch.randn(tokens, topk, generator=g, device=device), -1)
    return ids.contiguous(), weights.contiguous()
