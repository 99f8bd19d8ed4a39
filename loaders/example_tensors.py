"""Which tensors beside the experts an example has, in the order in which their numbers are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .example_sizes import Sizes

FAMILIES = ("qwen3-moe", "glm4-moe")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """A tensor: its shape, and the standard deviation of the example's numbers; 0: all ones."""

    shape: tuple[int, ...]
    std: float = 0.05


Parts = dict[str, Part]


def drafting(family: str) -> int:
    """Layers that draft."""
    return int(family == "glm4-moe")


def model(size: Sizes) -> Parts:
    """The head is wide, so that the two best logits lie far apart."""
    table = (size.vocabulary, size.hidden)
    return {
        "model.embed_tokens.weight": Part(table, 1.0),
        "lm_head.weight": Part(table, 1.0),
        "model.norm.weight": Part((size.hidden,), 0),
    }


def layer(family: str, size: Sizes, prefix: str) -> Parts:
    s = size
    attention, query, kv = f"{prefix}self_attn.", s.heads * s.head_dim, s.kv_heads * s.head_dim
    out = {
        f"{prefix}input_layernorm.weight": Part((s.hidden,), 0),
        f"{prefix}post_attention_layernorm.weight": Part((s.hidden,), 0),
        f"{attention}q_proj.weight": Part((query, s.hidden)),
        f"{attention}k_proj.weight": Part((kv, s.hidden)),
        f"{attention}v_proj.weight": Part((kv, s.hidden)),
        f"{attention}o_proj.weight": Part((s.hidden, query)),
        f"{prefix}mlp.gate.weight": Part((s.experts, s.hidden), 0.3),
    }
    if family == "qwen3-moe":
        return out | {f"{attention}{n}_norm.weight": Part((s.head_dim,), 0) for n in "qk"}
    out |= {
        f"{attention}{name}_proj.bias": Part((rows,)) for name, rows in (("q", query), ("k", kv), ("v", kv))
    }
    out[f"{prefix}mlp.gate.e_score_correction_bias"] = Part((s.experts,))
    for name in PROJECTIONS:
        out[f"{prefix}mlp.shared_experts.{name}.weight"] = Part(projection(size, name))
    return out


def mtp(size: Sizes, prefix: str) -> Parts:
    """What the layer that drafts has beside those of a layer."""
    table = (size.vocabulary, size.hidden)
    return {
        f"{prefix}embed_tokens.weight": Part(table, 1.0),
        f"{prefix}enorm.weight": Part((size.hidden,), 0),
        f"{prefix}hnorm.weight": Part((size.hidden,), 0),
        f"{prefix}eh_proj.weight": Part((size.hidden, 2 * size.hidden), 0.005),
        f"{prefix}shared_head.norm.weight": Part((size.hidden,), 0),
        f"{prefix}shared_head.head.weight": Part(table, 1.0),
    }


def projection(size: Sizes, name: str) -> tuple[int, int]:
    """Rows and columns of an expert's, the shared one's too."""
    return (size.hidden, size.width) if name == "down_proj" else (size.width, size.hidden)
