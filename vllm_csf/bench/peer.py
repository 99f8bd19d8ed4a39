"""vLLM's own NVFP4 expert layer for GPUs without FP4 tensor cores: Marlin (private API, vLLM 0.33)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from .layers import Stack


def marlin(stack: Stack) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x, ids, weights) -> output, of the same layer. Gate and up must share their global scale."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    if not torch.equal(stack.alpha13[:, 0], stack.alpha13[:, 1]):
        raise ValueError("gate and up have different global scales, which Marlin cannot carry")
    experts, rows, half = stack.w13.shape
    layer = SimpleNamespace(
        num_experts=experts,
        hidden_size=2 * half,
        intermediate_size_per_partition=rows // 2,
        params_dtype=torch.bfloat16,
    )
    w13, scale13, alpha13, w2, scale2, alpha2 = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
        layer,
        stack.w13,
        stack.scale13.view(torch.float8_e4m3fn),
        stack.alpha13[:, 0].contiguous(),
        stack.w2,
        stack.scale2.view(torch.float8_e4m3fn),
        stack.alpha2,
        is_act_and_mul=True,
    )

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(
            x,
            w13,
            w2,
            None,
            None,
            scale13,
            scale2,
            weights,
            ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=experts,
            activation=MoEActivation.SILU,
            global_scale1=alpha13,
            global_scale2=alpha2,
        )

    return run
