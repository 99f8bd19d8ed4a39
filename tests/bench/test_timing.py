"""What the timing of graphs does in which order, with a device that keeps a diary."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from vllm_csf.bench import timing
from vllm_csf.bench.timing import WARM_ROUNDS, Inputs, Rounds


@pytest.fixture
def diary(monkeypatch):
    """(arm, first activation) of every replay; arm number n takes n microseconds more than the last."""
    seen: list[tuple[str, float]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(timing.torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(timing.torch.cuda, "stream", lambda s: contextlib.nullcontext())
    monkeypatch.setattr(timing, "capture", lambda call, inputs, s: (call, inputs))

    def replay(graph, s):
        call, inputs = graph
        seen.append((call, inputs.x[0, 0].item()))
        return float(len(seen))

    monkeypatch.setattr(timing, "_replay", replay)
    return seen


def inputs(value: float) -> Inputs:
    x = torch.full((2, 4), value)
    return Inputs(x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))


def test_arms_take_turns_and_see_the_same_inputs(diary):
    fresh = [inputs(value) for value in (10.0, 20.0)]
    times = timing.measure({"a": "a", "b": "b", "c": "c"}, fresh, Rounds(seconds=0, least=4))
    rounds = [diary[i : i + 3] for i in range(0, len(diary), 3)]
    assert len(rounds) == 4 + WARM_ROUNDS
    for number, one in enumerate(rounds):
        assert {value for _, value in one} == {fresh[number % 2].x[0, 0].item()}
        assert "".join(name for name, _ in one) == ("abc", "bca", "cab")[number % 3]
    assert {name: len(found) for name, found in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_warm_rounds_are_not_counted(diary):
    times = timing.measure({"a": "a"}, [inputs(1.0)], Rounds(seconds=0, least=2))
    assert times == {"a": [WARM_ROUNDS + 1.0, WARM_ROUNDS + 2.0]}


def test_time_ends_it_between_least_and_most(diary):
    assert len(timing.measure({"a": "a"}, [inputs(1.0)], Rounds(seconds=60, least=1, most=9))["a"]) == 9


def test_fresh_inputs_are_left_alone(diary):
    fresh = [inputs(1.0), inputs(2.0)]
    timing.measure({"a": "a"}, fresh, Rounds(seconds=0, least=3))
    assert [one.x[0, 0].item() for one in fresh] == [1.0, 2.0]


@pytest.mark.gpu
def test_a_longer_call_takes_longer():
    x = torch.ones(64, 4096, dtype=torch.bfloat16, device="cuda")
    one = Inputs(x, torch.zeros(64, 1, dtype=torch.int32, device="cuda"), torch.ones(64, 1, device="cuda"))
    big = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def calls(count):
        def run(x, ids, weights):
            for _ in range(count):
                x = x @ big
            return x

        return run

    found = timing.measure({"one": calls(1), "many": calls(8)}, [one], Rounds(0.2))
    assert sorted(found["many"])[len(found["many"]) // 2] > 3 * sorted(found["one"])[len(found["one"]) // 2]
