"""`csf_scales: native`: the same layer with scales that are kept as they are, for comparisons."""

from __future__ import annotations

import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, Checkpoint, Layer
from vllm_csf.kernels import layout, reference
from vllm_csf.kernels.activation import SILU

from vllm_csf import cute
from vllm_csf.execution import Execution, ReferenceExecution, choose

CPU = torch.device("cpu")


@pytest.fixture
def layer() -> reference.ExpertLayer:
    made = Layer()
    for tensor in Checkpoint().tensors(made.dialect, streams=True):
        made.receive(*tensor)
    return made.finish()


def native_bytes(layer: reference.ExpertLayer) -> int:
    return sum(p.fixed.shape[0] * p.rows * p.cols for p in (layer.scales13, layer.scales2))


def outputs(execution: Execution, layer: reference.ExpertLayer, tokens: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=g)
    resident = execution.prepare(layer)
    return execution(resident, x, weights, ids, None, False, reference.Scratch("cpu"))


@pytest.mark.parametrize("tokens", [1, 7])
def test_reference_gives_the_same_bits(layer, tokens):
    csf, native = (outputs(ReferenceExecution(native), layer, tokens) for native in (False, True))
    assert csf.abs().max() > 0
    assert torch.equal(csf, native)


def test_reference_holds_the_bytes_of_the_checkpoint(layer):
    execution = ReferenceExecution(native=True)
    resident = execution.prepare(layer)
    kept = resident["fixed13"].nbytes + resident["fixed2"].nbytes
    assert kept == native_bytes(layer)
    offsets = resident["offsets13"].nbytes + resident["offsets2"].nbytes
    assert execution.scale_bytes(resident) == kept + offsets
    assert not resident["offsets13"].any()


def test_cute_keeps_the_same_bytes_in_both_forms(layer, monkeypatch):
    monkeypatch.setattr(cute, "device_facts", lambda device: ("sm_90a", 132))
    unpacked, sizes = [], []
    for native in (False, True):
        execution = cute.CuteExecution(native)
        resident = execution.prepare(layer)
        view = execution._view(resident)
        unpacked.append([*layout.unpack(view.w13), *layout.unpack(view.w2)])
        sizes.append(execution.scale_bytes(resident))
    for a, b in zip(*unpacked, strict=True):
        assert torch.equal(a, b)
    assert sizes[1] >= native_bytes(layer)


def test_the_setting_is_checked():
    assert choose("auto", CPU, torch.bfloat16, SILU, 64, "native").name == "reference, native scales"
    with pytest.raises(ValueError, match="csf_scales is 'raw', expected 'csf' or 'native'"):
        choose("auto", CPU, torch.bfloat16, SILU, 64, "raw")
