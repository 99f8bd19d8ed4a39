"""Quantization configs in every dialect and place."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_csf.loaders.errors import RecipeError
from vllm_csf.loaders.recipes import UNQUANTIZED, ModuleRecipe, Recipe, read_recipe

EXPERTS = "model.layers.3.mlp.experts"
NVFP4 = ModuleRecipe("NVFP4", 16)
CSF = ModuleRecipe("NVFP4", 16, "csf")
CSF_ENTRY = {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}
PLAIN = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def recipe(config: Any) -> Recipe:
    return read_recipe({"quantization_config": config})


def mixed(layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **more}


def groups(
    ignore: list[str] | None = None, targets: list[str] | None = None, weight_only: bool = False
) -> dict:
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"targets": targets or ["Linear"], "weights": weights}
    group["input_activations"] = None if weight_only else dict(weights)
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore or [],
    }


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": PLAIN},
        {"text_config": {"quantization_config": PLAIN}},
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "NVFP4", "group_size": 16},
            }
        },
        {"quantization_config": PLAIN, "text_config": {"quantization_config": PLAIN}},
        {"quantization_config": PLAIN, "text_config": None},
    ],
)
def test_places_in_config_json(config: dict) -> None:
    found = read_recipe(config)
    assert (found.method, found.algo) == ("modelopt", "NVFP4")
    assert found.of(EXPERTS) == NVFP4


def test_in_hf_quant_config_only() -> None:
    legacy = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    }
    found = read_recipe({"model_type": "x"}, legacy)
    assert found.where == "hf_quant_config.json"
    assert found.of(EXPERTS) == NVFP4
    assert found.of("lm_head") == UNQUANTIZED


def test_nowhere() -> None:
    found = read_recipe({"model_type": "x", "quantization_config": None})
    assert found.method is None
    assert found.of(EXPERTS) == UNQUANTIZED


def test_two_different_ones_in_config_json() -> None:
    both = {
        "quantization_config": PLAIN,
        "text_config": {"quantization_config": {**PLAIN, "quant_algo": "FP8"}},
    }
    with pytest.raises(RecipeError, match=r"quantization_config and config.json: text_config.*differ"):
        read_recipe(both)


def test_config_json_wins_and_contradictions_are_found() -> None:
    """The second file may spell its lists differently; another algorithm for a module is an error."""
    ours = mixed({EXPERTS: CSF_ENTRY})
    found = read_recipe(
        {"quantization_config": ours}, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    )
    assert found.of(EXPERTS) == CSF
    assert found.of("model.layers.3.self_attn.q_proj") == UNQUANTIZED
    found.check_agreement(EXPERTS)
    found.check_agreement("model.layers.3.self_attn.q_proj")
    second = {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {EXPERTS: {"quant_algo": "FP8"}},
        }
    }
    found = read_recipe({"quantization_config": ours}, second)
    with pytest.raises(
        RecipeError, match=f"{EXPERTS}: NVFP4 in config.json.*, but FP8 in hf_quant_config.json"
    ):
        found.check_agreement(EXPERTS)


# ---- ModelOpt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4", "nvfp4"])
def test_mixed_precision_with_csf(algo: str) -> None:
    config = mixed(
        {
            EXPERTS: {**CSF_ENTRY, "quant_algo": algo},
            "model.layers.3.self_attn.o_proj": {"quant_algo": "MXFP8"},
        }
    )
    found = recipe(config)
    assert found.algo == "MIXED_PRECISION"
    assert found.of(EXPERTS) == ModuleRecipe(algo.upper(), 16, "csf")
    assert found.of(f"{EXPERTS}.7.up_proj").encoding == "csf"
    assert found.of("model.layers.3.self_attn.o_proj").algo == "MXFP8"
    assert found.of("model.layers.4.mlp.experts") == UNQUANTIZED
    assert list(found.csf_modules()) == [EXPERTS]


def test_entries_of_the_parts_of_a_module() -> None:
    parts = {
        f"{EXPERTS}.{e}.{p}": {"quant_algo": "NVFP4", "group_size": 16}
        for e in (0, 1)
        for p in ("up_proj", "down_proj")
    }
    assert recipe(mixed(parts)).of(EXPERTS) == NVFP4
    parts[f"{EXPERTS}.1.up_proj"] = {"quant_algo": "FP8"}
    with pytest.raises(RecipeError, match=rf"{EXPERTS}: its parts have the recipes \['FP8', 'NVFP4'\]"):
        recipe(mixed(parts)).of(EXPERTS)


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("model.language_model.layers.3.mlp.experts", "language_model.model.layers.3.mlp.experts"),
        ("language_model.model.layers.3.mlp.experts", "model.layers.3.mlp.experts"),
        ("layers.3.mlp.experts", "model.language_model.layers.3.mlp.experts"),
        ("model.layers.3.mlp.experts", "layers.3.mlp.experts"),
    ],
)
def test_names_under_another_root(written: str, asked: str) -> None:
    assert recipe(mixed({written: CSF_ENTRY})).of(asked) == CSF
    assert recipe({**PLAIN, "ignore": [written]}).of(asked) == UNQUANTIZED
    assert recipe({**PLAIN, "ignore": [written + "*"]}).of(asked) == UNQUANTIZED


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            mixed({EXPERTS: {**CSF_ENTRY, "weight_scale_encoding": "csf2"}}),
            f"{EXPERTS}: weight_scale_encoding is 'csf2', expected 'csf'",
        ),
        ({**PLAIN, "weight_scale_encoding": 3}, "weight_scale_encoding is 3"),
        (
            mixed({EXPERTS: {**CSF_ENTRY, "quant_algo": "FP8"}}),
            f"{EXPERTS}: weight_scale_encoding 'csf' with quant_algo FP8",
        ),
        (mixed({EXPERTS: {**CSF_ENTRY, "group_size": "16"}}), "group_size is '16', expected a number"),
        (mixed({}), "quantized_layers is empty"),
        (mixed({EXPERTS: "NVFP4"}), f"{EXPERTS}: str, expected an object"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"},
            "ignore: 'lm_head', expected a list of strings",
        ),
        ({"bits": 4}, r"neither quant_method nor quant_algo, found \['bits'\]"),
        ("nvfp4", "str, expected an object"),
        ({"quantization": []}, "quantization: list, expected an object"),
        ({**PLAIN, "ignore": ["re:("]}, r"ignore: 're:\(' is no regular expression: missing \)"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:["]}}},
            r"config_groups.g.targets: 're:\[' is no regular expression",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": 5}}},
            "targets: 5, expected a list of strings",
        ),
    ],
)
def test_refused(config: Any, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        recipe(config)


def test_text_config_that_is_none() -> None:
    with pytest.raises(RecipeError, match=r"config\.json: text_config: list, expected an object"):
        read_recipe({"text_config": ["a"]})


def test_ignore_beside_exclude_modules() -> None:
    found = recipe({**PLAIN, "ignore": ["lm_head"], "exclude_modules": ["model.layers.0.*"]})
    assert found.ignore == ("lm_head", "model.layers.0.*")
    assert found.of("model.layers.0.mlp.experts") == UNQUANTIZED
    assert found.of("model.layers.1.mlp.experts") == NVFP4


# ---- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "module", "ignored"),
    [
        ("model.layers.1", "model.layers.1.mlp.experts", True),
        ("model.layers.1", "model.layers.10.mlp.experts", False),
        ("model.layers.1*", "model.layers.10.mlp.experts", True),
        ("*.mlp.gate", "model.layers.2.mlp.gate", True),
        ("*.mlp.gate", "model.layers.2.mlp.gate_proj", False),
        ("*shared_head*", "model.layers.92.shared_head.head", True),
        ("*self_attn*", EXPERTS, False),
        ("lm_head", "language_model.lm_head", True),
        ("mtp.fc", "mtp.fc", True),
        ("re:.*experts.*", EXPERTS, True),
        ("re:model.layers.3.*", "language_model.model.layers.3.mlp.experts", True),
        ("re:.*mlp[.]experts[.][0-9]+[.](up|gate|down)_proj$", EXPERTS, True),
        ("re:layers.*gate$", "model.layers.3.mlp.gate_proj", False),
        ("re:.*lm_head", EXPERTS, False),
        (f"{EXPERTS}.0.down_proj", EXPERTS, True),
        ("visual.*", "model.visual.blocks.0.mlp", True),
    ],
)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_ignore_patterns(pattern: str, module: str, ignored: bool, dialect: str) -> None:
    found = recipe({**PLAIN, "ignore": [pattern]} if dialect == "modelopt" else groups([pattern]))
    assert (found.of(module) == UNQUANTIZED) is ignored


# ---- compressed-tensors and others ---------------------------------------------------------------


def test_compressed_tensors() -> None:
    assert recipe(groups(["lm_head"])).of(EXPERTS) == NVFP4
    assert recipe(groups(weight_only=True)).of(EXPERTS) == ModuleRecipe("W4A16_NVFP4", 16)
    assert recipe(groups()).method == "compressed-tensors"


def test_targets_by_name_come_before_classes() -> None:
    config = groups()
    fp8 = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
    config["config_groups"]["group_1"] = fp8
    found = recipe(config)
    assert found.of("model.layers.0.self_attn.q_proj").algo == "FP8"
    assert found.of(EXPERTS) == NVFP4
    only = recipe(groups(targets=["re:.*mlp.experts.*"]))
    assert only.of(EXPERTS) == NVFP4
    assert only.of("model.layers.0.self_attn.q_proj") == UNQUANTIZED


@pytest.mark.parametrize(
    ("weights", "algo"),
    [
        ({"num_bits": 4, "type": "float", "group_size": 32}, "MXFP4"),
        ({"num_bits": 8, "type": "float", "group_size": 32}, "MXFP8"),
        ({"num_bits": 8, "type": "float"}, "FP8"),
        ({"num_bits": 4, "type": "int", "group_size": 128}, "INT4"),
    ],
)
def test_other_groups(weights: dict, algo: str) -> None:
    config = groups()
    config["config_groups"]["group_0"].update(weights=weights, input_activations=weights)
    assert recipe(config).of(EXPERTS).algo == algo


def test_methods_of_others_are_named() -> None:
    found = recipe({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]})
    assert (found.method, found.of(EXPERTS).algo) == ("fp8", "FP8")
    assert found.of("lm_head") == UNQUANTIZED
