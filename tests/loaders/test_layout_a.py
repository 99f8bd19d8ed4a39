"""The config of layout A, made from what other layouts store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_checkpoints import (
    PROJ,
    csf_config,
    csf_tensors,
    modelopt_tensors,
    random_layer,
    write_container,
    write_folder,
)
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.errors import RecipeError
from vllm_csf.loaders.layout_a import quantization_config


def test_config_of_a_container(tmp_path: Path) -> None:
    write_container(tmp_path, csf_tensors(random_layer(experts=2)))
    config = quantization_config(open_checkpoint(tmp_path))
    entry = {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}
    assert config["quantized_layers"] == {"model.layers.0.mlp.experts": entry}
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "MIXED_PRECISION")


def test_config_of_a_plain_source(tmp_path: Path) -> None:
    tensors = modelopt_tensors(random_layer(), input_scale=False)
    fp8 = torch.zeros(16, 32).to(torch.float8_e4m3fn)
    tensors |= {
        "a.q_proj.weight": torch.zeros(16, 16, dtype=torch.uint8),
        "a.q_proj.weight_scale": torch.zeros(16, 2).to(torch.float8_e4m3fn),
        "a.q_proj.weight_scale_2": torch.ones(()),
        "a.q_proj.input_scale": torch.ones(()),
        "b.o_proj.weight": fp8,
        "b.o_proj.weight_scale": torch.ones(()),
        "c.k_proj.weight": fp8,
        "c.k_proj.weight_scale": torch.zeros(16, 1, dtype=torch.uint8),
        "d.v_proj.weight": torch.zeros(4, 4),
    }
    for projection in PROJ.values():
        tensors[f"mtp.layers.0.mlp.experts.0.{projection}.weight"] = fp8
        tensors[f"mtp.layers.0.mlp.experts.0.{projection}.weight_scale"] = torch.ones(())
    source = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8},
    }
    write_folder(tmp_path, tensors, source)
    config = quantization_config(open_checkpoint(tmp_path))
    assert config["quantized_layers"] == {
        "a.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "b.o_proj": {"quant_algo": "FP8"},
        "c.k_proj": {"quant_algo": "MXFP8", "group_size": 32},
        "mtp.layers.0.mlp.experts": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {
            "quant_algo": "W4A16_NVFP4", "group_size": 16, "weight_scale_encoding": "csf",
        },
    }  # fmt: skip
    assert config["ignore"] == ["lm_head"]
    assert config["kv_cache_scheme"] == {"num_bits": 8}


def test_config_keeps_the_other_entries(tmp_path: Path) -> None:
    layer = random_layer()
    config = csf_config(layer.name)
    del config["quantized_layers"][layer.name]["weight_scale_encoding"]
    other = {"quant_algo": "MXFP8", "group_size": 32, "x": 1}
    config["quantized_layers"]["model.layers.0.self_attn.o_proj"] = other
    write_folder(tmp_path, modelopt_tensors(layer), config)
    made = quantization_config(open_checkpoint(tmp_path))["quantized_layers"]
    assert made["model.layers.0.self_attn.o_proj"] == other
    assert made[layer.name]["weight_scale_encoding"] == "csf"


def test_config_of_an_unnamed_form(tmp_path: Path) -> None:
    block = {
        "x.weight": torch.zeros(16, 32).to(torch.float8_e4m3fn),
        "x.weight_scale_inv": torch.ones(2, 1),
    }
    write_folder(tmp_path, {**modelopt_tensors(random_layer()), **block})
    with pytest.raises(RecipeError, match=r"x: F8_E4M3 weights with a F32 \[2, 1\] scale, expected"):
        quantization_config(open_checkpoint(tmp_path))
