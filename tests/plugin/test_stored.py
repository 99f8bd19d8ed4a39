"""What a checkpoint holds, told from its tensor names (and headers), under vLLM's names for modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_csf.stored import PLAIN, ExpertsKind, Stored, canonical, read_stored


def named(*names: str) -> Stored:
    return Stored(dict.fromkeys(names))


EXPERTS = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["0.up_proj.weight", "0.up_proj.weight_scale.nvfp4_csf_fixed"], ExpertsKind.CSF),
        (["0.up_proj.weight", "0.up_proj.weight_scale", "0.up_proj.weight_scale_2"], ExpertsKind.NVFP4),
        (["7.w1.weight_packed", "7.w1.weight_scale", "7.w1.weight_global_scale"], ExpertsKind.NVFP4),
        (["0.gate_proj.weight", "1.gate_proj.weight"], ExpertsKind.UNQUANTIZED),
        (["gate_up_proj", "down_proj"], ExpertsKind.UNQUANTIZED),
        (["gate_up_proj", "gate_up_proj_weight_scale", "gate_up_proj_weight_scale_2"], ExpertsKind.NVFP4),
        (["0.up_proj.weight", "0.up_proj.weight_scale", "0.up_proj.input_scale"], ExpertsKind.OTHER),
    ],
)
def test_kinds_of_experts(names: list[str], kind: ExpertsKind) -> None:
    assert named(*(f"{EXPERTS}.{name}" for name in names)).experts(EXPERTS) is kind


@pytest.mark.parametrize(
    ("in_file", "in_vllm"),
    [
        ("model.language_model.layers.3.mlp.experts", "language_model.model.layers.3.mlp.experts"),
        ("model.layers.46.mlp.experts", "model.layers.46.mtp_block.mlp.experts"),
        ("mtp.layers.0.mlp.experts", "mtp.layers.0.mlp.experts"),
        ("backbone.layers.3.mixer.experts", "model.layers.3.mixer.experts"),
    ],
)
def test_vllm_names_find_what_is_stored(in_file: str, in_vllm: str) -> None:
    stored = named(f"{in_file}.0.up_proj.weight", f"{in_file}.0.up_proj.weight_scale_2")
    assert stored.experts(in_vllm) is ExpertsKind.NVFP4


def test_a_draft_layer_is_not_taken_for_a_main_layer() -> None:
    assert canonical("mtp.layers.0.mlp.experts") != canonical("model.layers.0.mlp.experts")


def test_layers_that_are_not_stored_are_unknown() -> None:
    assert named(f"{EXPERTS}.0.up_proj.weight").experts("model.layers.4.mlp.experts") is None


ATTENTION = "model.layers.3.self_attn"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def test_linear_layers_without_scales() -> None:
    names = [f"{ATTENTION}.{p}_proj.weight" for p in "qkvo"]
    stored = named(*names, f"{ATTENTION}.q_proj.bias", "lm_head.weight")
    assert stored.linear_algorithm(f"{ATTENTION}.qkv_proj", PACKED) == PLAIN
    assert stored.linear_algorithm(f"{ATTENTION}.o_proj", PACKED) == PLAIN
    assert stored.linear_algorithm("lm_head", PACKED) == PLAIN
    assert stored.linear_algorithm("model.layers.9.self_attn.o_proj", PACKED) is None


def test_linear_layers_with_scales_on_one_of_their_parts() -> None:
    names = [f"{ATTENTION}.{p}_proj.weight" for p in "qkv"]
    stored = named(*names, f"{ATTENTION}.v_proj.weight_scale")
    assert stored.linear_algorithm(f"{ATTENTION}.qkv_proj", PACKED) is None


def test_a_step_left_out_of_a_name() -> None:
    stored = named("model.layers.46.shared_head.head.weight", "model.layers.4.shared_head.other.weight")
    assert stored.linear_algorithm("model.layers.46.head", {}) == PLAIN
    assert stored.linear_algorithm("model.layers.4.head", {}) is None


def test_a_name_that_could_mean_two_modules_is_unknown() -> None:
    stored = named(*(f"model.layers.4.{part}.down_proj.weight" for part in ("mlp", "shared")))
    assert stored.linear_algorithm("model.layers.4.down_proj", {}) is None


@pytest.mark.parametrize(
    ("scale", "algorithm"),
    [
        (torch.ones(()), "FP8"),
        (torch.ones(2, 3), "FP8_PB_WO"),
        (torch.ones(64, 2, dtype=torch.uint8), "MXFP8"),
    ],
)
def test_formats_of_other_experts(tmp_path: Path, scale: torch.Tensor, algorithm: str) -> None:
    name = f"{EXPERTS}.0.up_proj."
    save_file(
        {name + "weight": torch.zeros(64, 64, dtype=torch.uint8), name + "weight_scale": scale},
        tmp_path / "model.safetensors",
    )
    stored = read_stored(str(tmp_path))
    assert stored is not None
    assert stored.experts(EXPERTS) is ExpertsKind.OTHER
    assert stored.experts_algorithm(EXPERTS) == algorithm


def test_container_is_read_from_its_contract(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    names = {
        f"{EXPERTS}.0.up_proj.weight": "a.safetensors",
        f"{EXPERTS}.0.up_proj.weight_scale_2": "a.safetensors",
    }
    (tmp_path / "build-contract.json").write_text(json.dumps({"source_names": names}))
    stored = read_stored(str(tmp_path / "metadata"))
    assert stored is not None
    assert stored.experts(EXPERTS) is ExpertsKind.NVFP4


def test_nothing_is_known_of_a_folder_without_weights(tmp_path: Path) -> None:
    assert read_stored(str(tmp_path)) is None


def test_nothing_is_known_of_a_repository_that_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read_stored("nobody/nothing-at-all") is None


@pytest.mark.parametrize(
    ("scale", "algorithm"),
    [
        (torch.ones(1), "FP8"),
        (torch.ones(64, 1), "FP8_PER_CHANNEL_PER_TOKEN"),
        (torch.ones(2, 3), "FP8_PB_WO"),
        (torch.ones(64, 2, dtype=torch.uint8), "MXFP8"),
    ],
)
def test_formats_of_linear_layers(tmp_path: Path, scale: torch.Tensor, algorithm: str) -> None:
    tensors = {}
    for part in "qkv":
        name = f"{ATTENTION}.{part}_proj"
        tensors |= {
            f"{name}.weight": torch.zeros(64, 64, dtype=torch.uint8),
            f"{name}.weight_scale": scale.clone(),
        }
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_stored(str(tmp_path))
    assert stored is not None
    assert stored.linear_algorithm(f"{ATTENTION}.qkv_proj", PACKED) == algorithm


def test_nvfp4_linear_layers_are_left_to_the_recipe() -> None:
    name = f"{ATTENTION}.o_proj"
    stored = named(f"{name}.weight", f"{name}.weight_scale", f"{name}.weight_scale_2")
    assert stored.linear_algorithm(name, PACKED) is None
