"""vLLM's own NVFP4 expert layer for GPUs without FP4 tensor cores: Marlin (private API, vLLM 0.33)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .layers import Stack


def needed() -> SimpleNamespace:
    """What this takes of vLLM. Raises ImportError or AttributeError where it is not there."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    return SimpleNamespace(
        moe_sum=_custom_ops.moe_sum,
        workspace=marlin_utils.get_marlin_workspace,
        silu=MoEActivation.SILU,
        fused_marlin_moe=fused_marlin_moe,
        prepare=marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin,
        fp4=scalar_types.float4_e2m1f.id,
    )


def marlin(stack: Stack) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x, ids, weights) -> output, of the same layer. Gate and up must share their global scale."""
    vllm = needed()
    if not torch.equal(stack.alpha13[:, 0], stack.alpha13[:, 1]):
        raise ValueError("gate and up have different global scales, which Marlin cannot carry")
    experts, rows, half = stack.w13.shape
    layer = SimpleNamespace(
        num_experts=experts,
        hidden_size=2 * half,
        intermediate_size_per_partition=rows // 2,
        params_dtype=torch.bfloat16,
    )
    w13, scale13, alpha13, w2, scale2, alpha2 = vllm.prepare(
        layer,
        stack.w13,
        stack.scale13.view(torch.float8_e4m3fn),
        stack.alpha13[:, 0].contiguous(),
        stack.w2,
        stack.scale2.view(torch.float8_e4m3fn),
        stack.alpha2,
        is_act_and_mul=True,
    )

    # A server keeps its locks; made in each call, their clearing would be timed too.
    locks = vllm.workspace(stack.w13.device)

    def reduce(pairs: torch.Tensor, out: torch.Tensor, *_: Any) -> torch.Tensor:
        vllm.moe_sum(pairs, out)  # as vLLM serves it; fused_marlin_moe alone would use torch.sum
        return out

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return vllm.fused_marlin_moe(
            x,
            w13,
            w2,
            None,
            None,
            scale13,
            scale2,
            weights,
            ids,
            quant_type_id=vllm.fp4,
            global_num_experts=experts,
            activation=vllm.silu,
            moe_sum=reduce,
            workspace=locks,
            global_scale1=alpha13,
            global_scale2=alpha2,
        )

    return run
