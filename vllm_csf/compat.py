"""The only module that touches vLLM's private API, for vLLM 0.31 to 0.33.

Everything the plugin takes from vLLM beyond the public base classes is imported or wrapped here,
so that a new vLLM version is a change of one file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs

from .kernels.activation import Activation

__all__ = [
    "CompressedTensorsConfig",
    "FusedMoEMethodBase",
    "LinearBase",
    "ModelOptMixedPrecisionConfig",
    "ModelOptNvFp4Config",
    "ParallelLMHead",
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
    "UnquantizedLinearMethod",
    "activation_of",
    "additional_setting",
    "call_limits",
    "can_sleep",
    "compressed_tensors_is_nvfp4",
    "experts_by_name",
    "is_first_tensor_rank",
    "load_format",
    "local_expert",
    "modelopt_method",
    "refusals",
    "set_weight_attrs",
    "tuning_argument",
]

# The layerwise reload counts copied elements and finishes a layer once it has seen them all. The
# streams of a layer have no element count known beforehand: this many are never reached, so the
# layer is finished when the reload ends.
NEVER_COMPLETE = 1 << 40

# The backends of data parallel dispatch that work with a method that has no modular kernel.
_PLAIN_ALL2ALL = ("allgather_reducescatter",)


def load_format() -> str:
    return str(get_current_vllm_config().load_config.load_format)


def additional_setting(name: str, default: str) -> str:
    """A value of ``--additional-config '{"name": "value"}'``."""
    extra = get_current_vllm_config().additional_config
    return str(extra.get(name, default)) if isinstance(extra, dict) else default


def tuning_argument() -> Any:
    """The field `tuning` of ``--quantization-config``; None where it was not given."""
    model = get_current_vllm_config().model_config
    return getattr(getattr(model, "quantization_config", None), "tuning", None)


def call_limits(moe: Any) -> tuple[int, tuple[int, ...], int]:
    """Most tokens of a call of the experts, the sizes that graphs are captured for, speculative tokens.

    Data parallel ranks gather their tokens; sequence parallel ones pad them to equal parts first.
    """
    config = get_current_vllm_config()
    sizes = tuple(sorted(config.compilation_config.cudagraph_capture_sizes or ()))
    tokens = max((config.scheduler_config.max_num_batched_tokens, *sizes))
    ranks = config.parallel_config.tensor_parallel_size
    tokens = -(-tokens // ranks) * ranks * max(1, moe.dp_size)
    speculative = config.speculative_config
    return tokens, sizes, int(speculative.num_speculative_tokens or 0) if speculative else 0


def can_sleep() -> bool:
    """Whether weights live in pools that the engine can put to sleep."""
    return bool(getattr(get_current_vllm_config().model_config, "enable_sleep_mode", False))


def kv_cache_token_bytes() -> int:
    """Bytes of this rank's KV cache for one token, in all attention layers; 0 where vLLM does not tell."""
    config = get_current_vllm_config()
    model, parallel = config.model_config, config.parallel_config
    try:
        heads = 1 if model.use_mla else 2 * model.get_num_kv_heads(parallel)
        layers = model.get_num_layers_by_block_type(parallel, "attention")
        kept = str(config.cache_config.cache_dtype)
        size = 1 if kept.startswith("fp8") else torch.empty(0, dtype=model.dtype).element_size()
        return int(heads * model.get_head_size() * layers * size)
    except (AttributeError, TypeError, ValueError):
        return 0


def is_first_tensor_rank() -> bool:
    return get_tensor_model_parallel_rank() == 0


def experts_by_name(layer_name: str) -> RoutedExperts:
    """The experts module of a layer of the model that is running."""
    return get_forward_context().no_compile_layers[layer_name].routed_experts


def local_expert(layer: RoutedExperts) -> Callable[[int], int]:
    """Global physical expert id -> local index, -1 where another rank owns it."""
    return layer.expert_map_manager.map_global_to_local


def activation_of(moe: Any) -> Activation:
    """The activation of a FusedMoEConfig. Raises ValueError for those that cannot be served."""
    kind = moe.activation
    if kind == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        alpha = 1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha
        beta = 0.0 if moe.swiglu_beta is None else moe.swiglu_beta
        return Activation("swiglu_oai", limit=moe.swiglu_limit, alpha=alpha, beta=beta)
    if kind == MoEActivation.SWIGLUSTEP:
        # vLLM's own kernel has this limit built in and ignores the configuration.
        return Activation("swiglu_step", limit=7.0)
    if kind == MoEActivation.SITU:
        return Activation("situ", limit=moe.activation_situ_linear_beta, beta=moe.activation_situ_beta or 0.0)
    limit = moe.swiglu_limit if kind == MoEActivation.SILU else None
    return Activation(kind.value.removesuffix("_no_mul"), gated=kind.is_gated, limit=limit)


def modelopt_method(layer: RoutedExperts, prefix: str, algorithm: str) -> Any:
    """The method of stock vLLM for a layer in one ModelOpt format."""
    recipe = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {prefix: {"quant_algo": algorithm}}}
    return ModelOptMixedPrecisionConfig.from_config(recipe).get_quant_method(layer, prefix)


def compressed_tensors_is_nvfp4(config: CompressedTensorsConfig, layer: Any, prefix: str) -> bool:
    """Whether a compressed-tensors recipe quantises a layer (or its first expert) to NVFP4."""
    config._add_fused_moe_to_target_scheme_map()
    name = f"{prefix}.0.{layer.ckpt_down_proj_name}" if isinstance(layer, RoutedExperts) else prefix
    try:
        scheme = config.get_scheme_dict(layer, name)
    except ValueError:  # it has no target that matches, as with an output head
        return False
    return bool(scheme) and config._is_nvfp4_format(scheme["weights"])


def refusals(layer: RoutedExperts) -> list[str]:
    """What this deployment asks for and the method cannot do, a phrase each."""
    moe, config = layer.moe_config, get_current_vllm_config()
    parallel = config.parallel_config
    found = []
    if moe.moe_parallel_config.enable_eplb:
        found.append(
            "expert load balancing (--enable-eplb): compressed scales differ in size from expert to expert"
        )
    if moe.has_bias:
        found.append("expert biases")
    if moe.is_lora_enabled:
        found.append("LoRA adapters (--enable-lora)")
    if parallel.enable_dbo:
        found.append("dual batch overlap (--enable-dbo): layers share one scratch")
    if moe.dp_size > 1:
        found += _data_parallel_refusals(config)
    if parallel.pipeline_parallel_size > 1 and _device_type(config) == "cpu":
        found.append(
            "pipeline parallelism on the CPU: vLLM's CPU runner does not pass tensors between stages"
        )
    if layer.apply_router_weight_on_input and layer.top_k != 1:
        found.append(f"router weights on the input with {layer.top_k} experts a token (1 is served)")
    try:
        activation_of(moe)
    except ValueError as error:
        found.append(str(error))
    return found


def _data_parallel_refusals(config: Any) -> list[str]:
    if _device_type(config) == "cpu":
        return ["data parallelism on the CPU: vLLM's CPU communicator has no all-gather of uneven batches"]
    backend = config.parallel_config.all2all_backend
    if backend not in _PLAIN_ALL2ALL:
        return [f"--all2all-backend {backend} ({' or '.join(_PLAIN_ALL2ALL)} is served)"]
    return []


def _device_type(config: Any) -> str:
    return torch.device(config.device_config.device).type
