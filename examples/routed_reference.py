"""A mixture-of-experts model in float32 on the CPU whose routing can be looked at and changed.

Hugging Face transformers computes; the routers are watched. Every routing decision is known by its margin:
how much the last chosen expert beats the first one that was not chosen. `Reference.run` takes flips,
decisions in which these two change places, and computes the model with them.

**Which decisions arithmetic of less precision may turn.** A router computes z_e = w_e . h and chooses by
s_e, a function of z_e. An error d of h moves the margin s_e - s_f by d . v, v = s'(z_e) w_e - s'(z_f) w_f.
Rounding to nearest with unit roundoff u leaves a relative error that is about uniform, of root mean square
0.42 u (over mantissas that are uniform themselves). Up to the router of layer l (from 0) a value has been
rounded about m = 13 l + 11 times one after the other: stored embedding (1); in a layer norm, weights and
outputs of q, k and v, rotation, softmax, attention, weights and outputs of its projection, residual, norm,
router weights (11, of which the first layer's norm takes up the embedding); gate and up, activation, down,
sum, residual and what else its experts do (the rest). The errors are independent, so they add as squares,
and they point nowhere in particular, so the margin's error has the root mean square

    sigma = 0.42 u sqrt(m) |v| rms(h)

where rms(h) is 1 or so behind a norm, and a router whose logits are rounded adds 0.42 u of either.
A decision counts as near-tied where its margin is below `SIGMAS` sigma. In float32 that is next to none.

**How far log probabilities may be apart.** The same holds of the last layer's output and the head, after all
layers: log p_t moves by d . v, v = w_t - sum over j of p_j w_j, and the lead of one token over another by
d . (w_a - w_b). Where the model is sure, v is next to nothing, and so is the tolerance.
Between transformers in bfloat16 and this, the root mean square of an error in sigmas is 0.8 to 1.2 for the
margins and the log probabilities of the examples; tests hold it near one.
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

SIGMAS = 5.0
ROOT_MEAN_SQUARE = 0.42  # of a rounding's relative error, in unit roundoffs
ROUNDINGS_BEFORE, ROUNDINGS_A_LAYER = 11, 13
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


def deviation(
    unit: float, layers: int, directions: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """The sigma of the module's text, [n], after `layers` layers. directions: v, [n, H]; hidden: h, [n, H];
    logits: what of each logit the result contains, [n, any]."""
    roundings = math.sqrt(ROUNDINGS_BEFORE + ROUNDINGS_A_LAYER * layers)
    size = hidden.float().square().mean(-1).sqrt()
    return (
        ROOT_MEAN_SQUARE * unit * torch.hypot(roundings * directions.norm(dim=-1) * size, logits.norm(dim=-1))
    )


@dataclass(frozen=True)
class Routed:
    """What a run gave: logits [tokens, vocabulary] after each token, and all decisions."""

    logits: torch.Tensor
    decisions: tuple[Decision, ...]
    _hidden: torch.Tensor
    _head: torch.Tensor
    _layers: int
    _unit: float

    @cached_property
    def logprobs(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def logprob_bound(self, position: int, token: int) -> float:
        """How far rounding may move the log probability of a token."""
        part = -self.logprobs[position].exp()
        part[token] += 1
        return self._bound(position, part)

    def lead_bound(self, position: int, first: int, second: int) -> float:
        """How far rounding may move the lead of one token over another."""
        part = torch.zeros(self.logits.shape[-1])
        part[first] += 1
        part[second] -= 1
        return self._bound(position, part)

    def _bound(self, position: int, part: torch.Tensor) -> float:
        direction, hidden = (part @ self._head)[None], self._hidden[position][None]
        logits = (part * self.logits[position])[None]
        return SIGMAS * float(deviation(self._unit, self._layers, direction, hidden, logits))

    def near_ties(self, position: int, below: int = -1) -> list[Decision]:
        """Of a position, in layers deeper than `below`."""
        found = (d for d in self.decisions if d.position == position and d.layer > below)
        return [d for d in found if d.near_tied]


class Reference:
    """dtype: of the arithmetic that is compared with this one, which bounds what counts as near-tied."""

    def __init__(self, folder: Path, dtype: str = "bfloat16") -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.dtype = dtype
        self._unit = UNIT_ROUNDOFF[dtype]
        self._routers = [m for name, m in self._model.named_modules() if name.endswith("mlp.gate")]
        if not self._routers:
            raise ValueError(f"{folder}: no module is named mlp.gate, expected a router in each layer")

    def run(self, tokens: list[int], flips: Flips = NONE) -> Routed:
        """Raises ValueError for a router that computes something else than is known here."""
        decisions: list[Decision] = []
        with torch.no_grad(), self._watched(decisions, flips):
            hidden = self._model.model(torch.tensor([tokens])).last_hidden_state[0]
            head = self._model.lm_head.weight
            logits = self._model.lm_head(hidden)
        return Routed(logits, tuple(decisions), hidden, head.detach(), len(self._routers), self._unit)

    @contextmanager
    def _watched(self, decisions: list[Decision], flips: Flips) -> Iterator[None]:
        handles = [
            router.register_forward_hook(self._hook(layer, decisions, flips))
            for layer, router in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int, decisions: list[Decision], flips: Flips) -> Callable:
        def hook(router: torch.nn.Module, inputs: tuple, output: tuple) -> tuple:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            logits, weights, ids = output
            found = _Routing(router, hidden, logits)
            found.check(weights, ids)
            decisions.extend(found.decisions(layer, self._unit))
            turned = [position for at, position in flips if at == layer]
            if not turned:
                return output
            ids = found.turned(turned)
            return logits, found.weights(ids).to(weights.dtype), ids

        return hook


class _Routing:
    """What a router does, from its logits on. Softmax of the logits, or a sigmoid with a bias that only the
    choice sees."""

    def __init__(self, router: Any, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self._router, self._hidden, self._logits = router, hidden, logits
        bias = getattr(router, "e_score_correction_bias", None)
        if getattr(router, "num_group", 1) != 1:
            raise ValueError(f"num_group is {router.num_group}, expected 1")
        self._values = logits.softmax(-1) if bias is None else logits.sigmoid()
        self._scores = logits if bias is None else self._values + bias
        self._slopes = torch.ones_like(logits) if bias is None else self._values * (1 - self._values)
        # The last of the chosen ones, and the first of the others.
        self._order = self._scores.topk(router.top_k + 1, dim=-1).indices

    def weights(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._values.gather(1, ids)
        if self._router.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return found * getattr(self._router, "routed_scaling_factor", 1.0)

    def check(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        mine = self._order[:, :-1]
        same = torch.equal(mine.sort(-1).values, ids.sort(-1).values)
        if not same or not torch.allclose(self.weights(ids), weights, rtol=1e-5, atol=1e-7):
            raise ValueError(f"{type(self._router).__name__} routes in a way that is not known here")

    def turned(self, positions: list[int]) -> torch.Tensor:
        ids = self._order[:, :-1].clone()
        ids[positions, -1] = self._order[positions, -1]
        return ids

    def decisions(self, layer: int, unit: float) -> Iterator[Decision]:
        pairs = self._order[:, -2:]
        scores, logits, slopes = (t.gather(1, pairs) for t in (self._scores, self._logits, self._slopes))
        rows = slopes.unsqueeze(-1) * self._router.weight.float()[pairs]
        directions = rows[:, 0] - rows[:, 1]
        bounds = SIGMAS * deviation(unit, layer, directions, self._hidden, slopes * logits)
        margins = scores[:, 0] - scores[:, 1]
        rows_of = zip(pairs.tolist(), margins.tolist(), bounds.tolist(), strict=True)
        for position, ((chosen, rejected), margin, bound) in enumerate(rows_of):
            yield Decision(layer, position, chosen, rejected, margin, bound)
