"""Every layout and naming opens into the same inventory."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from fake_checkpoints import (
    PROJ,
    W123,
    Layer,
    Tensors,
    compressed_tensors,
    csf_config,
    csf_tensors,
    fused_tensors,
    modelopt_tensors,
    random_layer,
    refused,
    save,
    write_container,
    write_folder,
)
from vllm_csf.loaders.checkpoint import Checkpoint, open_checkpoint
from vllm_csf.loaders.codec import MXFP4, decode
from vllm_csf.loaders.errors import CheckpointError, RecipeError


def check(checkpoint: Checkpoint, layer: Layer) -> None:
    """The checkpoint holds exactly this layer, bit for bit."""
    found = checkpoint.layer(layer.name)
    assert (found.experts, found.width, found.hidden) == (layer.experts, layer.width, layer.hidden)
    assert {(e, p) for e in range(found.experts) for p in found.projections} == set(layer.matrices)
    for (expert, projection), m in layer.matrices.items():
        source = found.source(expert, projection)
        assert source.shape == (m.weight.shape[0], m.weight.shape[1] * 2)
        assert torch.equal(source.weight(), m.weight)
        assert torch.equal(source.scale(), m.scale)
        assert torch.equal(decode(source.plane()), m.scale)
        torch.testing.assert_close(source.global_scale, m.global_scale, rtol=2e-7, atol=0)
        assert source.global_scale.dtype == torch.float32
        assert source.global_scale.ndim == 0


@pytest.mark.parametrize("flat", [True, False], ids=["1-D", "2-D"])
@pytest.mark.parametrize("folder", ["", "tensors/", "deep/er/"])
def test_layout_a(tmp_path: Path, flat: bool, folder: str) -> None:
    layer = random_layer()
    write_folder(tmp_path, csf_tensors(layer, flat=flat), csf_config(layer.name), folder=folder)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layout == "A"
        assert checkpoint.layers[0].compressed
        assert checkpoint.layers[0].recipe.encoding == "csf"
        check(checkpoint, layer)
        source = checkpoint.layers[0].source(2, "down")
        assert source.scale_name == f"{layer.name}.2.down_proj.weight_scale"
        assert torch.equal(source.input_scale, layer.matrices[2, "down"].input_scale)  # type: ignore[arg-type]


def test_layout_b(tmp_path: Path) -> None:
    layer = random_layer()
    rest = {"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    write_container(tmp_path, {**csf_tensors(layer), **rest})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "B"
    assert checkpoint.metadata_root == tmp_path / "metadata"
    assert checkpoint.config == {"model_type": "x"}
    check(checkpoint, layer)
    assert torch.equal(checkpoint.read("model.norm.weight"), rest["model.norm.weight"])
    assert checkpoint.weight_map()["model.norm.weight"].startswith("tensors/model-")


@pytest.mark.parametrize(
    ("proj", "weight", "scale"), [(W123, "weight", "scale"), (PROJ, "weight_packed", "weight_scale")]
)
def test_layout_b_mxfp4(tmp_path: Path, proj: dict, weight: str, scale: str) -> None:
    layer = random_layer("layers.0.ffn.experts", group=32)
    for m in layer.matrices.values():
        m.global_scale = torch.ones(())
    tensors = csf_tensors(layer, proj, MXFP4, weight=weight, scale=scale, calibration=False)
    write_container(tmp_path, tensors, MXFP4)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers[0].spec is MXFP4
    check(checkpoint, layer)
    assert checkpoint.layers[0].source(0, "up").input_scale is None


def test_mxfp4_weights_stored_as_int8(tmp_path: Path) -> None:
    layer = random_layer(group=32)
    tensors = {}
    for (expert, projection), m in layer.matrices.items():
        tensors[f"{layer.name}.{expert}.{W123[projection]}.weight"] = m.weight.view(torch.int8)
        tensors[f"{layer.name}.{expert}.{W123[projection]}.scale"] = m.scale.view(torch.float8_e8m0fnu)
        m.global_scale = torch.ones(())
    write_folder(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "C"
    check(checkpoint, layer)


@pytest.mark.parametrize("make", [modelopt_tensors, compressed_tensors])
@pytest.mark.parametrize("proj", [PROJ, W123], ids=["gate_up_down", "w123"])
def test_layout_c(tmp_path: Path, make: Callable[..., Tensors], proj: dict) -> None:
    layer = random_layer()
    write_folder(tmp_path, make(layer, proj), {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "C"
    assert not checkpoint.layers[0].compressed
    check(checkpoint, layer)
    found = checkpoint.layers[0].source(1, "up").input_scale
    torch.testing.assert_close(found, layer.matrices[1, "up"].input_scale, rtol=2e-7, atol=0)


@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize("dotted", [False, True])
def test_fused_experts(tmp_path: Path, experts: int, dotted: bool) -> None:
    layer = random_layer(experts=experts)
    write_folder(tmp_path, fused_tensors(layer, dotted))
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, layer)
    assert checkpoint.layers[0].source(0, "up").part(16, 48) == ((16, 48), (0, 96), (32, 96))


def test_fused_beside_per_expert_layers(tmp_path: Path) -> None:
    layers = [random_layer(f"model.layers.{i}.mlp.experts", seed=i) for i in range(3)]
    tensors = {**fused_tensors(layers[0]), **csf_tensors(layers[1]), **modelopt_tensors(layers[2], W123)}
    write_folder(tmp_path, tensors, csf_config(layers[1].name))
    checkpoint = open_checkpoint(tmp_path)
    assert [layer.compressed for layer in checkpoint.layers] == [False, True, False]
    for layer in layers:
        check(checkpoint, layer)


@pytest.mark.parametrize("numbers", ["one", "experts", "halves"])
def test_fewer_global_scales_than_matrices(tmp_path: Path, numbers: str) -> None:
    layer = random_layer(experts=3)
    tensors = fused_tensors(layer)
    name = f"{layer.name}.gate_up_proj_weight_scale_2"
    value = {"one": torch.tensor(0.5), "experts": torch.tensor([1.0, 2, 3]), "halves": torch.tensor([7.0, 8])}
    tensors[name] = value[numbers]
    write_folder(tmp_path, tensors)
    found = open_checkpoint(tmp_path).layers[0]
    got = [[float(found.source(e, p).global_scale) for p in ("gate", "up")] for e in range(3)]
    expected = {
        "one": [[0.5] * 2] * 3,
        "experts": [[1.0] * 2, [2.0] * 2, [3.0] * 2],
        "halves": [[7.0, 8]] * 3,
    }
    assert got == expected[numbers]


@pytest.mark.parametrize("streams", [True, False])
def test_gate_over_up_in_one_tensor_per_expert(tmp_path: Path, streams: bool) -> None:
    layer = random_layer()
    joined = Layer(layer.name, layer.experts, layer.width, layer.hidden)
    for expert in range(layer.experts):
        gate, up = layer.matrices[expert, "gate"], layer.matrices[expert, "up"]
        up.global_scale, up.input_scale = gate.global_scale, gate.input_scale
        both = type(gate)(
            torch.cat([gate.weight, up.weight]),
            torch.cat([gate.scale, up.scale]),
            gate.global_scale,
            gate.input_scale,
        )
        joined.matrices[expert, "gate_up"] = both
        joined.matrices[expert, "down"] = layer.matrices[expert, "down"]
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    write_folder(tmp_path, csf_tensors(joined, names) if streams else modelopt_tensors(joined, names))
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, layer)
    up = checkpoint.layers[0].source(1, "up")
    assert torch.equal(decode(up.plane((16, 48))), layer.matrices[1, "up"].scale[16:48])


def test_experts_without_a_gate(tmp_path: Path) -> None:
    layer = random_layer("backbone.layers.1.mixer.experts", projections=("up", "down"))
    write_folder(tmp_path, csf_tensors(layer))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers[0].projections == ("up", "down")
    check(checkpoint, layer)


def test_other_experts_follow_what_is_stored(tmp_path: Path) -> None:
    """An MTP layer in BF16 or FP8 that no ignore list names, under a recipe that says NVFP4."""
    layer = random_layer()
    tensors = modelopt_tensors(layer)
    others = ("model.layers.1", "mtp.layers.0", "mtp.layers.1")
    for projection in PROJ.values():
        bf16, fp8, mxfp8 = (f"{module}.mlp.experts.0.{projection}.weight" for module in others)
        tensors[bf16] = torch.zeros(16, 32, dtype=torch.bfloat16)
        tensors[fp8] = tensors[mxfp8] = torch.zeros(16, 32).to(torch.float8_e4m3fn)
        tensors[f"{fp8}_scale"] = torch.ones(())
        tensors[f"{mxfp8}_scale"] = torch.zeros(16, 1, dtype=torch.uint8)
    write_folder(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    checkpoint = open_checkpoint(tmp_path)
    assert [found.name for found in checkpoint.layers] == [layer.name]
    assert checkpoint.other_experts == {
        "model.layers.1.mlp.experts": "BF16",
        "mtp.layers.0.mlp.experts": "F8_E4M3",
        "mtp.layers.1.mlp.experts": "F8_E4M3",
    }
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.experts: its experts are BF16, expected experts in FP4"
    ):
        checkpoint.layer("model.layers.1.mlp.experts")


def test_layers_in_natural_order(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for i in (10, 9, 2):
        tensors |= modelopt_tensors(random_layer(f"model.layers.{i}.mlp.experts", experts=1))
    write_folder(tmp_path, tensors)
    names = [layer.name for layer in open_checkpoint(tmp_path).layers]
    assert names == [f"model.layers.{i}.mlp.experts" for i in (2, 9, 10)]


def test_biases_are_reported(tmp_path: Path) -> None:
    layer = random_layer(experts=1)
    bias = f"{layer.name}.0.up_proj.bias"
    write_folder(tmp_path, {**csf_tensors(layer), bias: torch.zeros(64)})
    assert open_checkpoint(tmp_path).layers[0].extra == (bias,)


def test_no_experts_in_fp4(tmp_path: Path) -> None:
    write_folder(tmp_path, {"lm_head.weight": torch.zeros(2, 2)})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "other"
    assert checkpoint.layers == ()


def test_without_an_index(tmp_path: Path) -> None:
    layer = random_layer()
    save(tmp_path / "model.safetensors", csf_tensors(layer))
    save(tmp_path / "consolidated.safetensors", csf_tensors(layer))
    check(open_checkpoint(tmp_path), layer)
    os.rename(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    check(open_checkpoint(tmp_path), layer)


def test_an_index_of_another_name(tmp_path: Path) -> None:
    layer = random_layer()
    write_folder(tmp_path, csf_tensors(layer))
    os.rename(tmp_path / "model.safetensors.index.json", tmp_path / "x.safetensors.index.json")
    check(open_checkpoint(tmp_path), layer)
    (tmp_path / "y.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"x.safetensors.index.json.*y.safetensors.index.json"):
        open_checkpoint(tmp_path)


# ---- recipes against tensors ----------------------------------------------------------------------


def test_recipe_promises_streams_that_are_not_stored(tmp_path: Path) -> None:
    layer = random_layer()
    write_folder(tmp_path, modelopt_tensors(layer), csf_config(layer.name))
    refused(tmp_path, f"{layer.name}: weight_scale_encoding is 'csf' .*plain scales are stored", RecipeError)


def test_recipe_promises_a_layer_that_is_not_stored(tmp_path: Path) -> None:
    layer = random_layer()
    write_folder(tmp_path, csf_tensors(layer), csf_config(layer.name, "model.layers.7.mlp.experts"))
    refused(tmp_path, "model.layers.7.mlp.experts: .*no such experts are stored", RecipeError)


def test_recipe_of_another_group_size(tmp_path: Path) -> None:
    layer = random_layer()
    write_folder(tmp_path, csf_tensors(layer), csf_config(layer.name, group_size=32))
    refused(tmp_path, "group_size 32 .*expected 16", RecipeError)


def test_streams_that_the_recipe_does_not_mention_are_found(tmp_path: Path) -> None:
    layer = random_layer()
    write_folder(tmp_path, csf_tensors(layer), {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert open_checkpoint(tmp_path).layout == "A"


def test_two_files_that_disagree_about_the_experts(tmp_path: Path) -> None:
    layer = random_layer()
    write_folder(tmp_path, csf_tensors(layer), csf_config(layer.name))
    second = tmp_path / "hf_quant_config.json"
    second.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    check(open_checkpoint(tmp_path), layer)
    second.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    refused(tmp_path, f"{layer.name}: NVFP4 in config.json.*but FP8 in hf_quant_config.json", RecipeError)


def test_opens_the_planes_of_a_real_checkpoint_in_seconds(tmp_path: Path) -> None:
    """36,288 planes, as many as the largest published checkpoint has."""
    parts = {
        "weight": ("U8", [32, 16], 512),
        "weight_scale.nvfp4_csf_fixed": ("U8", [64], 64),
        "weight_scale.nvfp4_csf_exceptions": ("U32", [0], 0),
        "weight_scale_2": ("F32", [], 4),
        "input_scale": ("F32", [], 4),
    }
    header: dict = {}
    end = 0
    for layer, expert, projection in product(range(63), range(192), PROJ.values()):
        for part, (dtype, shape, size) in parts.items():
            name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{part}"
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    start = time.process_time()
    checkpoint = open_checkpoint(tmp_path)
    assert time.process_time() - start < 20
    assert sum(layer.experts * len(layer.projections) for layer in checkpoint.layers) == 36288
