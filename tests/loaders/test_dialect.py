"""compressed-tensors checkpoints with linear layers in NVFP4: to ModelOpt's spelling and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from converting import LINEAR, TOOL, contents, damage, divisors, packed_source
from fake_checkpoints import save
from safetensors.torch import load_file
from vllm_csf.loaders.checkpoint import INDEX, open_checkpoint
from vllm_csf.loaders.convert import convert
from vllm_csf.loaders.errors import CheckpointError
from vllm_csf.loaders.restore import restore
from vllm_csf.loaders.verify import verify

EXPERT = "model.layers.0.mlp.experts.1.up_proj."


@pytest.fixture
def source(tmp_path):
    packed_source(tmp_path / "source")
    return tmp_path / "source"


def stored(root) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(root.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def add(root, tensors) -> None:
    """Into the first shard, and into the index."""
    shard = sorted(root.glob("*.safetensors"))[0]
    save(shard, load_file(shard) | tensors)
    index = json.loads((root / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, shard.name)
    (root / INDEX).write_text(json.dumps(index))


def test_every_module_gets_modelopts_names_and_multipliers(source, tmp_path):
    convert(source, tmp_path / "csf", TOOL)
    before, after = stored(source), stored(tmp_path / "csf")
    for module in (f"{LINEAR}q_proj.", f"{LINEAR}o_proj.", EXPERT):
        assert torch.equal(after[f"{module}weight"], before[f"{module}weight_packed"])
        wanted = np.float32(1) / before[f"{module}weight_global_scale"].numpy()
        assert after[f"{module}weight_scale_2"].shape == ()
        assert after[f"{module}weight_scale_2"].numpy().tobytes() == wanted.tobytes()
    for module in (f"{LINEAR}q_proj.", EXPERT):
        wanted = np.float32(1) / before[f"{module}input_global_scale"].numpy()
        assert after[f"{module}input_scale"].numpy().tobytes() == wanted.tobytes()
    assert f"{LINEAR}o_proj.input_scale" not in after
    scales = [tensors[f"{LINEAR}q_proj.weight_scale"].view(torch.uint8) for tensors in (before, after)]
    assert torch.equal(*scales)
    assert not [name for name in after if name.endswith(("_packed", "_global_scale"))]


def test_the_recipe_says_what_linear_layers_are(source, tmp_path):
    convert(source, tmp_path / "csf", TOOL)
    config = json.loads((tmp_path / "csf" / "config.json").read_text())["quantization_config"]
    layers = config["quantized_layers"]
    assert layers[f"{LINEAR}q_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers[f"{LINEAR}o_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers["model.layers.0.mlp.experts"]["weight_scale_encoding"] == "csf"
    assert len(layers) == 3


def test_divisors_come_back_that_are_no_reciprocal_of_their_multiplier(source, tmp_path):
    convert(source, tmp_path / "csf", TOOL)
    report = verify(tmp_path / "csf", source)
    assert report.ok, report.findings
    assert report.reproduced == len(contents(source))
    restore(tmp_path / "csf", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    value = stored(tmp_path / "back")[f"{LINEAR}q_proj.weight_global_scale"]
    assert value.item() == divisors(False, 1)[0]


@pytest.mark.parametrize(
    "wanted", ["q_proj.weight_scale_2", "q_proj.input_scale", "o_proj.weight", "q_proj.weight_scale"]
)
def test_damage_to_a_linear_layer_is_found(source, tmp_path, wanted):
    """Of q's global scale, the divisor is recorded: that must not hide a damaged multiplier."""
    root = tmp_path / "csf"
    convert(source, root, TOOL)
    name = damage(root, f"{LINEAR}{wanted}")
    assert verify(root, planes_only=True).ok
    assert verify(root, source, planes_only=True).findings == [f"{name}: differs from the source"]
    assert not verify(root).ok
    with pytest.raises(CheckpointError):
        restore(root, tmp_path / "back")


def test_names_that_are_missing_on_either_side_are_found(source, tmp_path):
    convert(source, tmp_path / "csf", TOOL)
    add(source, {"extra.weight": torch.zeros(2)})
    add(tmp_path / "csf", {"more.weight": torch.zeros(2)})
    assert verify(tmp_path / "csf", source, planes_only=True).findings == [
        "extra.weight: in the source alone",
        "more.weight: in the checkpoint alone",
    ]


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        # No scale, INT4 in words, a scale for 32, no global scale.
        ({"weight_packed": torch.zeros(4, 8, dtype=torch.uint8)}, "weight_packed: belongs to no NVFP4"),
        (
            {
                "weight_packed": torch.zeros(4, 8, dtype=torch.int32),
                "weight_scale": torch.zeros(4, 1, dtype=torch.bfloat16),
            },
            "weight_packed: belongs to no NVFP4",
        ),
        (
            {
                "weight_packed": torch.zeros(4, 16, dtype=torch.uint8),
                "weight_scale": torch.zeros(4, 1, dtype=torch.float8_e4m3fn),
                "weight_global_scale": torch.ones(1),
            },
            "belongs to no NVFP4",
        ),
        (
            {
                "weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
                "weight_scale": torch.zeros(4, 1, dtype=torch.float8_e4m3fn),
            },
            "weight_packed: belongs to no NVFP4",
        ),
        (
            {
                "weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
                "weight_scale": torch.zeros(4, 1, dtype=torch.float8_e4m3fn),
                "weight_global_scale": torch.ones(2),
            },
            r"weight_global_scale: is F32 \[2\], expected one FP32 value",
        ),
        (
            {
                "weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
                "weight_scale": torch.zeros(4, 1, dtype=torch.float8_e4m3fn),
                "weight_global_scale": torch.ones(1),
                "weight_scale_2": torch.ones(1),
            },
            r"weight_global_scale: is stored beside .*weight_scale_2",
        ),
    ],
)
def test_what_layout_a_cannot_describe_is_refused_by_name(source, tmp_path, tensors, match):
    add(source, {f"{LINEAR}k_proj.{part}": tensor for part, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=match) as refused:
        convert(source, tmp_path / "csf", TOOL)
    assert f"{LINEAR}k_proj." in str(refused.value)
    assert not (tmp_path / "csf").exists()


def test_unquantised_weights_keep_their_names(source, tmp_path):
    add(source, {f"{LINEAR}v_proj.weight": torch.ones(2, 2)})
    convert(source, tmp_path / "csf", TOOL)
    with open_checkpoint(tmp_path / "csf") as checkpoint:
        assert checkpoint.tensors[f"{LINEAR}v_proj.weight"].dtype == "F32"
