"""Tensors in any order, from any shard, by every rank: what the layer holds, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, WIDTH, Checkpoint, Layer, run, wanted
from vllm_csf.loaders import codec
from vllm_csf.loaders.errors import FormatError

from vllm_csf.parameters import COMPRESSED_TENSORS, MODELOPT, Dialect

FORMS = pytest.mark.parametrize(("streams", "whole"), [(True, False), (False, False), (False, True)])


@FORMS
@pytest.mark.parametrize("dialect", [MODELOPT, COMPRESSED_TENSORS])
@pytest.mark.parametrize("seed", range(3))
def test_any_order(streams: bool, whole: bool, dialect: Dialect, seed: int) -> None:
    checkpoint, layer = Checkpoint(), Layer(dialect, streams, whole=whole)
    tensors = list(checkpoint.tensors(dialect, streams))
    random.Random(seed).shuffle(tensors)
    for tensor in tensors:
        assert layer.receive(*tensor)
    assert_near(run(layer.finish()).numpy(), wanted(checkpoint))


@FORMS
@pytest.mark.parametrize(("width", "ranks"), [(96, 1), (96, 3), (96, 2), (160, 4), (64, 4)])
def test_ranks_add_up(streams: bool, whole: bool, width: int, ranks: int) -> None:
    """Widths that do not divide are padded; a rank may own no channel at all."""
    checkpoint = Checkpoint(width)
    total = torch.zeros(5, HIDDEN)
    for rank in range(ranks):
        layer = Layer(MODELOPT, streams, rank, ranks, width, whole=whole)
        for name in ("w13_weight", "w2_weight", "csf_scales13", "csf_scales2"):
            getattr(layer, name).data.fill_(0xFF)  # what a reload finds there
        for tensor in checkpoint.tensors(MODELOPT, streams):
            layer.receive(*tensor)
        total += run(layer.finish())
    assert_near(total.numpy(), wanted(checkpoint))


def assert_near(found: np.ndarray, truth: np.ndarray) -> None:
    """Up to FP32 rounding: where large terms cancel, its error is that of the terms."""
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-6 * np.abs(truth).max())


def test_experts_of_other_ranks_are_left_alone() -> None:
    checkpoint = Checkpoint()
    total = torch.zeros(5, HIDDEN)
    for mine in ([2], [0, 1, 3]):
        layer = Layer(mine=mine)
        for *tensor, expert in checkpoint.tensors(MODELOPT, True):
            assert layer.receive(*tensor, expert) == (expert in mine)
        mapping = torch.tensor([mine.index(e) if e in mine else -1 for e in range(EXPERTS)])
        total += run(layer.finish(), mapping)
    assert_near(total.numpy(), wanted(checkpoint))


def test_parameters_carry_the_names_that_checkpoints_map_to() -> None:
    """vLLM's models look them up in named_parameters(), or with getattr."""
    layer = Layer(streams=True)
    names = dict(layer.named_parameters())
    for half in ("w13", "w2"):
        for suffix in ("nvfp4_csf_fixed", "nvfp4_csf_exceptions"):
            name = f"{half}_weight_scale.{suffix}"
            assert names[name] is getattr(layer, name)
    assert "w13_weight_scale" in dict(Layer(streams=False).named_parameters())


def test_gate_and_up_keep_their_own_global_scale() -> None:
    checkpoint = Checkpoint()
    checkpoint.projections[1, "w1"].global_scale *= 7
    layer = Layer()
    for tensor in checkpoint.tensors(MODELOPT, True):
        layer.receive(*tensor)
    assert_near(run(layer.finish()).numpy(), wanted(checkpoint))


def fill(layer: Layer, *, without: str = "", streams: bool = True) -> None:
    for half, name, tensor, shard, expert in Checkpoint().tensors(layer.dialect, streams):
        if (name, shard, expert) != (without, "w3", 2):
            layer.receive(half, name, tensor, shard, expert)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("weight", r"local expert 2\)\.up_proj\.weight: did not come"),
        ("weight_scale_2", r"local expert 2\)\.up_proj\.global_scale: did not come"),
        ("weight_scale.nvfp4_csf_fixed", r"local expert 2\)\.up_proj: has the exceptions stream alone"),
        ("weight_scale.nvfp4_csf_exceptions", r"local expert 2\)\.up_proj: has the fixed stream alone"),
    ],
)
def test_missing_parts_are_named(part: str, message: str) -> None:
    layer = Layer()
    fill(layer, without=part)
    with pytest.raises(FormatError, match=message):
        layer.finish()


def test_missing_plain_scale_is_named() -> None:
    layer = Layer(streams=False)
    fill(layer, without="weight_scale", streams=False)
    with pytest.raises(FormatError, match=r"up_proj\.scale: did not come"):
        layer.finish()


def test_missing_input_scales_do_not_matter() -> None:
    layer = Layer()
    fill(layer, without="input_scale")
    layer.finish()


@pytest.mark.parametrize("part", ["weight", "weight_scale_2", "weight_scale.nvfp4_csf_fixed"])
def test_duplicates_are_named(part: str) -> None:
    layer = Layer()
    fill(layer)
    twice = next(t for t in Checkpoint().tensors(MODELOPT, True) if t[1] == part and t[3:] == ("w1", 3))
    with pytest.raises(FormatError, match=r"experts\.3\.gate_proj\.\w+: came twice"):
        layer.receive(*twice)


def test_plain_scale_beside_streams_is_refused() -> None:
    layer = Layer(streams=True)
    with pytest.raises(FormatError, match=r"experts\.1\.down_proj.*plain weight_scale"):
        layer.receive("w2", "weight_scale", torch.zeros(HIDDEN, WIDTH // 16, dtype=torch.uint8), "w2", 1)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "weight",
            torch.zeros(WIDTH, HIDDEN, dtype=torch.uint8),
            r"up_proj\.weight: is torch.uint8 \[96, 64\]",
        ),
        ("weight", torch.zeros(WIDTH, HIDDEN // 2), r"up_proj\.weight: is torch.float32"),
        ("weight_scale_2", torch.zeros(3), r"up_proj\.global_scale: has 3 elements"),
        ("weight_scale_2", torch.tensor(float("inf")), r"up_proj\.global_scale: is inf"),
    ],
)
def test_wrong_tensors_are_named(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Layer().receive("w13", name, tensor, "w3", 0)


def test_zero_divisor_is_named() -> None:
    with pytest.raises(FormatError, match=r"up_proj\.global_scale: is 0\.0, expected a finite multiplier"):
        Layer(COMPRESSED_TENSORS).receive("w13", "weight_global_scale", torch.tensor(0.0), "w3", 0)


def test_broken_stream_is_named() -> None:
    layer = Layer()
    plane = codec.encode(Checkpoint().projections[0, "w1"].scale)
    layer.receive("w13", "weight_scale.nvfp4_csf_fixed", plane.fixed[:-1], "w1", 0)
    with pytest.raises(FormatError, match=r"experts\.0\.gate_proj\.weight_scale\.nvfp4_csf_fixed"):
        layer.receive("w13", "weight_scale.nvfp4_csf_exceptions", plane.exceptions, "w1", 0)


def test_new_weights_with_other_exceptions_take_the_old_tensors() -> None:
    layer = Layer()
    shapes = []
    for seed in (0, 1):
        checkpoint = Checkpoint(seed=seed)
        for tensor in checkpoint.tensors(MODELOPT, True):
            layer.receive(*tensor)
        made = layer.finish()
        shapes.append((made.scales13.entries.shape, made.scales13.longest, made.scales2.entries.shape))
        assert_near(run(made).numpy(), wanted(checkpoint))
    assert shapes[0] == shapes[1]


def wild() -> Checkpoint:
    checkpoint = Checkpoint()
    for projection in checkpoint.projections.values():
        projection.scale[:] = torch.randint(0, 120, projection.scale.shape, dtype=torch.uint8)
    return checkpoint


def test_new_weights_with_far_more_exceptions_are_refused() -> None:
    layer = Layer()
    fill(layer)
    layer.finish()
    for tensor in wild().tensors(MODELOPT, True):
        layer.receive(*tensor)
    with pytest.raises(FormatError, match=r"new weights have \d+ exceptions, expected at most \d+"):
        layer.finish()


def test_room_for_far_more_exceptions_can_be_asked_for() -> None:
    layer = Layer(room=1.0)
    fill(layer)
    layer.finish()
    checkpoint = wild()
    for tensor in checkpoint.tensors(MODELOPT, True):
        layer.receive(*tensor)
    assert_near(run(layer.finish()).numpy(), wanted(checkpoint))
