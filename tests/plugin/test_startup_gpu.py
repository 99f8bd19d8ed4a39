"""On a GPU: what a start leaves of device memory, and that calls neither allocate nor compile."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from expert_layers import EXPERTS, Checkpoint, Layer
from vllm_csf.kernels import oracle, reference
from vllm_csf.kernels.activation import SILU
from vllm_csf.kernels.compiled import build
from vllm_csf.kernels.compiled.build import Build, UndeclaredProgramError
from vllm_csf.kernels.compiled.cache import ProgramCache

from vllm_csf.cute import CuteExecution
from vllm_csf.execution import choose
from vllm_csf.planning import LayerFacts, Limits
from vllm_csf.report import Ledger
from vllm_csf.startup import release_cached
from vllm_csf.tuning import Budget

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, TOPK, LAYERS, TOKENS = 256, 192, 2, 3, 9000  # more than one piece
MIB = 1 << 20


def received(seed: int = 0) -> reference.ExpertLayer:
    with torch.device("cuda"):
        layer = Layer(width=WIDTH, hidden=HIDDEN)
    for tensor in Checkpoint(WIDTH, seed, HIDDEN).tensors(layer.dialect, streams=True):
        layer.receive(*tensor)
    return layer.finish()


class Engine:
    """What the method and the engine do at start, for `LAYERS` layers and a draft layer."""

    def __init__(self, folder: str, tokens: int = TOKENS, tuning: Budget | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.ledger, self.tokens, self.folder = Ledger(tuning=tuning), tokens, folder
        self.executions: list[CuteExecution] = []
        self.resident: list[dict[str, torch.Tensor]] = []

    def load(self, layers: list[reference.ExpertLayer]) -> None:
        names = [f"layer {len(self.executions) + i}" for i in range(len(layers))]
        for name in names:
            self._declare(name)
        while layers:
            self._prepare(names.pop(0), layers.pop(0))
            release_cached(self.device, pooled=False)

    def _declare(self, name: str) -> None:
        execution = choose("cute", self.device, torch.bfloat16, SILU, HIDDEN)
        facts = LayerFacts(EXPERTS, EXPERTS, HIDDEN, WIDTH, TOPK, SILU, False)
        self.plan = execution.plan(facts, Limits(self.tokens), self.device)
        execution.serve_by(self.ledger.declare(self.plan, self.folder, self.device))
        self.ledger.expect(name)
        self.executions.append(execution)

    def _prepare(self, name: str, layer: reference.ExpertLayer) -> None:
        execution = self.executions[len(self.resident)]
        resident = execution.prepare(layer)
        self.resident.append(resident)
        scratch = self.ledger.scratch(self.device)
        call, timer = (
            partial(execution.try_out, resident, None, scratch),
            partial(execution.timer, resident, None),
        )
        self.ledger.try_with(self.plan, call, timer)
        self.ledger.done(name, layer, execution, resident, self.device)

    def __call__(self, index: int, x, weights, ids) -> torch.Tensor:
        scratch = self.ledger.scratch(self.device)
        return self.executions[index](self.resident[index], x, weights, ids, None, False, scratch)

    def exceptions(self) -> int:
        kinds = ("records", "dense")
        return sum(t.nbytes for held in self.resident for name, t in held.items() if name.startswith(kinds))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def engine(folder):
    made = Engine(folder)
    made.load([received(seed) for seed in range(LAYERS)])
    yield made
    del made
    gc.collect()
    build.reclaim()


def routed(tokens: int, ids: torch.dtype, seed: int = 0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g, device="cuda").bfloat16()
    order = torch.rand(tokens, EXPERTS, generator=g, device="cuda").argsort(dim=1)
    return x, torch.rand(tokens, TOPK, generator=g, device="cuda"), order[:, :TOPK].to(ids).contiguous()


def wanted(seed: int, x, weights, ids) -> torch.Tensor:
    checkpoint = Checkpoint(WIDTH, seed, HIDDEN)
    dense = ([checkpoint.dense(shard, e) for e in range(EXPERTS)] for shard in ("w1", "w3", "w2"))
    host = [t.double().cpu().numpy() for t in (x, weights)]
    return torch.from_numpy(oracle.expert_layer(*host, ids.cpu().numpy(), *dense))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_every_step_computes_every_layer(engine, ids):
    sizes = {n for step in engine.plan.steps for n in (step.first, min(step.last, 1200))}
    for tokens in sorted(sizes | {engine.plan.piece + 1}):
        for index in range(LAYERS):
            call = routed(tokens, ids, seed=index)
            truth = wanted(index, *call)
            error = (engine(index, *call).double().cpu() - truth).norm() / truth.norm()
            assert error < 1e-2, (tokens, index)


def test_memory_after_start_is_the_plans(folder):
    gc.collect()
    build.reclaim()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    made = Engine(folder)
    made.load([received(seed) for seed in range(LAYERS)])
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    planned = LAYERS * made.plan.resident_bytes + made.exceptions() + made.plan.scratch_bytes
    tensors = sum(len(resident) for resident in made.resident) + 1
    assert planned <= held <= planned + 512 * tensors  # the allocator's rounding of each
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 16 * MIB + 2 * MIB * tensors


def test_calls_allocate_nothing_but_their_output_and_can_be_captured(engine):
    """Every step, both id types, in graphs; the first calls that are captured are the first of the test."""
    graphs = []
    torch.cuda.make_graphed_callables(torch.nn.Linear(8, 8).cuda(), (torch.ones(1, 8, device="cuda"),))
    gc.collect()
    free, _ = torch.cuda.mem_get_info()
    for ids in (torch.int32, torch.int64):
        for step in engine.plan.steps:
            call = routed(step.first, ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = engine(0, *call)
            graphs.append((graph, call, out))
    for graph, call, out in graphs:
        out.zero_()
        graph.replay()
        assert torch.equal(out, engine(0, *call))
        assert not engine.resident[0]["flags"].any()
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] < 64 * MIB  # graphs and their pools, not code or scratch
    assert engine.ledger.scratch(engine.device).nbytes == engine.plan.scratch_bytes


def test_undeclared_calls_are_refused(engine):
    with pytest.raises(UndeclaredProgramError, match=f"{TOKENS + 1} tokens"):
        engine(0, *routed(TOKENS + 1, torch.int32))


def test_a_draft_layer_adds_its_weights_alone(engine):
    scratch, loaded = engine.ledger.scratch(engine.device).nbytes, build.loaded()
    engine.load([received(seed=7)])
    assert engine.executions[-1]._served is engine.executions[0]._served
    assert engine.ledger.scratch(engine.device).nbytes == scratch
    assert build.loaded() == loaded
    call = routed(3, torch.int32)
    truth = wanted(7, *call)
    assert (engine(LAYERS, *call).double().cpu() - truth).norm() < 1e-2 * truth.norm()


def test_programs_are_unloaded(folder):
    """Fifty times loaded, called and let go: device memory as the driver sees it, whose grain is 2 MiB. Code
    that stayed would be some 10 MiB."""
    made = Engine(folder, tokens=1)
    made.load([received()])
    call = routed(1, torch.int64)
    free, step = [], made.plan.steps[0]
    for _ in range(50):
        programs = Build(step.programs, ProgramCache(folder)).finish()
        execution = made.executions[0]
        execution._served.load(programs)
        made(0, *call)
        del programs
        execution._served._programs, execution._served._functions = None, []
        gc.collect()
        assert build.reclaim() == len(step.programs)
        free.append(torch.cuda.mem_get_info()[0])
    assert min(free[-5:]) >= min(free[2:7]) - 2 * MIB


def test_engines_one_after_the_other_leave_nothing(folder):
    """Device memory as the driver sees it, so code that stays loaded counts."""
    free = []
    for cycle in range(20):
        made = Engine(folder, tokens=TOKENS if cycle % 2 else 1)
        made.load([received()])
        made(0, *routed(1, torch.int64))
        torch.cuda.synchronize()
        del made
        gc.collect()
        build.reclaim()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert build.loaded() == 0
    assert min(free[-4:]) >= min(free[2:6]) - 2 * MIB  # the driver's grain


def test_the_second_start_compiles_nothing(folder, engine, monkeypatch):
    del engine
    gc.collect()
    build.reclaim()
    monkeypatch.setattr(build, "compile_in_workers", None)
    monkeypatch.setattr(build, "compile_object", None)
    made = Engine(folder)
    made.load([received()])
    assert made(0, *routed(5, torch.int32)).shape == (5, HIDDEN)
