"""The CuTe kernels as an execution of the experts: scales stay compressed up to the registers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .execution import Tensors
from .kernels import layout, reference
from .kernels.activation import Activation
from .kernels.compiled.build import ProgramSet
from .kernels.moe import experts as moe
from .kernels.moe import programs
from .kernels.packer import Packer
from .layer_timer import Inputs, LayerTimer
from .planning import LayerFacts, Limits, Plan, flag_words, geometry_of, make_plan
from .startup import Served

# Experts whose source tensors and temporaries are on the device at a time while a layer is prepared.
GROUP_BYTES = 256 << 20
MATRICES = ("tiles", "bases", "slices", "starts", "records", "dense")


class CuteExecution:
    """Weights in fragment order, scales compressed or native; see `kernels.layout` for the resident form."""

    takes_whole_scales = True

    def __init__(self, native: bool = False) -> None:
        self._native = native
        self.name = "cute, native scales" if native else "cute"
        self._rooms: dict[str, tuple[int, int]] = {}
        self._shapes: dict[str, layout.Shape] = {}
        self._served: Served | None = None

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, activation: Activation, hidden: int) -> bool:
        """bf16 on Hopper. Other architectures compile, but were not run: they have to be asked for."""
        return (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) == (9, 0)
            and can_compute(dtype, activation, hidden)
        )

    # ---- start -----------------------------------------------------------------------------------

    def plan(self, facts: LayerFacts, limits: Limits, device: torch.device) -> Plan:
        return make_plan(replace(geometry_of(facts, *device_facts(device)), native=self._native), limits)

    def serve_by(self, served: Served) -> None:
        self._served = served

    def try_out(self, resident: Tensors, expert_map: torch.Tensor | None, scratch: reference.Scratch) -> None:
        assert self._served is not None
        scratch.reserve(self.scratch_bytes())
        g, device = self._served.plan.geometry, resident["flags"].device
        for step in self._served.plan.steps:
            x = torch.zeros(step.first, g.hidden, dtype=torch.bfloat16, device=device)
            weights = torch.zeros(step.first, g.topk, dtype=torch.float32, device=device)
            for dtype in (torch.int32, torch.int64):
                ids = torch.zeros(step.first, g.topk, dtype=dtype, device=device)
                self(resident, x, weights, ids, expert_map, False, scratch)

    # ---- weights ---------------------------------------------------------------------------------

    def prepare(self, layer: reference.ExpertLayer) -> dict[str, torch.Tensor]:
        resident = {
            **self._pack("13", layer.w13, layer.scales13, 2),
            **self._pack("2", layer.w2, layer.scales2, 1),
            "alphas13": layer.alphas13.float().contiguous(),
            "alphas2": layer.alphas2.float().contiguous(),
        }
        resident["flags"] = new_flags(layer.w2.device)
        return resident

    def packer(self, device: torch.device) -> Packer | None:
        """That of the plan on a GPU; elsewhere, and without a plan, torch packs."""
        return self._served.packer() if self._served is not None and device.type == "cuda" else None

    def _pack(
        self, half: str, weight: torch.Tensor, planes: reference.ScalePlanes, halves: int
    ) -> dict[str, torch.Tensor]:
        packer = self.packer(weight.device)
        groups = _decoded(
            weight, planes, halves, _experts_at_once(weight, planes, halves, packer is not None)
        )
        matrix = moe.prepare_groups(weight, groups, halves == 2, self._native, packer)
        self._shapes[half] = matrix.shape
        found = dict(zip(MATRICES, matrix.tensors(), strict=True))
        room = self._room_for(half, found["records"].numel(), found["dense"].shape[0])
        for name, size in zip(("records", "dense"), room, strict=True):
            found[name] = _with_room(found[name], size)
        return {f"{name}{half}": tensor for name, tensor in found.items()}

    def _room_for(self, half: str, records: int, dense: int) -> tuple[int, int]:
        """Capacity for exceptions: a reload brings other ones into tensors whose addresses graphs know."""
        room = self._rooms.setdefault(half, (records + records // 16 + 64, dense + dense // 16 + 8))
        if records > room[0] or dense > room[1]:
            raise ValueError(
                f"new weights have {records} exception words and {dense} dense tiles, expected at most "
                f"{room[0]} and {room[1]}; start the server anew to serve them"
            )
        return room

    def scale_bytes(self, resident: Tensors) -> int:
        total = sum(t.nbytes for name, t in resident.items() if name.rstrip("123") in MATRICES)
        return total - sum(
            s.experts * s.row_blocks * s.k_tiles * layout.WEIGHT_BYTES for s in self._shapes.values()
        )

    def exceptions(self, resident: Tensors) -> int:
        view = self._view(resident)
        return layout.exceptions(view.w13) + layout.exceptions(view.w2)

    # ---- calls -----------------------------------------------------------------------------------

    def scratch_bytes(self) -> int:
        return self._served.plan.scratch_bytes if self._served is not None else 0

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
        """Raises UndeclaredProgramError for a call that the plan does not foresee: nothing compiles here."""
        served = self._served
        assert served is not None
        served.plan.check(x.shape[0], topk_ids.shape[1], expert_map is not None)
        weights = topk_weights.float().contiguous()
        x = x.contiguous()
        if apply_router_weight_on_input:
            x, weights = x * topk_weights.to(x.dtype), torch.ones_like(weights)
        ids = topk_ids.contiguous()
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.int()
        out = torch.empty_like(x)
        view = self._view(resident)
        for start in range(0, x.shape[0], served.plan.piece):
            piece = slice(start, start + served.plan.piece)
            tokens = x[piece].shape[0]
            step, program = served.program(tokens, ids.dtype == torch.int64)
            moe.run(
                program,
                view,
                programs.workspace(scratch.take, served.plan.geometry, step.choice, tokens),
                resident["flags"],
                x[piece],
                ids[piece],
                weights[piece],
                out[piece],
                expert_map,
                step.choice.ctas,
            )
        return out

    def timer(
        self,
        resident: Tensors,
        expert_map: torch.Tensor | None,
        geometry: programs.Geometry,
        own: ProgramSet,
        others: ProgramSet,
        nbytes: int,
    ) -> LayerTimer:
        view = self._view(resident)

        def launch(
            choice: programs.Choice,
            program: Callable,
            inputs: Inputs,
            out: torch.Tensor,
            scratch: reference.Scratch,
        ) -> None:
            taken = programs.workspace(scratch.take, geometry, choice, inputs.x.shape[0])
            moe.run(
                program, view, taken, resident["flags"], inputs.x, inputs.ids, inputs.weights, out,
                expert_map, choice.ctas,
            )  # fmt: skip

        return LayerTimer(launch, geometry, own, others, nbytes)

    def _view(self, resident: Tensors) -> moe.PreparedExperts:
        matrices = {
            half: layout.PreparedMatrix(shape, *(resident[f"{name}{half}"] for name in MATRICES))
            for half, shape in self._shapes.items()
        }
        return moe.PreparedExperts(matrices["13"], matrices["2"], resident["alphas13"], resident["alphas2"])


def new_flags(device: torch.device) -> torch.Tensor:
    """Zero before and after every call; see `Epilogue.finish_run`."""
    return torch.zeros(flag_words(device_facts(device)[1]), dtype=torch.int32, device=device)


def device_facts(device: torch.device) -> tuple[str, int]:
    """Architecture and multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    suffix = "a" if properties.major >= 9 else ""
    return f"sm_{properties.major}{properties.minor}{suffix}", properties.multi_processor_count


def can_compute(dtype: torch.dtype, activation: Activation, hidden: int) -> bool:
    """Whether the kernels compute a layer at all, on any architecture."""
    if dtype != torch.bfloat16 or hidden % layout.TILE_K:
        return False
    if any(importlib.util.find_spec(name) is None for name in ("cutlass", "tvm_ffi")):
        return False
    from .kernels.moe.epilogue import supported

    return supported(activation)


def _experts_at_once(weight: torch.Tensor, planes: reference.ScalePlanes, halves: int, on_gpu: bool) -> int:
    """How many experts' temporaries GROUP_BYTES hold while they are packed, by torch or on the GPU."""
    size = weight[0].numel() * 8
    if on_gpu:
        channels = planes.rows if halves == 2 else planes.cols * layout.GROUP
        size = 0 if planes.native else 4 * halves * planes.rows * planes.cols
        if channels % layout.TILE_K:
            size += 2 * weight[0].numel()  # a padded copy of weights and scales
    return max(1, GROUP_BYTES // size) if size else weight.shape[0]


def _decoded(
    weight: torch.Tensor, planes: reference.ScalePlanes, halves: int, group: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Groups of experts with their scale bytes uint8 [experts, halves * rows, cols]."""
    size = planes.rows * planes.cols
    for start in range(0, weight.shape[0], group):
        stop = min(start + group, weight.shape[0])
        if planes.native:
            whole = planes.fixed.view(weight.shape[0], halves * planes.rows, planes.cols)
            yield slice(start, stop), whole[start:stop]
            continue
        index = torch.arange(start * halves, stop * halves, device=weight.device)
        out = torch.empty(len(index), size + 1, dtype=torch.uint8, device=weight.device)
        scale = reference.decode_planes(planes, index, out)
        yield slice(start, stop), scale.reshape(stop - start, halves * planes.rows, planes.cols)


def _with_room(tensor: torch.Tensor, size: int) -> torch.Tensor:
    out = torch.zeros(
        (size, *tensor.shape[1:]),
        dtype=torch.int16 if tensor.dtype == torch.uint16 else tensor.dtype,
        device=tensor.device,
    )
    out[: tensor.shape[0]] = tensor.view(out.dtype)
    return out
