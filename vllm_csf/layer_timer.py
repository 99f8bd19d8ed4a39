"""Times candidates on one layer and its device, and checks that they compute what the table's programs do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .kernels import reference
from .kernels.compiled.build import ProgramSet
from .kernels.moe import programs
from .kernels.moe.programs import Choice, Geometry

# The device waits so long before each call that the host has enqueued it: 0.1 ms at 2 GHz.
AHEAD_CYCLES = 200_000
LARGEST_ERROR = 1e-2  # relative, of a candidate's result against the table's; rounding stays below 0.5 %


@dataclass(frozen=True)
class Inputs:
    """x bfloat16 [T, H]; ids int32 [T, k], distinct in a row; weights float32 [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Launch(Protocol):
    def __call__(
        self,
        choice: Choice,
        program: Callable,
        inputs: Inputs,
        out: torch.Tensor,
        scratch: reference.Scratch,
    ) -> None:
        """Enqueues one call of a layer by the program of a choice."""


class LayerTimer:
    """A `tuning.Timer`. Takes at most `nbytes` of the device, and gives them back with itself.

    Calls of a round have equal inputs, those of another round other ones; before each the L2 cache is
    written over, so that weights come from memory as they do when layers take turns.
    """

    def __init__(
        self, launch: Launch, geometry: Geometry, own: ProgramSet, others: ProgramSet, nbytes: int
    ) -> None:
        self._launch = launch
        self._geometry = geometry
        self._own = own
        self._others = others
        self._nbytes = nbytes
        self._device = torch.device("cuda", torch.cuda.current_device())
        cache = torch.cuda.get_device_properties(self._device).L2_cache_size
        self._cold = torch.empty(min(2 * cache, nbytes // 4), dtype=torch.uint8, device=self._device)
        self._scratch = reference.Scratch(self._device)
        self._at: tuple[int, int] = (0, -1)
        self._inputs: Inputs | None = None
        self._out = torch.empty(0, device=self._device)
        self._expected: torch.Tensor | None = None

    def ready(self, choice: Choice) -> bool:
        """Whether its program is there, and a call fits into the budget of memory."""
        if self._program(choice) is None:
            return False
        g, tokens = self._geometry, choice.tokens
        # x, two results, their difference, all in BF16; scores and choices of the made-up router.
        inputs = tokens * (10 * g.hidden + 16 * g.global_experts)
        taken = programs.workspace_bytes(g, choice, tokens) + inputs + self._cold.nbytes
        return taken <= self._nbytes

    def _program(self, choice: Choice) -> Callable | None:
        wanted = programs.declared(self._geometry, choice)
        for there in (self._own, self._others):
            if wanted in there.programs:
                return there[wanted]
        return None

    def __call__(self, choice: Choice, tokens: int, number: int) -> float:
        """Seconds of a call. Raises ValueError for a result that is another one than the first caller's."""
        if (tokens, number) != self._at:
            self._prepare(tokens, number)
        assert self._inputs is not None
        program = self._program(choice)
        assert program is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        self._cold.zero_()
        begin.record()
        self._launch(choice, program, self._inputs, self._out, self._scratch)
        end.record()
        end.synchronize()
        if number == 0:
            self._check()
        return begin.elapsed_time(end) * 1e-3

    def _prepare(self, tokens: int, number: int) -> None:
        self._inputs = self._expected = None
        g = self._geometry
        generator = torch.Generator(device=self._device).manual_seed(1000 * tokens + number)
        scores = torch.rand(tokens, g.global_experts, generator=generator, device=self._device)
        chosen = scores.topk(g.topk, dim=1)
        x = torch.randn(tokens, g.hidden, generator=generator, device=self._device, dtype=torch.bfloat16)
        weights = chosen.values / chosen.values.sum(dim=1, keepdim=True)
        self._inputs = Inputs(x, chosen.indices.int().contiguous(), weights.contiguous())
        if self._out.shape[0] != tokens:
            self._out = torch.empty_like(x)
        self._at = (tokens, number)

    def _check(self) -> None:
        found = self._out
        if self._expected is None:
            self._expected = found.clone()
            return
        norm = self._expected.norm(dtype=torch.float32)
        error = (found - self._expected).norm(dtype=torch.float32) / norm
        # Weights that are not finite (made-up ones) leave nothing to compare.
        if torch.isfinite(norm) and norm > 0 and not error <= LARGEST_ERROR:
            raise ValueError(f"its result is off by {float(error):.1e}, expected {LARGEST_ERROR:.0e} at most")
