"""On a GPU: a layer is tuned on its own weights, through what a start goes through."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from test_startup_gpu import HIDDEN, LAYERS, MIB, Engine, received, routed, wanted
from vllm_csf.kernels.compiled import build
from vllm_csf.kernels.compiled.build import UndeclaredProgramError
from vllm_csf.kernels.moe import candidates

from vllm_csf import cute
from vllm_csf.layer_timer import LayerTimer
from vllm_csf.planning import Plan
from vllm_csf.tuning import Budget

pytestmark = pytest.mark.gpu

TOKENS = 24
BUDGET = Budget(seconds=120, memory_mib=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("tuned"))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Candidates: one form of each program beside the table's, and the neighbours."""
    monkeypatch.setattr(candidates, "RUN", ({"warps": 8, "ctas": 2, "min_ctas": 2},))
    monkeypatch.setattr(candidates, "STAGES", (-1,))
    gc.collect()
    build.reclaim()
    yield
    gc.collect()
    build.reclaim()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "vllm.csf")
    return lambda: [r.getMessage() for r in caplog.records if "tuning: " in r.getMessage()]


def used() -> int:
    """Bytes of the device that are not free, as the driver sees it."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def started(folder: str, tuning: Budget | None, tokens: int = TOKENS) -> Engine:
    made = Engine(folder, tokens, tuning)
    made.load([received(seed) for seed in range(LAYERS)])
    return made


def plan(engine: Engine) -> Plan:
    return engine.executions[0]._served.plan


def check_results(engine: Engine) -> None:
    for step in plan(engine).steps:
        for ids in (torch.int32, torch.int64):
            for tokens in {step.first, step.last}:
                for index in range(LAYERS):
                    call = routed(tokens, ids, seed=index)
                    truth = wanted(index, *call)
                    error = (engine(index, *call).double().cpu() - truth).norm() / truth.norm()
                    assert error < 1e-2, (step, ids, tokens, index)


@pytest.mark.parametrize("favoured", ["as it is", "candidates"])
def test_a_tuned_start(folder, favoured, monkeypatch, lines, caplog):
    """Of the memory that tuning took nothing is left, and what it chose computes the layer."""
    if favoured == "candidates":
        measure = LayerTimer.__call__

        def unfair(self, choice, tokens, number):
            own = self._program(choice) in self._own._functions.values()
            return measure(self, choice, tokens, number) + (1.0 if own else 0.0)

        monkeypatch.setattr(LayerTimer, "__call__", unfair)
        folder += "-favoured"
    untuned = started(folder, None)
    table, with_table = plan(untuned), used()
    del untuned
    gc.collect()
    build.reclaim()

    engine = started(folder, BUDGET)
    with_tuned, chosen = used(), plan(engine)
    assert build.loaded() <= len(set(chosen.programs())) + 8  # and those that pack weights
    assert abs(with_tuned - with_table - (chosen.scratch_bytes - table.scratch_bytes)) < 16 * MIB
    assert engine.ledger.scratch(engine.device).nbytes == chosen.scratch_bytes
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 32 * MIB
    check_results(engine)
    with pytest.raises(UndeclaredProgramError, match=f"{TOKENS + 1} tokens"):
        engine(0, *routed(TOKENS + 1, torch.int32))
    (line,) = lines()
    assert "tuned in" in line
    assert "goes on without" not in caplog.text
    assert (chosen == table) is (favoured == "as it is" and " 0 steps not the table's" in line)
    del engine
    gc.collect()

    monkeypatch.setattr(cute, "LayerTimer", None)  # the choice is kept: nothing is timed
    again = started(folder, BUDGET)
    assert plan(again) == chosen
    assert "tuning: from cache" in lines()[-1]
    check_results(again)


@pytest.mark.slow
def test_every_candidate_computes_the_layer(folder, monkeypatch, caplog):
    """All that the module lists, for this layer: the timer compares each with the table's program."""
    monkeypatch.undo()
    caplog.set_level(logging.WARNING, "vllm.csf")
    engine = started(folder + "-all", Budget(seconds=300, memory_mib=256), tokens=300)
    assert engine(0, *routed(5, torch.int32)).shape == (5, HIDDEN)
    assert not [r.getMessage() for r in caplog.records if "without" in r.getMessage()]
