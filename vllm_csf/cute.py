"""The CuTe kernels as an execution of the experts: scales stay compressed up to the registers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from .execution import Tensors
from .kernels import layout, reference
from .kernels.activation import Activation
from .kernels.moe import experts as moe
from .kernels.moe import programs

# Experts whose source tensors and temporaries are on the device at a time while a layer is prepared.
GROUP_BYTES = 256 << 20
MATRICES = ("tiles", "bases", "slices", "starts", "records", "dense")


class CuteExecution:
    """Weights in fragment order, scales compressed; see `kernels.layout` for the resident form."""

    name = "cute"

    def __init__(self) -> None:
        self._layer: tuple[int, int, int, Activation] | None = None
        self._rooms: dict[str, tuple[int, int]] = {}
        self._shapes: dict[str, layout.Shape] = {}
        self._plans: dict[tuple[int, int, bool, bool], tuple[programs.Choice, ...]] = {}

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, activation: Activation, hidden: int) -> bool:
        """bf16 on Hopper. Other architectures compile, but were not run: they have to be asked for."""
        return (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) == (9, 0)
            and can_compute(dtype, activation, hidden)
        )

    # ---- weights ---------------------------------------------------------------------------------

    def prepare(self, layer: reference.ExpertLayer) -> dict[str, torch.Tensor]:
        resident = {
            **self._pack("13", layer.w13, layer.scales13, 2),
            **self._pack("2", layer.w2, layer.scales2, 1),
            "alphas13": layer.alphas13.float().contiguous(),
            "alphas2": layer.alphas2.float().contiguous(),
        }
        self._layer = (layer.experts, layer.hidden, moe.pad_to_tile(layer.width), layer.activation)
        self._arch, self._multiprocessors = _device(layer.w2.device)
        # Zero before and after every call; see `Epilogue.finish_run`.
        warps = 2 * self._multiprocessors * 8
        resident["flags"] = torch.zeros(2 * warps, dtype=torch.int32, device=layer.w2.device)
        return resident

    def _pack(
        self, half: str, weight: torch.Tensor, planes: reference.ScalePlanes, halves: int
    ) -> dict[str, torch.Tensor]:
        parts = [
            moe.prepare_matrix(weight[group], scale, gated=halves == 2)
            for group, scale in _decoded(weight, planes, halves)
        ]
        matrix = layout.concatenate(parts)
        del parts
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

    # ---- calls -----------------------------------------------------------------------------------

    def scratch_bytes(self) -> int:
        """Grows with the first call: the engine makes one with the most tokens before it captures graphs."""
        return 0

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
        weights = topk_weights.float().contiguous()
        x = x.contiguous()
        if apply_router_weight_on_input:
            x, weights = x * topk_weights.to(x.dtype), torch.ones_like(weights)
        ids = topk_ids.contiguous()
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.int()
        geometry = self._geometry(ids, expert_map)
        options = self._options(geometry)
        out = torch.empty_like(x)
        for start in range(0, x.shape[0], options[-1].tokens):
            piece = slice(start, start + options[-1].tokens)
            self._run(
                geometry,
                options,
                resident,
                x[piece],
                ids[piece],
                weights[piece],
                out[piece],
                expert_map,
                scratch,
            )
        return out

    def _geometry(self, ids: torch.Tensor, expert_map: torch.Tensor | None) -> programs.Geometry:
        assert self._layer is not None
        experts, hidden, inner, activation = self._layer
        return programs.Geometry(
            experts=experts,
            global_experts=experts if expert_map is None else expert_map.numel(),
            hidden=hidden,
            inner=inner,
            topk=ids.shape[1],
            activation=activation,
            mapped=expert_map is not None,
            wide_ids=ids.dtype == torch.int64,
            arch=self._arch,
            multiprocessors=self._multiprocessors,
        )

    def _options(self, geometry: programs.Geometry) -> tuple[programs.Choice, ...]:
        """With the first call, every program of the geometry is compiled: none may be in a captured call."""
        key = (geometry.topk, geometry.global_experts, geometry.mapped, geometry.wide_ids)
        if key not in self._plans:
            self._plans[key] = programs.choices(geometry)
            for choice in self._plans[key]:
                programs.program(geometry, choice)
        return self._plans[key]

    def _run(
        self,
        geometry: programs.Geometry,
        options: tuple[programs.Choice, ...],
        resident: Tensors,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        expert_map: torch.Tensor | None,
        scratch: reference.Scratch,
    ) -> None:
        choice = programs.choice_for(options, x.shape[0])
        workspace = moe.Workspace.within(
            scratch.take,
            x.shape[0],
            geometry.topk,
            geometry.hidden,
            geometry.inner,
            8 * choice.ctas,
            choice.units,
        )
        moe.run(
            programs.program(geometry, choice),
            self._view(resident),
            workspace,
            resident["flags"],
            x,
            ids,
            weights,
            out,
            expert_map,
            choice.ctas,
        )

    def _view(self, resident: Tensors) -> moe.PreparedExperts:
        matrices = {
            half: layout.PreparedMatrix(shape, *(resident[f"{name}{half}"] for name in MATRICES))
            for half, shape in self._shapes.items()
        }
        return moe.PreparedExperts(matrices["13"], matrices["2"], resident["alphas13"], resident["alphas2"])


def _device(device: torch.device) -> tuple[str, int]:
    """Architecture and multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}a", properties.multi_processor_count


def can_compute(dtype: torch.dtype, activation: Activation, hidden: int) -> bool:
    """Whether the kernels compute a layer at all, on any architecture."""
    if dtype != torch.bfloat16 or hidden % layout.TILE_K:
        return False
    if any(importlib.util.find_spec(name) is None for name in ("cutlass", "tvm_ffi")):
        return False
    from .kernels.moe.epilogue import supported

    return supported(activation)


def _decoded(
    weight: torch.Tensor, planes: reference.ScalePlanes, halves: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Groups of experts with their scale bytes uint8 [experts, halves * rows, cols]."""
    size = planes.rows * planes.cols
    group = max(1, GROUP_BYTES // (weight[0].numel() * 8))
    for start in range(0, weight.shape[0], group):
        stop = min(start + group, weight.shape[0])
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
