"""Tensors that break a rule of the format: refused, by name, value and position."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_checkpoints import (
    BASE,
    Tensors,
    compressed_tensors,
    csf_tensors,
    fused_tensors,
    modelopt_tensors,
    random_layer,
    refused,
    write_folder,
)
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.codec import NVFP4
from vllm_csf.loaders.errors import FormatError


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


SCALE = f"{BASE}.weight_scale"
FIXED, EXCEPTIONS = f"{SCALE}.nvfp4_csf_fixed", f"{SCALE}.nvfp4_csf_exceptions"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(FIXED), "nvfp4_csf_exceptions: its partner .*fixed is missing"),
        (lambda t: t.pop(EXCEPTIONS), "fixed: its partner .*exceptions is missing"),
        (lambda t: t.pop(f"{BASE}.weight"), r"experts\.1\.up: no weight"),
        (lambda t: t.pop(f"{BASE}.weight_scale_2"), "its global scale .* is missing"),
        (
            lambda t: [t.pop(n) for n in list(t) if n.startswith(BASE)],
            r"experts\.1: its up projection is missing",
        ),
        (
            lambda t: t.update({SCALE: u8(64, 6)}),
            "weight_scale: stored beside its compressed streams",
        ),
        (lambda t: t.update({f"{BASE}.weight": u8(64, 50)}), "100 input channels"),
        (lambda t: t.update({f"{BASE}.weight": u8(40, 48)}), "40 rows, expected"),
        (lambda t: t.update({f"{BASE}.weight": u8(48, 48)}), "fixed: U8 .256., expected U8 .192."),
        (lambda t: t.update({f"{BASE}.weight": torch.zeros(64, 48)}), r"up_proj.weight: F32 .*expected U8"),
        (lambda t: t.update({f"{BASE}.weight": u8(3072)}), "expected U8 in 2 dimensions"),
        (
            lambda t: t.update({FIXED: torch.zeros(256, dtype=torch.int8)}),
            r"nvfp4_csf_fixed: I8 \[256\], expected U8",
        ),
        (
            lambda t: t.update({FIXED: u8(8, 32)}),
            r"nvfp4_csf_fixed: U8 \[8, 32\], expected U8 \[256\] or \[4, 64\]",
        ),
        (
            lambda t: t.update({EXCEPTIONS: torch.zeros(3, dtype=torch.int32)}),
            r"nvfp4_csf_exceptions: I32 \[3\], expected U32",
        ),
        (
            lambda t: t.update({f"{BASE}.weight_scale_2": torch.ones((), dtype=torch.bfloat16)}),
            "dtype BF16, expected F32",
        ),
        (
            lambda t: t.update({f"{BASE}.input_scale": torch.ones((), dtype=torch.float16)}),
            "dtype F16, expected F32",
        ),
        (
            lambda t: t.update({f"{BASE}.weight_scale_2": torch.ones(3)}),
            r"shape \[3\], expected one of \[1\] numbers",
        ),
        (lambda t: t.update({f"{BASE}.weight_global_scale": torch.ones(1)}), "also stored as"),
        (lambda t: t.update({f"{BASE}.weight_packed": t[f"{BASE}.weight"]}), "also stored as"),
        (
            lambda t: t.update({f"{BASE}.weight_scale.mxfp4_csf_fixed": u8(8)}),
            "also stored as|two codecs",
        ),
        (
            lambda t: t.update({f"{BASE}.weight.nvfp4_csf_fixed": u8(8)}),
            "belongs to no weight_scale",
        ),
        (
            lambda t: t.update({"model.q_proj.weight_scale.nvfp4_csf_fixed": u8(8)}),
            "q_proj.*belongs to no expert projection",
        ),
    ],
)
def test_malformed_csf_tensors(tmp_path: Path, change: Callable[[Tensors], object], match: str) -> None:
    tensors = csf_tensors(random_layer(experts=2))
    change(tensors)
    write_folder(tmp_path, tensors)
    refused(tmp_path, match, FormatError)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(SCALE), "up_proj.weight: no scale"),
        (
            lambda t: t.update({SCALE: torch.zeros(48, 6).to(torch.float8_e4m3fn)}),
            r"weight_scale: shape \[48, 6\], expected \[64, 6\]",
        ),
        (lambda t: t.update({SCALE: torch.zeros(64, 6)}), r"weight_scale: F32 \[64, 6\]"),
        (
            lambda t: t.update(
                {f"{BASE}.weight": u8(32, 48), SCALE: torch.zeros(32, 6).to(torch.float8_e4m3fn)}
            ),
            "up of expert 1 is 32 x 96, expected 64 x 96",
        ),
        (
            lambda t: t.update({f"{BASE}.input_global_scale": t.pop(f"{BASE}.input_scale")}),
            "mix divisors and multipliers",
        ),
        (
            lambda t: (
                t.update(csf_tensors(random_layer(experts=1))) or t.pop(f"{BASE[:-9]}0.up_proj.weight_scale")
            ),
            "stored beside|expected one form",
        ),
        (lambda t: [t.pop(n) for n in list(t) if "up_proj" in n], "expected up and down"),
    ],
)
def test_malformed_plain_tensors(tmp_path: Path, change: Callable[[Tensors], object], match: str) -> None:
    tensors = modelopt_tensors(random_layer(experts=2))
    change(tensors)
    write_folder(tmp_path, tensors)
    refused(tmp_path, match, FormatError)


@pytest.mark.parametrize("experts", [0, 2**60])
def test_experts_without_a_byte(tmp_path: Path, experts: int) -> None:
    """A header of a few bytes must not keep a reader busy with 2^60 experts."""
    name = "m.experts.down_proj"
    header = {
        f"{name}": {"dtype": "U8", "shape": [experts, 0, 8], "data_offsets": [0, 0]},
        f"{name}_weight_scale": {"dtype": "F8_E4M3", "shape": [experts, 0, 1], "data_offsets": [0, 0]},
        f"{name}_weight_scale_2": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    refused(tmp_path, rf"{name}: shape \[{experts}, 0, 8\], expected no empty tensor", FormatError)


def test_modules_are_sorted_by_numbers_that_are_none(tmp_path: Path) -> None:
    names = ["m.10.experts", "m.².experts", f"m.{'9' * 5000}.experts", "m.9.experts"]
    tensors: Tensors = {}
    for name in names:
        tensors |= modelopt_tensors(random_layer(name, experts=1))
    write_folder(tmp_path, tensors)
    found = [layer.name for layer in open_checkpoint(tmp_path).layers]
    assert set(found) == set(names)
    assert found.index("m.9.experts") < found.index("m.10.experts")


def test_plain_and_compressed_experts_in_one_layer(tmp_path: Path) -> None:
    layer = random_layer(experts=2)
    plain, streams = modelopt_tensors(layer), csf_tensors(layer)
    tensors = {n: t for n, t in plain.items() if ".experts.0." in n}
    tensors |= {n: t for n, t in streams.items() if ".experts.1." in n}
    write_folder(tmp_path, tensors)
    refused(tmp_path, "plain NVFP4 .* and compressed NVFP4 .*expected one form", FormatError)


def test_streams_of_all_experts_at_once(tmp_path: Path) -> None:
    layer = random_layer(experts=2)
    tensors = fused_tensors(layer)
    scale = f"{layer.name}.down_proj_weight_scale"
    del tensors[scale]
    tensors[scale + NVFP4.fixed_suffix] = u8(8)
    tensors[scale + NVFP4.exceptions_suffix] = torch.zeros(0, dtype=torch.uint32)
    write_folder(tmp_path, tensors)
    refused(tmp_path, "streams of all experts at once", FormatError)


def test_bad_streams_are_named_when_read(tmp_path: Path) -> None:
    tensors = csf_tensors(random_layer(experts=2))
    tensors[FIXED][64 + 3] = 241
    down = BASE.replace("up", "down") + ".weight_scale"
    tensors[f"{down}.nvfp4_csf_exceptions"] = torch.tensor([4, 3]).to(torch.uint32)
    write_folder(tmp_path, tensors)
    layer = open_checkpoint(tmp_path).layers[0]
    with pytest.raises(FormatError, match=f"{BASE}.weight_scale.nvfp4_csf_fixed: base 241 of row 19"):
        layer.source(1, "up").plane((16, 48))
    with pytest.raises(FormatError, match=f"{down}.nvfp4_csf_exceptions: entry 1 has position 3"):
        layer.source(1, "down").plane(cols=(32, 64))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_divisors_that_cannot_be_inverted(tmp_path: Path, value: float) -> None:
    tensors = compressed_tensors(random_layer(experts=1))
    name = "model.layers.0.mlp.experts.0.up_proj.weight_global_scale"
    tensors[name] = torch.tensor([value])
    write_folder(tmp_path, tensors)
    source = open_checkpoint(tmp_path).layers[0].source(0, "up")
    with pytest.raises(FormatError, match=f"{name}: (inf|nan) as the inverse of a divisor"):
        _ = source.global_scale
