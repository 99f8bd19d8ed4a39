"""Which method a layer gets: decided by what is stored; and what a deployment is refused for."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm_csf.kernels.activation import Activation

from vllm_csf import compat
from vllm_csf.experts import CsfMoEMethod
from vllm_csf.parameters import COMPRESSED_TENSORS
from vllm_csf.stock import stock_config
from vllm_csf.stored import Stored

PREFIX = "model.layers.1.mlp.experts"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
ENCODED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {PREFIX: {"quant_algo": "NVFP4", "weight_scale_encoding": "csf"}},
}


@pytest.fixture(autouse=True)
def vllm_config(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "is_first_tensor_rank", lambda: True)
    config = VllmConfig()
    config.device_config = SimpleNamespace(device=torch.device("cpu"))
    with set_current_vllm_config(config):
        yield config


def moe_config(**changes: Any) -> FusedMoEConfig:
    arguments: dict[str, Any] = {
        "num_experts": 4,
        "experts_per_token": 2,
        "hidden_dim": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_logical_experts": 4,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": None,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.float32,
    }
    return FusedMoEConfig(**arguments | changes)


def experts(**changes: Any) -> RoutedExperts:
    """A RoutedExperts with what a method's constructor asks it for."""
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = moe_config(**changes)
    layer.layer_name, layer.top_k, layer.apply_router_weight_on_input = PREFIX, 2, False
    return layer


def method(config: dict, *stored: str, prefix: str = PREFIX, layer: Any = None) -> Any:
    made = stock_config(copy.deepcopy(config))
    made.csf_stored = Stored(dict.fromkeys(stored)) if stored else None
    return made.get_quant_method(layer or experts(), prefix)


@pytest.mark.parametrize("stored", [(f"{PREFIX}.0.up_proj.weight_scale_2",), ()])
def test_nvfp4_experts_are_ours(stored: tuple[str, ...]) -> None:
    made = method(NVFP4, *stored)
    assert isinstance(made, CsfMoEMethod)
    assert not made._streams


@pytest.mark.parametrize("stored", [(f"{PREFIX}.0.up_proj.weight_scale.nvfp4_csf_fixed",), ()])
def test_csf_experts_expect_streams(stored: tuple[str, ...]) -> None:
    assert method(ENCODED, *stored)._streams


def test_the_csf_loader_hides_the_streams(vllm_config: VllmConfig) -> None:
    vllm_config.load_config.load_format = "csf"
    assert not method(ENCODED, f"{PREFIX}.0.up_proj.weight_scale.nvfp4_csf_fixed")._streams


@pytest.mark.parametrize("config", [NVFP4, ENCODED])
def test_experts_stored_in_bf16_are_unquantised_whatever_the_recipe_says(config: dict) -> None:
    assert isinstance(method(config, f"{PREFIX}.0.up_proj.weight"), UnquantizedFusedMoEMethod)


def test_experts_stored_in_fp8_get_the_method_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(compat, "modelopt_method", lambda layer, prefix, algo: asked.append((prefix, algo)))
    method(NVFP4, f"{PREFIX}.0.up_proj.weight", f"{PREFIX}.0.up_proj.weight_scale_inv")
    assert asked == [(PREFIX, "FP8_PB_WO")]


def test_experts_outside_the_recipe_are_left_to_stock() -> None:
    other = "model.layers.2.mlp.experts"
    assert method(ENCODED, prefix=other) is None
    assert method(NVFP4 | {"ignore": [other]}, prefix=other) is None


def linear() -> LinearBase:
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    return layer


def test_linear_layers_stored_plain_are_unquantised() -> None:
    name = "model.layers.1.self_attn.o_proj"
    made = method(NVFP4, f"{name}.weight", prefix=name, layer=linear())
    assert isinstance(made, UnquantizedLinearMethod)


def test_linear_layers_stored_in_fp8_get_the_method_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(compat, "modelopt_method", lambda layer, prefix, algo: asked.append((prefix, algo)))
    name = "model.layers.1.self_attn.o_proj"
    method(NVFP4, f"{name}.weight", f"{name}.weight_scale_inv", prefix=name, layer=linear())
    assert asked == [(name, "FP8_PB_WO")]


def test_names_of_compressed_tensors_are_followed_under_any_recipe() -> None:
    parts = ("weight_packed", "weight_global_scale", "weight_scale.nvfp4_csf_fixed")
    made = method(ENCODED, *(f"{PREFIX}.0.up_proj.{part}" for part in parts))
    assert made._dialect is COMPRESSED_TENSORS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_bias": True}, "expert biases"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"activation": MoEActivation.SWIGLUOAI}, "activation is 'swigluoai'"),
        ({"activation": MoEActivation.RELU2}, "activation is 'relu2'"),
    ],
)
def test_layers_that_cannot_be_served_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{PREFIX}: csf_nvfp4 does not serve .*{message}"):
        method(NVFP4, layer=experts(**changes))


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        ("parallel_config", "enable_dbo", True, "dual batch overlap"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism on the CPU"),
    ],
)
def test_deployments_that_cannot_be_served_are_refused(
    vllm_config: VllmConfig, where: str, name: str, value: Any, message: str
) -> None:
    setattr(getattr(vllm_config, where), name, value)
    with pytest.raises(ValueError, match=message):
        method(NVFP4)


def parallel(**changes: Any) -> FusedMoEParallelConfig:
    config = FusedMoEParallelConfig.make_no_parallel()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_expert_load_balancing_is_refused() -> None:
    with pytest.raises(ValueError, match="--enable-eplb"):
        method(NVFP4, layer=experts(moe_parallel_config=parallel(enable_eplb=True)))


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("cpu", "allgather_reducescatter", "data parallelism on the CPU"),
        ("cuda", "deepep_low_latency", "--all2all-backend deepep_low_latency"),
    ],
)
def test_data_parallelism_without_a_way_to_dispatch_is_refused(
    vllm_config: VllmConfig, device: str, backend: str, message: str
) -> None:
    vllm_config.device_config = SimpleNamespace(device=torch.device(device))
    vllm_config.parallel_config.all2all_backend = backend
    with pytest.raises(ValueError, match=message):
        method(NVFP4, layer=experts(moe_parallel_config=parallel(dp_size=2)))


def test_router_weights_on_the_input_of_several_experts_are_refused() -> None:
    layer = experts()
    layer.apply_router_weight_on_input = True
    with pytest.raises(ValueError, match="router weights on the input with 2 experts"):
        method(NVFP4, layer=layer)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, Activation("silu")),
        ({"swiglu_limit": 7.0}, Activation("silu", limit=7.0)),
        ({"activation": MoEActivation.GELU}, Activation("gelu")),
        ({"activation": MoEActivation.GELU_TANH, "swiglu_limit": 7.0}, Activation("gelu_tanh")),
        (
            {
                "activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
                "swiglu_beta": 1.0,
            },
            Activation("swiglu_oai", limit=7.0, alpha=1.702, beta=1.0),
        ),
        ({"activation": MoEActivation.SWIGLUSTEP}, Activation("swiglu_step", limit=7.0)),
        (
            {
                "activation": MoEActivation.SITU,
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": 2.0,
            },
            Activation("situ", limit=2.0, beta=4.0),
        ),
    ],
)
def test_activations_of_vllm(changes: dict, activation: Activation) -> None:
    assert compat.activation_of(moe_config(**changes)) == activation


def test_every_other_activation_of_vllm_is_refused() -> None:
    refused = set()
    for kind in MoEActivation:
        moe = SimpleNamespace(
            activation=kind,
            swiglu_limit=7.0,
            swiglu_alpha=1.0,
            swiglu_beta=0.0,
            activation_situ_beta=1.0,
            activation_situ_linear_beta=None,
        )
        try:
            compat.activation_of(moe)
        except ValueError:
            refused.add(kind)
    assert refused == {MoEActivation.SWIGLUOAI, MoEActivation.RELU2}
