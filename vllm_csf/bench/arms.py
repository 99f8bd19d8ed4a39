"""The arms of the kernel measurements: one expert layer, held in three forms.

csf     as the plugin serves it: its execution, its plan, its programs, its call
native  the same kernels compiled for raw E4M3 scales
marlin  vLLM's own backend for the device
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial

import torch

from ..cute import MATRICES, CuteExecution, new_flags
from ..kernels import reference
from ..kernels.activation import SILU
from ..kernels.compiled.cache import ProgramCache
from ..planning import LayerFacts, Limits
from ..startup import Served, Startup
from .geometries import LayerGeometry
from .layers import Stack
from .timing import Call

NATIVE_BYTES = 0.5 + 1 / 16  # a weight and its share of a scale


@dataclass(frozen=True)
class Arm:
    """weight_bytes: resident bytes a weight, its share of everything that stands for scales included."""

    name: str
    call: Call
    weight_bytes: float


class PackedExecution(CuteExecution):
    """The served execution, of a layer whose scales lie on the device as bytes, kept native if wanted."""

    def pack(self, stack: Stack) -> dict[str, torch.Tensor]:
        """The resident tensors, as `prepare` names them."""
        prepared = stack.prepare(self._native, self.packer(stack.w2.device))
        resident = {"alphas13": prepared.alpha13, "alphas2": prepared.alpha2}
        for half, matrix in (("13", prepared.w13), ("2", prepared.w2)):
            self._shapes[half] = matrix.shape
            for name, tensor in zip(MATRICES, matrix.tensors(), strict=True):
                resident[name + half] = tensor
        return resident | {"flags": new_flags(stack.w2.device)}


class OurArms:
    """Declares the programs of our arms at once, so that they compile while weights are made."""

    def __init__(self, geometry: LayerGeometry, names: list[str], tokens: int) -> None:
        self._startup = Startup()
        self._scratch = reference.Scratch("cuda")
        self._executions = {name: PackedExecution(name == "native") for name in names}
        facts = LayerFacts(
            geometry.experts,
            geometry.experts,
            geometry.hidden,
            geometry.width,
            geometry.topk,
            SILU,
            mapped=False,
        )
        self._served: dict[str, Served] = {}
        for name, execution in self._executions.items():
            plan = execution.plan(facts, Limits(tokens), torch.device("cuda", torch.cuda.current_device()))
            self._served[name] = self._startup.declare(plan, ProgramCache())
            execution.serve_by(self._served[name])

    def hold(self, stack: Stack) -> list[Arm]:
        """Packs the layer for each arm and makes the programs ready. Raises CompileError."""
        found = []
        for name, execution in self._executions.items():
            resident = execution.pack(stack)
            self._scratch.reserve(execution.scratch_bytes())
            trial = partial(execution.try_out, resident, None, self._scratch)
            self._startup.try_with(self._served[name].plan, trial)
            call = partial(_call, execution, resident, self._scratch)
            weights = 2 * (stack.w13.numel() + stack.w2.numel())
            found.append(Arm(name, call, 0.5 + execution.scale_bytes(resident) / weights))
        self._startup.finish()
        torch.cuda.synchronize()
        return found


def _call(
    execution: CuteExecution,
    resident: dict[str, torch.Tensor],
    scratch: reference.Scratch,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    return execution(resident, x, weights, ids, None, False, scratch)


def peer_arm(stack: Stack) -> Arm:
    from .peer import marlin

    return Arm("marlin", marlin(stack), NATIVE_BYTES)


def missing_peer() -> str | None:
    """Why there is no peer arm, None if there can be one."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        from .peer import needed

        needed()
    except (ImportError, AttributeError) as error:
        return f"this vLLM has another Marlin: {error}"
    return None
