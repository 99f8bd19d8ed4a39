"""Weights that are made when asked for: an example's by name and shape, like trained ones in size."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from vllm_csf.loaders import codec, example, made_up
from vllm_csf.loaders.errors import CheckpointError
from vllm_csf.loaders.example_sizes import Sizes, sizes_of
from vllm_csf.loaders.quantize import Quantized

SMALL = {"layers": 1, "experts": 2, "topk": 1}
WIDE = {**SMALL, "hidden": 512, "width": 256, "vocabulary": 300}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", example.FAMILIES)
def test_they_have_the_names_shapes_and_types_of_a_stored_example(tmp_path, family):
    folder = example.make_example(tmp_path / "e", family, "modelopt", **SMALL)
    stored = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    found = dict(made_up.tensors(config_of(folder)))
    assert found.keys() == stored.keys()
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in stored.items()}
    for name, tensor in stored.items():
        if "experts." in name and "shared" not in name:
            assert found[name].dtype == tensor.dtype, name


def test_they_are_the_same_each_time_and_for_each_name_others(tmp_path):
    config = config_of(example.make_example(tmp_path / "e", weights=False, **SMALL))
    first, again = (dict(made_up.tensors(config)) for _ in range(2))
    assert all(torch.equal(first[n].float(), again[n].float()) for n in first)
    gates = [t for n, t in first.items() if n.endswith("gate_proj.weight")]
    assert not torch.equal(gates[0], gates[1])


def test_they_keep_the_size_of_what_goes_through_them(tmp_path):
    config = config_of(example.make_example(tmp_path / "e", "glm4-moe", weights=False, **WIDE))
    found = dict(made_up.tensors(config))
    prefix = "model.layers.0.mlp.experts.1.down_proj."
    scale = found[f"{prefix}weight_scale"].view(torch.uint8)
    stored = Quantized(found[f"{prefix}weight"], scale, found[f"{prefix}weight_scale_2"])
    dense = found["model.layers.0.self_attn.q_proj.weight"].float()
    for weight in (stored.dequantize(), dense):
        assert weight.square().mean().sqrt().item() * weight.shape[1] ** 0.5 == pytest.approx(1, rel=0.05)


def test_their_scales_compress_as_trained_ones_do(tmp_path):
    config = config_of(example.make_example(tmp_path / "e", weights=False, **WIDE))
    for name, tensor in made_up.tensors(config):
        if name.endswith("weight_scale"):
            plane = codec.encode(tensor.view(torch.uint8))
            # Two of the random places may be one.
            assert 0.002 <= plane.exceptions.numel() / tensor.numel() <= 0.005


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected qwen3_moe or glm4_moe"),
        ({"hidden_size": None}, "expected the sizes of an example"),
        ({"hidden_size": 33}, "hidden is 33, expected a multiple of 32"),
        ({"num_experts": "many"}, "expected the sizes of an example"),
    ],
)
def test_other_configurations_are_refused(tmp_path, change, said):
    config = config_of(example.make_example(tmp_path / "e", weights=False)) | change
    with pytest.raises(CheckpointError, match=said):
        next(made_up.tensors(config))


def test_a_missing_size_is_named(tmp_path):
    config = config_of(example.make_example(tmp_path / "e", weights=False))
    del config["moe_intermediate_size"]
    with pytest.raises(CheckpointError, match="no 'moe_intermediate_size'"):
        next(made_up.tensors(config))


def test_sizes_come_back_from_the_configuration(tmp_path):
    from vllm_csf.loaders import example_config

    size = Sizes(layers=3, hidden=160, width=64, experts=6, topk=3, heads=6, kv_heads=3, positions=700)
    config = example_config.model_config("glm4-moe", size, "bfloat16")
    assert sizes_of(config) == ("glm4-moe", size)
