"""The resident form of the CuTe execution, on the CPU: packed bytes are the checkpoint's."""

from __future__ import annotations

import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, WIDTH, Checkpoint, Layer
from vllm_csf.kernels import layout, reference
from vllm_csf.kernels.activation import SILU, Activation

from vllm_csf import cute
from vllm_csf.execution import choose


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(cute, "device_facts", lambda device: ("sm_90a", 132))


def received(seed: int = 0, width: int = WIDTH) -> reference.ExpertLayer:
    layer = Layer(width=width)
    for tensor in Checkpoint(width=width, seed=seed).tensors(layer.dialect, streams=True):
        layer.receive(*tensor)
    return layer.finish()


def scale_bytes(planes: reference.ScalePlanes) -> torch.Tensor:
    count = planes.fixed.shape[0]
    out = torch.empty(count, planes.rows * planes.cols + 1, dtype=torch.uint8)
    return reference.decode_planes(planes, torch.arange(count), out)


@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
def test_resident_tensors_unpack_to_the_checkpoint(no_device, monkeypatch, group_bytes):
    monkeypatch.setattr(cute, "GROUP_BYTES", group_bytes)
    layer = received()
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
