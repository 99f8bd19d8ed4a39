"""How large an example is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import CheckpointError, reason
from .example_config import SIZE_KEYS, SPECIALS
from .example_tensors import FAMILIES

MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class Sizes:
    """hidden and width: multiples of 32; vocabulary: at least the special tokens and all bytes; head_dim: a
    multiple of 8, as vLLM's attention wants it."""

    layers: int = 2
    hidden: int = 128
    width: int = 96
    experts: int = 8
    topk: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = 300
    positions: int = 512

    def check(self) -> None:
        """Raises ValueError for sizes that no layout, or no tokenizer, can hold."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        for name in ("hidden", "width"):
            if (value := getattr(self, name)) < 32 or value % 32:
                raise ValueError(f"{name} is {value}, expected a multiple of 32")
        # Rotary embedding turns pairs, in half of the head for GLM; FlashAttention reads eight at a time.
        if self.head_dim % 8 or self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}")
        least = len(SPECIALS) + 256
        if self.vocabulary < least:
            raise ValueError(f"vocabulary is {self.vocabulary}, expected at least {least}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, expected a multiple of kv_heads, {self.kv_heads}")
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk is {self.topk}, expected 1 to {self.experts}, the number of experts")


def sizes_of(config: dict[str, Any]) -> tuple[str, Sizes]:
    """Family and sizes of an example's config.json. Raises CheckpointError for others."""
    families = {family.replace("-", "_"): family for family in FAMILIES}
    if (found := config.get("model_type")) not in families:
        raise CheckpointError(f"config.json: model_type is {found!r}, expected {' or '.join(families)}")
    try:
        size = Sizes(**{field: int(config[key]) for field, key in SIZE_KEYS.items()})
        size.check()
        return families[found], size
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {reason(error)}, expected the sizes of an example") from error
