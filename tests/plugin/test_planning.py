"""Plans: which programs a start declares, what they take, and that nothing else can be called."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, WIDTH, Checkpoint, Layer
from vllm_csf.kernels.activation import SILU
from vllm_csf.kernels.compiled import build
from vllm_csf.kernels.compiled.build import ProgramSet, UndeclaredProgramError
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.moe import programs
from vllm_csf.kernels.packer import STEPS

pytest.importorskip("cutlass")

from vllm_csf import cute
from vllm_csf.planning import LayerFacts, Limits, Plan, geometry_of, make_plan
from vllm_csf.report import Ledger
from vllm_csf.startup import Served, Startup

TOPK = 2
CPU = torch.device("cpu")


def facts(**changes) -> LayerFacts:
    fields = {
        "experts": EXPERTS, "global_experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH, "topk": TOPK,
        "activation": SILU, "mapped": False,
    }  # fmt: skip
    return LayerFacts(**(fields | changes))


def plan_of(tokens: int = 8192, layer: LayerFacts | None = None, **limits) -> Plan:
    return make_plan(geometry_of(layer or facts(), "sm_90a", 132), Limits(tokens, **limits))


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(cute, "device_facts", lambda device: ("sm_90a", 132))


@pytest.fixture
def no_compiler(monkeypatch):
    """Programs that do nothing, in place of compiled ones. Returns what was called, for how many tokens."""
    called: list[tuple[object, int]] = []

    def finish(self) -> ProgramSet:
        made = {p: (lambda x, *rest, p=p: called.append((p, x.shape[0]))) for p in self._programs}
        with build._lock:
            build._loaded.update(made)
        return ProgramSet(made, self._owner)

    monkeypatch.setattr(build.Build, "start", lambda self: None)
    monkeypatch.setattr(build.Build, "finish", finish)
    yield called
    gc.collect()
    build.reclaim()


@pytest.mark.parametrize("tokens", [1, 7, 300, 1024, 8192])
@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("experts", [4, 128])
def test_steps_cover_every_token_count_once(tokens, topk, experts):
    plan = plan_of(tokens, facts(topk=topk, experts=experts, global_experts=experts))
    assert [step.first for step in plan.steps] == [1, *(step.last + 1 for step in plan.steps[:-1])]
    assert plan.piece >= tokens or plan.piece == programs.choices(plan.geometry)[-1].tokens
    bounds = {n for step in plan.steps for n in (step.first, step.last)}
    for size in sorted(n for n in bounds if n <= min(tokens, plan.piece)):
        step = plan.step_for(size)
        wanted = programs.choice_for(programs.choices(plan.geometry), size)
        assert step.choice == wanted
        assert [p.config.wide_ids for p in step.programs] == [False, True]
        taken = programs.workspace_bytes(plan.geometry, wanted, size)
        assert taken <= step.scratch_bytes <= plan.scratch_bytes


def test_few_tokens_need_few_programs():
    assert len(plan_of(1).steps) == 1
    assert len(list(plan_of(1).programs())) == 2
    assert len(plan_of(8192).steps) == len(programs.choices(plan_of().geometry))


def test_plans_are_compared_hashed_and_printed():
    plan = plan_of(1024, capture_sizes=(1, 2, 4, 8, 512), speculative_tokens=3)
    assert plan == plan_of(1024, capture_sizes=(1, 2, 4, 8, 512), speculative_tokens=3)
    assert len({plan, plan_of(1024), plan_of(1025), plan_of(1024, facts(mapped=True))}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.version = 2
    text = str(plan)
    assert f"scratch {plan.scratch_bytes} bytes" in text
    assert text.count(" ids: ") == 2 * len(plan.steps)
    assert "captured at 1, 2, 4, 8" in text
    assert text.startswith("plan 1 of 4 experts of 4, H 64, I 128, top 2, up to 1024 tokens, on sm_90a")


def test_tensor_parallel_ranks_share_a_plan():
    """Rank by rank from the model's width; the last rank's share is padded to that of the others."""
    from vllm_csf.partition import extent

    wide = 1408
    for ranks in (2, 3, 4):
        shares = [extent(wide, rank, ranks, "layer").size for rank in range(ranks)]
        plans = {plan_of(8192, facts(width=share)) for share in shares}
        assert len(plans) == 1
        (plan,) = plans
        assert plan.geometry.inner >= wide / ranks
        whole = plan_of(8192, facts(width=wide))
        # The weights' share falls with the ranks; the channels of a tile are the least that can be cut.
        assert plan.resident_bytes < whole.resident_bytes / ranks * 1.2 + 4 * 16 * 132 * 2
        assert plan.scratch_bytes < whole.scratch_bytes


def test_multiprocessors_change_no_program():
    small, large = (make_plan(geometry_of(facts(), "sm_90a", n), Limits(8192)) for n in (78, 132))
    assert set(small.programs()) == set(large.programs())
    assert small.scratch_bytes < large.scratch_bytes


def received(width: int = WIDTH):
    layer = Layer(width=width)
    for tensor in Checkpoint(width=width).tensors(layer.dialect, streams=True):
        layer.receive(*tensor)
    return layer.finish()


@pytest.mark.parametrize("width", [WIDTH, 32, 128])
def test_resident_bytes_are_what_a_layer_holds(no_device, width):
    layer = received(width)
    resident = cute.CuteExecution().prepare(layer)
    exceptions = sum(t.nbytes for name, t in resident.items() if name.startswith(("records", "dense")))
    held = sum(t.nbytes for t in resident.values())
    assert plan_of(8, facts(width=layer.width)).resident_bytes == held - exceptions


def served_layer(ledger: Ledger, name: str, tokens: int = 8192, folder: str | None = None):
    """As the method does it for one layer, but for the engine."""
    layer, execution = received(), cute.CuteExecution()
    ledger.expect(name)
    plan = execution.plan(facts(), Limits(tokens), CPU)
    execution.serve_by(ledger.declare(plan, folder, CPU))

    def with_weights():
        resident = execution.prepare(layer)
        scratch = ledger.scratch(CPU)
        ledger.try_with(plan, lambda: execution.try_out(resident, None, scratch))
        ledger.done(name, layer, execution, resident, CPU)
        return resident

    return execution, with_weights


def call(execution, resident, ledger, tokens: int, topk: int = TOPK, ids=torch.int32, expert_map=None):
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    routed = torch.zeros(tokens, topk, dtype=ids)
    return execution(resident, x, torch.ones(tokens, topk), routed, expert_map, False, ledger.scratch(CPU))


def test_layers_share_one_plan_its_programs_and_scratch(no_device, no_compiler):
    ledger = Ledger()
    (one, one_ready), (two, two_ready) = (served_layer(ledger, name) for name in ("a", "b"))
    assert one._served is two._served
    one_ready()
    assert not one._served.ready
    two_ready()
    plan = one._served.plan
    assert ledger.scratch(CPU).nbytes == plan.scratch_bytes
    assert {program for program, _ in no_compiler} == set(plan.programs())  # each was tried
    assert len(no_compiler) == len(list(plan.programs()))


def test_a_draft_of_the_same_geometry_declares_nothing_new(no_device, no_compiler):
    ledger = Ledger()
    target, ready = served_layer(ledger, "target")
    ready()
    tried = len(no_compiler)
    draft, draft_ready = served_layer(ledger, "draft")
    assert draft._served is target._served
    draft_ready()
    assert len(no_compiler) == tried


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_calls_take_the_declared_program_and_no_more_scratch(no_device, no_compiler, ids):
    ledger = Ledger()
    execution, ready = served_layer(ledger, "layer", tokens=9000)
    resident = ready()
    plan, scratch = execution._served.plan, ledger.scratch(CPU)
    buffer = scratch.take(0).untyped_storage().data_ptr()
    for tokens in (0, 1, 2, 3, 8, 9, 100, plan.piece, plan.piece + 1, 9000):
        no_compiler.clear()
        assert call(execution, resident, ledger, tokens, ids=ids).shape == (tokens, HIDDEN)
        assert sum(count for _, count in no_compiler) == tokens
        for program, count in no_compiler:
            assert program == plan.step_for(count).programs[ids == torch.int64]
    assert scratch.take(0).untyped_storage().data_ptr() == buffer
    assert scratch.nbytes == plan.scratch_bytes


@pytest.mark.parametrize(
    ("tokens", "topk", "expert_map"),
    [(301, TOPK, None), (1, TOPK + 1, None), (1, TOPK, torch.arange(EXPERTS, dtype=torch.int32))],
)
def test_undeclared_calls_are_refused_by_name(no_device, no_compiler, tokens, topk, expert_map):
    ledger = Ledger()
    execution, ready = served_layer(ledger, "layer", tokens=300)
    resident = ready()
    no_compiler.clear()
    said = rf"{tokens} tokens, top {topk}, .* not declared by plan 1 of 4 experts .* up to 300 tokens"
    with pytest.raises(UndeclaredProgramError, match=said):
        call(execution, resident, ledger, tokens, topk, expert_map=expert_map)
    assert not no_compiler


def test_a_call_before_the_programs_are_there_is_refused(no_device):
    served = Served(plan_of())
    with pytest.raises(RuntimeError, match="plan 1 of 4 experts"):
        served.program(1, False)


def test_a_step_that_no_plan_has_is_refused():
    with pytest.raises(UndeclaredProgramError, match="9000 tokens is not declared by plan 1"):
        plan_of(16384).step_for(9000)


def test_reload_keeps_programs(no_device, no_compiler, caplog):
    ledger = Ledger()
    execution, ready = served_layer(ledger, "layer")
    ready()
    served, tried = execution._served, len(no_compiler)
    ready()
    assert execution._served is served
    assert len(no_compiler) == tried


def test_engines_one_after_the_other_leave_nothing(no_device, no_compiler):
    alive = []
    for cycle in range(20):
        ledger = Ledger()
        execution, ready = served_layer(ledger, "layer", tokens=100 + cycle % 2)
        resident = ready()
        call(execution, resident, ledger, 5)
        alive += [weakref.ref(ledger), weakref.ref(execution), weakref.ref(execution._served)]
        wanted = len(list(execution._served.plan.programs()))
        assert build.loaded() == wanted
        del ledger, execution, ready, resident
        gc.collect()
        assert not any(ref() for ref in alive)
    assert build.reclaim() == wanted
    assert build.loaded() == 0


def test_engines_side_by_side_keep_what_each_needs(no_device, no_compiler):
    first, second = Ledger(), Ledger()
    one, one_ready = served_layer(first, "layer")
    resident = one_ready()
    two, two_ready = served_layer(second, "layer", tokens=1)
    two_ready()
    del second, two, two_ready
    gc.collect()
    assert build.reclaim() == 0  # its programs are some of the first one's
    call(one, resident, first, 100)


def test_programs_are_loaded_from_the_cache(tmp_path, monkeypatch):
    """With a real object, of a program that is compiled in a second."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "kernels"))
    from tiny_program import tiny
    from vllm_csf.kernels.compiled.objects import compile_object

    data, kept, plan = compile_object(tiny(1)), ProgramCache(tmp_path), plan_of(4)
    for program in (*plan.preparation, *plan.programs()):
        kept.store(program, data)
    startup = Startup()
    served = startup.declare(plan, ProgramCache(tmp_path))
    packer = served.packer()  # before the programs that serve
    assert set(packer.programs) == set(STEPS)
    account = startup.finish()
    count = len([*plan.preparation, *plan.programs()])
    assert (account.compiled, account.from_cache, account.in_process) == (0, count, 0)
    assert account.line().startswith(f"programs: 0 compiled in 0.0 s, {count} from cache, 0 already loaded")
    assert startup.finish() is None
    step, function = served.program(1, True)
    assert step == plan.steps[0]
    assert callable(function)
