"""The resident form of the CuTe execution, on the CPU: packed bytes are the checkpoint's."""

from __future__ import annotations

import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, WIDTH, Checkpoint, Layer
from vllm_csf.kernels import layout, reference
from vllm_csf.kernels.activation import SILU, Activation
from vllm_csf.loaders import codec

from vllm_csf import cute
from vllm_csf.execution import choose


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(cute, "device_facts", lambda device: ("sm_90a", 132))


def received(seed: int = 0, width: int = WIDTH, streams: bool = True) -> reference.ExpertLayer:
    """Of streams, or of plain scales that are kept as they are."""
    layer = Layer(width=width, streams=streams, whole=not streams)
    for tensor in Checkpoint(width=width, seed=seed).tensors(layer.dialect, streams):
        layer.receive(*tensor)
    return layer.finish()


def scale_bytes(planes: reference.ScalePlanes) -> torch.Tensor:
    count = planes.fixed.shape[0]
    out = torch.empty(count, planes.rows * planes.cols + 1, dtype=torch.uint8)
    return reference.decode_planes(planes, torch.arange(count), out)


@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
@pytest.mark.parametrize("streams", [True, False])
def test_resident_tensors_unpack_to_the_checkpoint(no_device, monkeypatch, group_bytes, streams):
    monkeypatch.setattr(cute, "GROUP_BYTES", group_bytes)
    layer = received(streams=streams)
    execution = cute.CuteExecution()
    resident = execution.prepare(layer)
    view = execution._view(resident)
    inner = -(-WIDTH // 64) * 64
    weight, scale = layout.unpack(view.w13)
    halves = weight.view(EXPERTS, 2, inner, -1)
    assert torch.equal(halves[:, :, :WIDTH].reshape(layer.w13.shape), layer.w13)
    assert not halves[:, :, WIDTH:].any()
    wanted = scale_bytes(layer.scales13).view(EXPERTS, 2, WIDTH, HIDDEN // 16)
    assert torch.equal(scale.view(EXPERTS, 2, inner, -1)[:, :, :WIDTH], wanted)
    weight, scale = layout.unpack(view.w2)
    assert torch.equal(weight[..., : WIDTH // 2], layer.w2)
    assert not weight[..., WIDTH // 2 :].any()
    assert torch.equal(scale[..., : WIDTH // 16], scale_bytes(layer.scales2))
    assert not resident["flags"].any()


def test_plain_scales_are_never_encoded_and_become_the_same_tensors(no_device, monkeypatch):
    wanted = cute.CuteExecution().prepare(received())
    monkeypatch.setattr(codec, "encode", lambda *_, **__: pytest.fail("encoded on the host"))
    found = cute.CuteExecution().prepare(received(streams=False))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_exceptions_are_the_scales_outside_the_codes(no_device):
    execution = cute.CuteExecution()
    layer = received()
    view = execution._view(resident := execution.prepare(layer))
    outside = 0
    for matrix, scale in ((view.w13, layer.scales13), (view.w2, layer.scales2)):
        whole = scale_bytes(scale).reshape(EXPERTS, -1, scale.cols)
        sizes = matrix.shape.rows, matrix.shape.k // 16, 2 if matrix.shape.gated else 1
        inner = layout.pad_scales(whole, *sizes)
        base = layout.choose_bases(inner)[..., None]
        coded = (inner >= base) & (inner < base + 16) & (inner >= 8) & (inner < 127)
        outside += int((~torch.where(base == 0, inner == 0, coded)).sum())
    assert not bool((view.w13.slices[..., 1] < 0).any() | (view.w2.slices[..., 1] < 0).any())
    assert execution.exceptions(resident) == outside > 0


def test_scale_bytes_are_everything_but_weights(no_device):
    layer = received()
    execution = cute.CuteExecution()
    resident = execution.prepare(layer)
    inner = -(-WIDTH // 64) * 64
    packed = EXPERTS * (2 * inner * HIDDEN + HIDDEN * inner) // 2
    names = [n for n in resident if n not in ("flags", "alphas13", "alphas2")]
    assert execution.scale_bytes(resident) == sum(resident[n].nbytes for n in names) - packed


def test_other_weights_come_into_tensors_of_the_same_shapes(no_device):
    execution = cute.CuteExecution()
    first = execution.prepare(received(seed=0))
    second = execution.prepare(received(seed=1))
    assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in second.items()}


def test_unfit_layers_fall_back_or_say_why():
    cpu = torch.device("cpu")
    assert choose("auto", cpu, torch.bfloat16, SILU, 64).name == "reference"
    with pytest.raises(ValueError, match="needs a CUDA device"):
        choose("cute", cpu, torch.bfloat16, SILU, 64)
    with pytest.raises(ValueError, match="expected 'auto'"):
        choose("fast", cpu, torch.bfloat16, SILU, 64)
    assert not cute.can_compute(torch.float16, SILU, 64)
    assert not cute.can_compute(torch.bfloat16, SILU, 96)
    assert not cute.can_compute(torch.bfloat16, Activation("gelu"), 64)
    assert not cute.can_compute(torch.bfloat16, Activation("relu2", gated=False), 64)
