"""A mixture-of-experts model in float32 on the CPU whose routing and sensitivity are known.

Hugging Face transformers computes; the routers are watched. Every routing decision is known by its margin:
how much the last chosen expert beats the first one that was not chosen. `Reference.run` takes flips,
decisions in which these two change places, and computes the model with them.

**How far rounding moves things.** Rounding to nearest with unit roundoff u leaves a relative error that is
about uniform, of root mean square 0.42 u (for mantissas that are uniform themselves). From one layer's input
to the next, a value is rounded about 13 times one after the other: norm, weights and outputs of q, k and v,
rotation, softmax, attention, weights and outputs of its projection, residual, norm, gate and up, down,
residual. The errors are independent, so that they add as squares, and point nowhere in particular. They are
therefore stood in for by noise of root mean square 0.42 u sqrt(13) |x| on what enters each layer and the
last norm, |x| the root mean square of the token's residual stream, and of 0.42 u of each logit, of routers
and of the head. The model is computed with it `SAMPLES` times more, by the same experts. The root mean
square of what that moves, the margin of a decision or a log probability, is its sigma, and `SIGMAS` sigma
the bound: a decision whose margin is below it is near-tied. In float32 that is next to none. A test compares
sigma with the errors that transformers makes in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

SIGMAS = 4.0
SAMPLES = 16
ROOT_MEAN_SQUARE = 0.42  # of a rounding's relative error, in unit roundoffs
ROUNDINGS_A_LAYER = 13
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Decision:
    """Of the router of `layer` for the token at `position`: `chosen` last, `rejected` first.

    margin: by which the one beat the other, in the scores that the router chooses by; bound: below which
    the data type's rounding may turn it.
    """

    layer: int
    position: int
    chosen: int
    rejected: int
    margin: float
    bound: float

    @property
    def near_tied(self) -> bool:
        return self.margin < self.bound

    @property
    def place(self) -> tuple[int, int]:
        return self.layer, self.position


Flips = frozenset[tuple[int, int]]  # places whose decision is turned
NONE: Flips = frozenset()


@dataclass(frozen=True)
class Routed:
    """What a run gave. logits: [1 + samples, tokens, vocabulary], the first of them without noise."""

    logits: torch.Tensor
    decisions: tuple[Decision, ...]

    @cached_property
    def _all(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    @property
    def logprobs(self) -> torch.Tensor:
        """[tokens, vocabulary], without noise."""
        return self._all[0]

    def logprob_bound(self, position: int, token: int) -> float:
        """How far rounding may move the log probability of a token."""
        return float(_bound(self._all[:, position, token]))

    def lead_bound(self, position: int, first: int, second: int) -> float:
        """How far rounding may move the lead of one token over another."""
        return float(_bound(self.logits[:, position, first] - self.logits[:, position, second]))

    def near_ties(self, position: int, below: int = -1) -> list[Decision]:
        """Of a position, in layers deeper than `below`."""
        found = (d for d in self.decisions if d.position == position and d.layer > below)
        return [d for d in found if d.near_tied]


def _bound(values: torch.Tensor) -> torch.Tensor:
    """Of values without noise, then with: [1 + samples, ...] -> [...]. Zero where there are no samples."""
    moved = values[1:] - values[0]
    return SIGMAS * moved.square().sum(0).div(max(1, len(moved))).sqrt()


class Reference:
    """dtype: of the arithmetic that is compared with this one, which bounds what counts as near-tied."""

    def __init__(self, folder: Path, dtype: str = "bfloat16") -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._error = ROOT_MEAN_SQUARE * UNIT_ROUNDOFF[dtype]
        self._routers = [m for name, m in self._model.named_modules() if name.endswith("mlp.gate")]
        if not self._routers:
            raise ValueError(f"{folder}: no module is named mlp.gate, expected a router in each layer")

    def run(self, tokens: list[int], flips: Flips = NONE, samples: int = SAMPLES) -> Routed:
        """samples: with none, there are no bounds and no near ties.

        Raises ValueError for a router that computes something else than is known here.
        """
        decisions: list[Decision] = []
        noise = _Noise(self._error)
        with torch.no_grad(), self._watched(decisions, flips, noise):
            logits = noise.on_values(self._model(torch.tensor([tokens] * (1 + samples))).logits)
        return Routed(logits, tuple(decisions))

    @contextmanager
    def _watched(self, decisions: list[Decision], flips: Flips, noise: _Noise) -> Iterator[None]:
        stream = [*self._model.model.layers, self._model.model.norm]
        handles = [module.register_forward_pre_hook(noise.before, with_kwargs=True) for module in stream]
        for layer, router in enumerate(self._routers):
            handles.append(router.register_forward_hook(self._hook(layer, decisions, flips, noise)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int, decisions: list[Decision], flips: Flips, noise: _Noise) -> Callable:
        def hook(router: torch.nn.Module, inputs: tuple, output: tuple) -> tuple:
            logits, weights, ids = output
            batch, count = inputs[0].shape[0], len(logits)
            if inputs[0].dim() == 2:  # tokens of all samples, one after the other
                batch = noise.batch
            logits = noise.on_values(logits.reshape(batch, count // batch, -1))
            found = _Routing(router, logits)
            found.check(weights[: count // batch], ids[: count // batch])
            decisions.extend(found.decisions(layer))
            chosen = found.chosen([position for at, position in flips if at == layer])
            return logits.flatten(0, 1), found.weights(chosen).flatten(0, 1), chosen.repeat(batch, 1)

        return hook


class _Noise:
    """Of rounding, on all of a batch but its first sequence; the same in every run."""

    def __init__(self, error: float) -> None:
        self._error = error
        self._generator = torch.Generator().manual_seed(0)
        self.batch = 0

    def before(self, module: torch.nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        hidden, *others = inputs
        self.batch = hidden.shape[0]
        size = hidden.square().mean(-1, keepdim=True).sqrt() * math.sqrt(ROUNDINGS_A_LAYER)
        return (self._added(hidden, size), *others), named

    def on_values(self, values: torch.Tensor) -> torch.Tensor:
        return self._added(values, values.abs())

    def _added(self, values: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        noise = self._error * size * torch.randn(values.shape, generator=self._generator)
        noise[0] = 0
        return values + noise


class _Routing:
    """What a router does with its logits [1 + samples, tokens, experts]: softmax, or a sigmoid with a bias
    that only the choice sees. What is chosen without noise counts for all samples."""

    def __init__(self, router: Any, logits: torch.Tensor) -> None:
        if getattr(router, "num_group", 1) != 1:
            raise ValueError(f"num_group is {router.num_group}, expected 1")
        bias = getattr(router, "e_score_correction_bias", None)
        self._router = router
        self._values = logits.softmax(-1) if bias is None else logits.sigmoid()
        self._scores = logits if bias is None else self._values + bias
        # The last of the chosen ones, and the first of the others.
        self._order = self._scores[0].topk(router.top_k + 1, dim=-1).indices

    def weights(self, ids: torch.Tensor) -> torch.Tensor:
        """[1 + samples, tokens, top k] of ids [tokens, top k]."""
        found = self._values.gather(2, ids.expand(len(self._values), *ids.shape))
        if self._router.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return found * getattr(self._router, "routed_scaling_factor", 1.0)

    def check(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Of the sequence without noise."""
        same = torch.equal(self._order[:, :-1].sort(-1).values, ids.sort(-1).values)
        if not same or not torch.allclose(self.weights(ids)[0], weights, rtol=1e-5, atol=1e-7):
            raise ValueError(f"{type(self._router).__name__} routes in a way that is not known here")

    def chosen(self, turned: list[int]) -> torch.Tensor:
        """ids [tokens, top k]; those of the positions `turned` with the first rejected expert."""
        ids = self._order[:, :-1].clone()
        ids[turned, -1] = self._order[turned, -1]
        return ids

    def decisions(self, layer: int) -> Iterator[Decision]:
        pairs = self._order[:, -2:]
        scores = self._scores.gather(2, pairs.expand(len(self._scores), *pairs.shape))
        margins = scores[..., 0] - scores[..., 1]
        found = zip(pairs.tolist(), margins[0].tolist(), _bound(margins).tolist(), strict=True)
        for position, ((chosen, rejected), margin, bound) in enumerate(found):
            yield Decision(layer, position, chosen, rejected, margin, bound)
