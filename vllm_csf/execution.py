"""How a layer's experts are computed: one small interface, chosen at start.

An execution is told the layer once (`prepare`), hands back the tensors that stay on the device, and
is given them again with every call. It keeps numbers, never tensors: the engine may copy new
weights into the resident tensors, move them to the host and back, or capture their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from .kernels import reference
from .kernels.activation import Activation
from .kernels.compiled.build import ProgramSet
from .kernels.moe.programs import Geometry
from .planning import LayerFacts, Limits, Plan
from .startup import Served
from .tuning import TrialTimer

Tensors = Mapping[str, torch.Tensor]
SCALES = ("csf", "native")


class Execution(Protocol):
    name: str
    takes_whole_scales: bool
    """Whether `prepare` is best given plain scales as they are, instead of compressed."""

    def plan(self, facts: LayerFacts, limits: Limits, device: torch.device) -> Plan | None:
        """What calls of the layer will need, None where that is nothing but scratch."""

    def serve_by(self, served: Served) -> None:
        """The plan to serve by, and later its programs."""

    def try_out(self, resident: Tensors, expert_map: torch.Tensor | None, scratch: reference.Scratch) -> None:
        """Run every program of the plan once, in scratch that is made large enough for all of them."""

    def timer(
        self,
        resident: Tensors,
        expert_map: torch.Tensor | None,
        geometry: Geometry,
        own: ProgramSet,
        others: ProgramSet,
        nbytes: int,
    ) -> TrialTimer:
        """Of candidates for the plan's programs, on this layer; may take so many bytes of the device."""

    def prepare(self, layer: reference.ExpertLayer) -> dict[str, torch.Tensor]:
        """The resident form of a layer, by name. Called again, with the same shapes, for new weights."""

    def scale_bytes(self, resident: Tensors) -> int:
        """Bytes of the resident tensors that stand for block scales."""

    def exceptions(self, resident: Tensors) -> int:
        """How many scales the resident tensors keep outside the codes."""

    def scratch_bytes(self) -> int:
        """Bytes of shared scratch that a call needs."""

    def __call__(
        self,
        resident: Tensors,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        scratch: reference.Scratch,
    ) -> torch.Tensor:
        """Routed output [T, H]; see reference.forward."""


class ReferenceExecution:
    """Plain torch: decodes the planes of the routed experts for every call (or keeps them native)."""

    def __init__(self, native: bool = False) -> None:
        self._native = native
        self.name = "reference, native scales" if native else "reference"
        self.takes_whole_scales = native

    @staticmethod
    def supports(device: torch.device) -> bool:
        return device.type in ("cpu", "cuda")

    def plan(self, facts: LayerFacts, limits: Limits, device: torch.device) -> Plan | None:
        return None

    def serve_by(self, served: Served) -> None:
        """Never called: there is no plan."""

    def try_out(self, resident: Tensors, expert_map: torch.Tensor | None, scratch: reference.Scratch) -> None:
        """Nothing is compiled."""

    def timer(self, *arguments: object) -> TrialTimer:
        raise AssertionError("there is no plan, and nothing to tune")

    def prepare(self, layer: reference.ExpertLayer) -> dict[str, torch.Tensor]:
        self._shape = (layer.experts, layer.hidden, layer.width, layer.activation.gated)
        self._activation = layer.activation
        scales13, scales2 = layer.scales13, layer.scales2
        if self._native:
            scales13, scales2 = scales13.expand(), scales2.expand()
        self._planes = {
            half: (planes.rows, planes.cols, planes.longest, planes.native)
            for half, planes in (("13", scales13), ("2", scales2))
        }
        return {
            "w13": layer.w13,
            "w2": layer.w2,
            "alphas13": layer.alphas13,
            "alphas2": layer.alphas2,
            **_planes_by_name("13", scales13),
            **_planes_by_name("2", scales2),
        }

    def scale_bytes(self, resident: Tensors) -> int:
        kinds = ("fixed", "offsets", "entries")
        return sum(t.nbytes for name, t in resident.items() if name.startswith(kinds))

    def exceptions(self, resident: Tensors) -> int:
        return sum(int(resident[f"offsets{half}"][-1]) for half in self._planes)

    def scratch_bytes(self) -> int:
        return reference.scratch_bytes(*self._shape)

    def __call__(
        self,
        resident: Tensors,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        scratch: reference.Scratch,
    ) -> torch.Tensor:
        return reference.forward(
            self._view(resident),
            x,
            topk_weights,
            topk_ids,
            expert_map,
            apply_router_weight_on_input,
            scratch,
            fixed_shapes=x.is_cuda and torch.cuda.is_current_stream_capturing(),
        )

    def _view(self, resident: Tensors) -> reference.ExpertLayer:
        return reference.ExpertLayer(
            w13=resident["w13"],
            w2=resident["w2"],
            scales13=self._planes_of("13", resident),
            scales2=self._planes_of("2", resident),
            alphas13=resident["alphas13"],
            alphas2=resident["alphas2"],
            activation=self._activation,
        )

    def _planes_of(self, half: str, resident: Tensors) -> reference.ScalePlanes:
        fixed, offsets, entries = (resident[f"{kind}{half}"] for kind in ("fixed", "offsets", "entries"))
        return reference.ScalePlanes(fixed, offsets, entries, *self._planes[half])


def _planes_by_name(half: str, planes: reference.ScalePlanes) -> dict[str, torch.Tensor]:
    return {
        f"fixed{half}": planes.fixed,
        f"offsets{half}": planes.offsets,
        f"entries{half}": planes.entries,
    }


def choose(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    activation: Activation,
    hidden: int,
    scales: str = "csf",
) -> Execution:
    """The execution of that name, or with "auto" the fastest that serves the layer on the device.

    scales: "csf", or "native" for the same kernels on scales that are kept as they are, to compare with.
    Raises ValueError where there is none.
    """
    from .cute import CuteExecution, can_compute

    if scales not in SCALES:
        raise ValueError(f"csf_scales is {scales!r}, expected {' or '.join(map(repr, SCALES))}")
    native = scales == "native"
    if wanted == "cute" and not (device.type == "cuda" and can_compute(dtype, activation, hidden)):
        raise ValueError(
            f"csf_execution is 'cute', which needs a CUDA device, nvidia-cutlass-dsl and apache-tvm-ffi, "
            f"bfloat16 and a gated SiLU; found {device.type}, {dtype}, {activation}, hidden size {hidden}"
        )
    if wanted == "cute" or (wanted == "auto" and CuteExecution.supports(device, dtype, activation, hidden)):
        return CuteExecution(native)
    if wanted in ("auto", "reference") and ReferenceExecution.supports(device):
        return ReferenceExecution(native)
    raise ValueError(f"csf_execution is {wanted!r} on {device.type}, expected 'auto', 'cute' or 'reference'")
