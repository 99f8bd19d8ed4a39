"""Which checkpoints are claimed, and that all but NVFP4 experts stays as stock vLLM would have it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)

import vllm_csf
from vllm_csf.config import CsfNvfp4Config
from vllm_csf.tuning import Budget

PREFIX = "model.layers.0.mlp.experts"
CSF_LAYERS = {PREFIX: {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}}
PLAIN_LAYERS = {PREFIX: {"quant_algo": "NVFP4", "group_size": 16}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
}

# As read from hf_quant_config.json where config.json has no recipe.
LEGACY = {
    "producer": {"name": "modelopt"},
    "quant_method": "modelopt_fp4",
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}

NOT_OURS = [
    None,
    {},
    MIXED | {"quantized_layers": PLAIN_LAYERS},
    NVFP4,
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "mxfp4"},
    COMPRESSED,
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
]


def claim(config: Any, flag: str | None = None) -> str | None:
    return CsfNvfp4Config.override_quantization_method(config, flag)


@pytest.mark.parametrize("config", NOT_OURS)
@pytest.mark.parametrize("flag", [None, "modelopt_fp4", "fp8"])
def test_nothing_else_is_claimed(config: Any, flag: str | None) -> None:
    before = copy.deepcopy(config)
    assert claim(config, flag) is None
    assert config == before


@pytest.mark.parametrize(
    "config",
    [
        MIXED | {"quantized_layers": CSF_LAYERS},
        {"quant_method": "modelopt", "quantization": MIXED | {"quantized_layers": CSF_LAYERS}},
        MIXED
        | {"quantized_layers": {"model.layers.9.self_attn.o_proj": {"quant_algo": "FP8"}, **CSF_LAYERS}},
    ],
)
@pytest.mark.parametrize("flag", [None, "modelopt", "csf_nvfp4"])
def test_csf_checkpoints_are_claimed_without_a_flag(config: Any, flag: str | None) -> None:
    assert claim(config, flag) == "csf_nvfp4"


@pytest.mark.parametrize("config", [NVFP4, MIXED | {"quantized_layers": PLAIN_LAYERS}, COMPRESSED])
def test_the_flag_claims_plain_checkpoints(config: Any) -> None:
    assert claim(config, "csf_nvfp4") == "csf_nvfp4"


def test_unknown_encodings_are_refused() -> None:
    other = {"model.layers.1.mlp.experts": {"weight_scale_encoding": "csf2"}}
    for layers in (other, CSF_LAYERS | other):
        with pytest.raises(ValueError, match="weight_scale_encoding is 'csf2', expected 'csf'"):
            claim(MIXED | {"quantized_layers": layers})


@pytest.mark.parametrize(
    ("config", "stock"),
    [
        (NVFP4, ModelOptNvFp4Config),
        (LEGACY, ModelOptNvFp4Config),
        (MIXED | {"quantized_layers": CSF_LAYERS}, ModelOptMixedPrecisionConfig),
        (COMPRESSED, CompressedTensorsConfig),
    ],
)
def test_configuration_is_the_stock_one_but_for_its_class(config: dict, stock: type) -> None:
    ours = CsfNvfp4Config.from_config(copy.deepcopy(config))
    theirs = stock.from_config(copy.deepcopy(config))
    assert isinstance(ours, stock)
    assert ours.get_name() == theirs.get_name()
    assert ours.get_min_capability() == theirs.get_min_capability()
    own = {k: v for k, v in vars(ours).items() if not k.startswith("csf_")}
    assert own.keys() == vars(theirs).keys()
    assert own.get("exclude_modules") == vars(theirs).get("exclude_modules")


@pytest.mark.parametrize("config", [NVFP4, MIXED | {"quantized_layers": CSF_LAYERS}, COMPRESSED])
def test_configuration_travels_to_workers(config: dict) -> None:
    ours = CsfNvfp4Config.from_config(copy.deepcopy(config))
    there = pickle.loads(pickle.dumps(ours))
    assert type(there) is type(ours)
    assert there.csf_encoded == ours.csf_encoded


@pytest.mark.parametrize(
    "config", [{"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "gptq"}]
)
def test_recipes_without_nvfp4_are_refused(config: dict) -> None:
    with pytest.raises(ValueError, match="csf_nvfp4 serves NVFP4 experts"):
        CsfNvfp4Config.from_config(config)


@pytest.mark.parametrize("config", [NVFP4, MIXED | {"quantized_layers": CSF_LAYERS}, COMPRESSED])
def test_tuning_is_a_field_of_the_configuration(config: dict) -> None:
    assert CsfNvfp4Config.from_config(copy.deepcopy(config)).csf_tuning is None
    given = copy.deepcopy(config) | {"tuning": {"seconds": 5}}
    made = CsfNvfp4Config.from_config(given)
    assert pickle.loads(pickle.dumps(made)).csf_tuning == Budget(seconds=5.0)
    assert given["tuning"] == {"seconds": 5}
    with pytest.raises(ValueError, match=r"tuning\.seconds is -1, expected a number of seconds above 0"):
        CsfNvfp4Config.from_config(copy.deepcopy(config) | {"tuning": {"seconds": -1}})


def test_registration_may_be_repeated() -> None:
    for _ in range(2):
        vllm_csf.register()
    assert get_quantization_config("csf_nvfp4") is CsfNvfp4Config


def test_import_is_light() -> None:
    script = (
        "import sys, time; start = time.perf_counter(); import vllm_csf; "
        "assert time.perf_counter() - start < 0.2; assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
