"""How the tensors of a checkpoint reach a layer of compressed experts.

vLLM's models route every expert tensor to a parameter of the layer, by name, and call that
parameter's ``weight_loader``. They do so in two ways: through ``getattr(layer, name)`` or through
``dict(model.named_parameters())``. The streams of a CSF checkpoint are named
``weight_scale.nvfp4_csf_fixed`` and ``..._exceptions``, with a dot, so they live in a submodule
``w13_weight_scale`` for the second way, and are attributes of the layer by their dotted name for
the first.

Weights and global scales are copied into parameters of their final shape. Scales go to the layer's
`Intake`, which wants both streams of a plane, or its plain scale, before it can cut out the rank's
part; their parameters are empty `Port`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .intake import Intake

STREAM_SUFFIXES = {"fixed": "nvfp4_csf_fixed", "exceptions": "nvfp4_csf_exceptions"}

Receive = Callable[..., bool | None]


@dataclass(frozen=True)
class Dialect:
    """Names of a checkpoint family's expert tensors behind ``gate_proj.`` and so on."""

    weight: str
    global_scale: str
    input_scale: str
    global_scale_divides: bool


MODELOPT = Dialect("weight", "weight_scale_2", "input_scale", False)
COMPRESSED_TENSORS = Dialect("weight_packed", "weight_global_scale", "input_global_scale", True)


class Port(torch.nn.Parameter):
    """An empty parameter whose loader hands the tensor on to the intake.

    A reload wraps the loader of every parameter so as to count elements, and calls it twice. A port
    has no elements to count and wants its tensor once, so it keeps its own loader.
    """

    _receive: Receive

    def __new__(cls, receive: Receive) -> Port:
        port = super().__new__(cls, torch.empty(0, dtype=torch.uint8), requires_grad=False)
        port._receive = receive
        return port

    @property
    def weight_loader(self) -> Receive:
        return self._receive

    @weight_loader.setter
    def weight_loader(self, wrapped: Receive) -> None:
        pass


class StreamPorts(torch.nn.Module):
    """Stands where the plain scale of an uncompressed checkpoint would: holds the ports of its streams.

    Has a loader itself, so that a plain scale that comes all the same is refused by name.
    """

    def __init__(self, intake: Intake) -> None:
        super().__init__()
        for part, suffix in STREAM_SUFFIXES.items():
            self.register_parameter(suffix, Port(intake.receiver(part)))
        self.weight_loader = intake.receiver("unexpected plain scale")


def register_parameters(
    layer: torch.nn.Module, intake: Intake, dialect: Dialect, streams: bool, never_complete: int
) -> None:
    """Give `layer` the parameters that a checkpoint of this dialect wants to fill.

    streams: scales come as CSF streams, else plain (or lazily, from the csf loader).
    never_complete: element count that keeps a reload from finishing the layer before its end.
    """
    shape = intake.shape
    halves, E = shape.halves, shape.experts
    size, H = shape.extent.size, shape.hidden
    for half, rows, cols, alphas in (
        ("w13", halves * size, H // 2, (E, halves)),
        ("w2", H, size // 2, (E,)),
    ):
        weight = _loaded_by(intake.receiver("weight"), torch.zeros(E, rows, cols, dtype=torch.uint8))
        vars(weight)["weight_loader_numel"] = never_complete
        layer.register_parameter(f"{half}_{dialect.weight}", weight)
        alpha = _loaded_by(intake.receiver("global_scale"), torch.ones(alphas, dtype=torch.float32))
        layer.register_parameter(f"{half}_{dialect.global_scale}", alpha)
        layer.register_parameter(f"{half}_{dialect.input_scale}", Port(intake.receiver("input_scale")))
        _register_scales(layer, intake, f"{half}_weight_scale", streams)
    for name, planes, length in intake.staged_shapes():
        staged = torch.zeros(planes, length, dtype=torch.uint8)
        layer.register_parameter(name, torch.nn.Parameter(staged, requires_grad=False))


def _loaded_by(receive: Receive, tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with the attribute that vLLM's models look for."""
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    vars(parameter)["weight_loader"] = receive
    return parameter


def _register_scales(layer: torch.nn.Module, intake: Intake, name: str, streams: bool) -> None:
    if not streams:
        layer.register_parameter(name, Port(intake.receiver("scale")))
        return
    ports = StreamPorts(intake)
    layer.add_module(name, ports)
    for suffix in STREAM_SUFFIXES.values():
        layer.__dict__[f"{name}.{suffix}"] = getattr(ports, suffix)
