"""What the arms of the quality measurement are asked: made-up prompts, and pieces of a text to judge."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ..loaders import hub
from ..loaders.errors import reason
from .records import BenchError

MADE_UP_PIECES = 8  # judged where there is no text: prompts serve as well


def choose(
    checkpoint: str,
    text: Path | None,
    *,
    prompts: int,
    prompt_tokens: int,
    context: int,
    pieces: int,
    seed: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to answer and sequences to judge, as tokens.

    With a text the prompts are the beginnings of its pieces, as far as they go. Raises BenchError where the
    text gives no piece of two tokens.
    """
    tokenizer = _tokenizer(checkpoint)
    draw = random.Random(seed)
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    made_up = [draw.choices(ordinary, k=prompt_tokens) for _ in range(prompts)]
    if text is None:
        return made_up, made_up[:MADE_UP_PIECES]
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BenchError(f"{text}: cannot be read: {reason(error)}") from error
    ids = tokenizer.encode(content, add_special_tokens=False)
    scored = [ids[start : start + context] for start in range(0, len(ids), context)][:pieces]
    scored = [piece for piece in scored if len(piece) > 1]
    if not scored:
        raise BenchError(f"{text}: has {len(ids)} tokens, expected at least 2")
    asked = [piece[:prompt_tokens] for piece in scored[:prompts]]
    return asked + made_up[len(asked) :], scored


def _tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(hub.locate(checkpoint))
