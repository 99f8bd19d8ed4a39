"""Names of expert tensors."""

from __future__ import annotations

import pytest
from vllm_csf.loaders.codec import MXFP4, NVFP4
from vllm_csf.loaders.names import ExpertName, is_stream, parse, scale_of_stream


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.3.mlp.experts",
        "model.language_model.layers.0.mlp.experts",
        "language_model.model.layers.61.mlp.experts",
        "layers.0.ffn.experts",
        "model.layers.11.block_sparse_moe.experts",
        "backbone.layers.7.mixer.experts",
        "mtp.layers.0.mlp.experts",
        "experts",
    ],
)
@pytest.mark.parametrize(
    ("projection", "role"),
    [
        ("gate_proj", "gate"),
        ("up_proj", "up"),
        ("down_proj", "down"),
        ("w1", "gate"),
        ("w3", "up"),
        ("w2", "down"),
    ],
)
def test_modules_and_projections(module: str, projection: str, role: str) -> None:
    expected = ExpertName(module, 17, role, "weight")
    assert parse(f"{module}.17.{projection}.weight") == expected


@pytest.mark.parametrize(
    ("tail", "part", "divisor", "codec"),
    [
        ("weight", "weight", False, None),
        ("weight_packed", "weight", False, None),
        ("weight_scale", "scale", False, None),
        ("scale", "scale", False, None),
        ("weight_scale_2", "global_scale", False, None),
        ("weight_global_scale", "global_scale", True, None),
        ("input_scale", "input_scale", False, None),
        ("input_global_scale", "input_scale", True, None),
        ("weight_scale.nvfp4_csf_fixed", "scale_fixed", False, NVFP4),
        ("weight_scale.nvfp4_csf_exceptions", "scale_exceptions", False, NVFP4),
        ("scale.mxfp4_csf_fixed", "scale_fixed", False, MXFP4),
        ("weight_scale.mxfp4_csf_exceptions", "scale_exceptions", False, MXFP4),
        ("weight_scale_inv", "other", False, None),
        ("bias", "other", False, None),
        ("weight.nvfp4_csf_fixed", "other", False, NVFP4),
        ("weight_scale.nvfp4_csf_fixed.extra", "other", False, None),
    ],
)
def test_parts(tail: str, part: str, divisor: bool, codec: object) -> None:
    found = parse(f"m.experts.0.w2.{tail}")
    assert found == ExpertName("m.experts", 0, "down", part, divisor, codec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "projection", "part"),
    [
        ("m.experts.gate_up_proj", "gate_up", "weight"),
        ("m.experts.gate_up_proj.weight", "gate_up", "weight"),
        ("m.experts.gate_up_proj_weight_scale", "gate_up", "scale"),
        ("m.experts.gate_up_proj.weight_scale_2", "gate_up", "global_scale"),
        ("m.experts.gate_up_proj_input_scale", "gate_up", "input_scale"),
        ("m.experts.gate_up_proj_scale", "gate_up", "scale"),
        ("m.experts.gate_up_proj_bias", "gate_up", "other"),
        ("m.experts.gate_up_proj_blocks", "gate_up", "other"),
        ("m.experts.down_proj", "down", "weight"),
        ("m.experts.w13_weight", "gate_up", "weight"),
        ("m.experts.w2_weight_scale", "down", "scale"),
    ],
)
def test_fused(name: str, projection: str, part: str) -> None:
    assert parse(name) == ExpertName("m.experts", None, projection, part)


def test_gate_over_up_of_one_expert() -> None:
    assert parse("m.experts.4.gate_up_proj.weight") == ExpertName("m.experts", 4, "gate_up", "weight")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.experts.0.weight",
        "model.layers.3.mlp.experts.gate.weight",
        "model.layers.3.mlp.experts.gate_projector.weight",
        "model.layers.3.mlp.experts.x.gate_proj.weight",
        "model.layers.3.myexperts.0.gate_proj.weight",
        "model.layers.3.experts",
        f"model.experts.{'9' * 5000}.gate_proj.weight",  # more digits than int() reads
        "model.experts.٣.gate_proj.weight",
        "lm_head.weight",
    ],
)
def test_other_tensors(name: str) -> None:
    assert parse(name) is None


def test_streams() -> None:
    assert is_stream("a.weight_scale.mxfp4_csf_fixed")
    assert not is_stream("a.weight_scale")
    assert scale_of_stream("a.weight_scale.nvfp4_csf_exceptions") == "a.weight_scale"
    assert scale_of_stream("a.weight_scale") == "a.weight_scale"
