"""The vLLM method of a layer of compressed experts: its parameters, its resident form, its call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import compat, dummy
from .execution import Execution, choose
from .intake import Intake, LayerShape
from .kernels.activation import Activation
from .parameters import Dialect, register_parameters
from .partition import extent, padded_width
from .planning import LayerFacts, Limits, Plan
from .report import Ledger
from .startup import release_cached

PREFIX = "csf_"


class CsfMoEMethod(compat.FusedMoEMethodBase):
    """Serves the experts of one layer from compressed scales.

    streams: the checkpoint holds CSF streams (and the loader does not hide them). plain: it holds plain
    scales.
    Raises ValueError, with everything that stands in the way, where the deployment cannot be served.
    """

    def __init__(
        self, layer: compat.RoutedExperts, dialect: Dialect, streams: bool, plain: bool, ledger: Ledger
    ) -> None:
        super().__init__(layer.moe_config)
        if found := compat.refusals(layer):
            raise ValueError(f"{layer.layer_name}: csf_nvfp4 does not serve " + "; ".join(found))
        self._dialect = dialect
        self._streams = streams
        self._plain = plain
        self._ledger = ledger
        self._activation: Activation = compat.activation_of(layer.moe_config)
        self._dummy = compat.load_format() == "dummy"
        self._resident_names: tuple[str, ...] = ()
        self._plan: Plan | None = None
        self._pooled = compat.can_sleep()

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, padded_width(self.moe.intermediate_size, self.moe.tp_size)

    def create_weights(
        self,
        layer: compat.RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        moe = self.moe
        part = extent(moe.intermediate_size, moe.tp_rank, moe.tp_size, layer.layer_name)
        shape = LayerShape(
            layer.layer_name, num_experts, hidden_size, moe.intermediate_size, part, self._activation.gated
        )
        room = float(compat.additional_setting("csf_exception_room", "0"))
        divides = self._dialect.global_scale_divides
        device = torch.empty(0).device  # vLLM makes a model with the device as torch's default
        self._execution: Execution = choose(
            compat.additional_setting("csf_execution", "auto"),
            device,
            params_dtype,
            self._activation,
            hidden_size,
            compat.additional_setting("csf_scales", "csf"),
        )
        whole = self._plain and self._execution.takes_whole_scales
        intake = Intake(layer, shape, compat.local_expert(layer), divides, room, whole)
        register_parameters(layer, intake, self._dialect, self._streams, compat.NEVER_COMPLETE)
        self._intake = intake
        self._ledger.expect(layer.layer_name)
        self._make_plan(layer, shape, device)

    def _make_plan(self, layer: compat.RoutedExperts, shape: LayerShape, device: torch.device) -> None:
        expert_map = layer.expert_map
        facts = LayerFacts(
            experts=shape.experts,
            global_experts=shape.experts if expert_map is None else expert_map.numel(),
            hidden=shape.hidden,
            width=shape.extent.size,
            topk=layer.top_k,
            activation=self._activation,
            mapped=expert_map is not None,
        )
        limits = Limits(*compat.call_limits(self.moe))
        plan = self._execution.plan(facts, limits, device)
        if plan is not None:
            folder = compat.additional_setting("csf_cache_dir", "") or None
            self._execution.serve_by(self._ledger.declare(plan, folder, device))
        self._plan = plan

    def process_weights_after_loading(self, layer: compat.RoutedExperts) -> None:
        if self._intake.empty and self._dummy:
            dummy.fill(layer, self._intake, self._dialect)
        sources = [getattr(layer, name) for name in self._source_names()]
        w13, w2, alphas13, alphas2 = (source.data for source in sources)
        experts = self._intake.finish(w13, w2, (alphas13, alphas2), self._activation)
        resident = self._execution.prepare(experts)
        for name in (*self._source_names(), "csf_scales13", "csf_scales2"):
            delattr(layer, name)
        for name, tensor in resident.items():
            layer.register_parameter(PREFIX + name, torch.nn.Parameter(tensor, requires_grad=False))
        self._resident_names = tuple(resident)
        del sources, w13, alphas13, alphas2
        device = w2.device
        if self._plan is not None:
            scratch = self._ledger.scratch(device)
            call = partial(self._execution.try_out, resident, layer.expert_map, scratch)
            timer = partial(self._execution.timer, resident, layer.expert_map)
            self._ledger.try_with(self._plan, call, timer)
        self._ledger.done(layer.layer_name, experts, self._execution, resident, device)
        del experts, w2
        release_cached(device, self._pooled)

    def _source_names(self) -> tuple[str, ...]:
        weight, scale = self._dialect.weight, self._dialect.global_scale
        return f"w13_{weight}", f"w2_{weight}", f"w13_{scale}", f"w2_{scale}"

    def get_fused_moe_quant_config(self, layer: compat.RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: compat.RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch.ops.vllm_csf.experts(x, topk_weights, topk_ids, layer.layer_name)

    def run(
        self, layer: compat.RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        resident = {name: getattr(layer, PREFIX + name) for name in self._resident_names}
        return self._execution(
            resident,
            x,
            topk_weights,
            topk_ids,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            self._ledger.scratch(x.device),
        )


@torch.library.custom_op("vllm_csf::experts", mutates_args=())
def experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """Opaque to torch.compile: what it does depends on the routing. The layer is looked up by name,
    as vLLM's own expert ops do, so that compiled graphs hold no tensors of one engine."""
    layer = compat.experts_by_name(layer_name)
    return layer.quant_method.run(layer, x, topk_weights, topk_ids)


@experts.register_fake
def _(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)
