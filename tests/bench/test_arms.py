"""The arms of the kernel measurements, as far as no device is needed."""

from __future__ import annotations

import pytest
import torch
from vllm_csf.kernels.activation import SILU

from vllm_csf.bench.arms import PackedExecution
from vllm_csf.planning import LayerFacts, Limits


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr("vllm_csf.cute.device_facts", lambda device: ("sm_90a", 132))
    facts = LayerFacts(16, 16, 256, 128, 2, SILU, mapped=False)
    return [PackedExecution(native).plan(facts, Limits(64), torch.device("cpu")) for native in (False, True)]


def test_the_native_arm_runs_the_same_kernels_on_other_scales(plans):
    csf, native = plans
    assert (csf.geometry.native, native.geometry.native) == (False, True)
    assert [(s.first, s.last, s.choice) for s in csf.steps] == [
        (s.first, s.last, s.choice) for s in native.steps
    ]
    assert not set(csf.programs()) & set(native.programs())


def test_the_native_arm_holds_more(plans):
    csf, native = plans
    assert csf.resident_bytes < native.resident_bytes
