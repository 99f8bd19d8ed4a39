"""The method's part of a start, for the execution that compiles: declared when a layer is made, ready with
the last one's weights, and said in the log."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, WIDTH, Checkpoint

pytest.importorskip("vllm")
pytest.importorskip("cutlass")

from test_methods import ENCODED, NVFP4, PREFIX, experts, vllm_config  # noqa: F401 - the fixture is used by its name
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm_csf.kernels import layout
from vllm_csf.kernels.activation import SILU
from vllm_csf.kernels.compiled import build
from vllm_csf.kernels.compiled.build import ProgramSet, UndeclaredProgramError
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.scales import planes as planes_module

from vllm_csf import cute, dummy
from vllm_csf import experts as method_module
from vllm_csf.parameters import MODELOPT
from vllm_csf.planning import LayerFacts, Limits, geometry_of, make_plan
from vllm_csf.report import Totals
from vllm_csf.startup import Startup
from vllm_csf.stock import stock_config


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The execution of a GPU, on the CPU, with programs that do nothing. Returns those called."""
    found: list[Any] = []

    def finish(self) -> ProgramSet:
        return ProgramSet({p: (lambda *_, p=p: found.append(p)) for p in self._programs}, self._owner)

    monkeypatch.setattr(build.Build, "start", lambda self, after=None: None)
    monkeypatch.setattr(build.Build, "finish", finish)
    monkeypatch.setattr(cute, "device_facts", lambda device: ("sm_90a", 132))
    monkeypatch.setattr(method_module, "choose", lambda *arguments: cute.CuteExecution())
    return found


@pytest.fixture
def lines():
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        found.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.csf")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addFilter(note)
    yield found
    logger.removeFilter(note)
    logger.setLevel(before)


def layer_of(config: Any, name: str) -> RoutedExperts:
    """As vLLM builds one: the method, then its parameters."""
    layer = experts()
    layer.layer_name = name
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda e: e)
    layer.register_buffer("_expert_map", None)
    layer.rocm_aiter_fmoe_enabled = False
    layer.quant_method = config.get_quant_method(layer, PREFIX)
    layer.quant_method.create_weights(layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
    return layer


def load(layer: RoutedExperts) -> None:
    for half, name, tensor, shard, expert in Checkpoint().tensors(MODELOPT, streams=False):
        parameter = getattr(layer, f"{half}_{name}")
        assert parameter.weight_loader(parameter, tensor, name, shard, expert, return_success=True)


def execution(layer: RoutedExperts) -> cute.CuteExecution:
    return layer.quant_method._execution


def run(layer: RoutedExperts, tokens: int) -> torch.Tensor:
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    return layer.quant_method.run(layer, x, torch.ones(tokens, 2), ids)


def test_waiting_for_the_programs_that_pack_counts(monkeypatch, tmp_path):
    finish = build.Build.finish

    def slowly(self) -> ProgramSet:
        self.account.seconds += 5.0 if self._owner == "the preparation of weights" else 0.0
        return finish(self)

    monkeypatch.setattr(build.Build, "finish", slowly)
    facts = LayerFacts(EXPERTS, EXPERTS, HIDDEN, WIDTH, 2, SILU, mapped=False)
    startup = Startup()
    served = startup.declare(make_plan(geometry_of(facts, "sm_90a", 132), Limits(64)), ProgramCache(tmp_path))
    served.packer()
    account = startup.finish()
    assert account is not None
    assert 5.0 <= account.seconds < 10.0


def test_a_model_and_its_draft_start(called, lines, vllm_config):  # noqa: F811
    limit = vllm_config.scheduler_config.max_num_batched_tokens
    config = stock_config(dict(NVFP4))
    layers = [layer_of(config, f"layer {i}") for i in range(2)]
    plan = execution(layers[0])._served.plan
    assert plan is execution(layers[1])._served.plan
    assert plan.limits.tokens == limit
    for layer in layers:
        assert not called
        load(layer)
        layer.quant_method.process_weights_after_loading(layer)
    assert set(called) == set(plan.programs())
    programs, saved = lines
    assert programs.startswith("csf_nvfp4: programs: 0 compiled")
    assert saved.startswith("csf_nvfp4: 2 expert layers, ")
    assert saved.endswith("execution cute")
    draft = layer_of(config, "draft")
    load(draft)
    called.clear()
    draft.quant_method.process_weights_after_loading(draft)
    assert execution(draft)._served is execution(layers[0])._served
    assert not called
    assert lines[2:] == [line for line in lines[2:] if "1 expert layers" in line]
    assert len(lines) == 3
    assert run(draft, limit).shape == (limit, HIDDEN)
    assert set(called) <= set(plan.programs())
    with pytest.raises(UndeclaredProgramError, match=f"{limit + 1} tokens"):
        run(draft, limit + 1)


@pytest.mark.parametrize("kind", ["plain", "csf"])
def test_plain_scales_wait_whole_and_streams_as_streams(kind):
    layer = layer_of(stock_config(dict(NVFP4 if kind == "plain" else ENCODED)), "layer")
    planes = WIDTH * HIDDEN // 16
    length = planes if kind == "plain" else WIDTH + planes // 2
    assert layer.csf_scales13.shape == (2 * EXPERTS, length)


@pytest.mark.parametrize("config", ["plain", "csf"])
def test_dummy_weights_have_the_exceptions_of_trained_ones(config):
    layer = layer_of(stock_config(dict(NVFP4 if config == "plain" else ENCODED)), "layer")
    layer.quant_method._dummy = True
    layer.quant_method.process_weights_after_loading(layer)
    resident = {name.removeprefix("csf_"): tensor.data for name, tensor in layer.named_parameters()}
    made = execution(layer)
    view = made._view(resident)
    for matrix, rows, cols in ((view.w13, 2 * WIDTH, HIDDEN // 16), (view.w2, HIDDEN, WIDTH // 16)):
        scales = planes_module.without_padding(layout.unpack_scales(matrix), rows, cols, matrix.shape.gated)
        normal = (scales >= dummy.BASE) & (scales < dummy.BASE + 16)
        share = 1 - normal.float().mean()
        assert 0 < share < 3 * dummy.EXCEPTION_SHARE + 0.01
        assert bool((scales[~normal] == dummy.EXCEPTION).all())


class LeastStages:
    """In the place of `LayerTimer`: calls nothing, and finds that fewer stages are faster."""

    def __init__(self, launch, geometry, own, others, nbytes) -> None:
        assert nbytes == 100 << 20

    def ready(self, choice) -> bool:
        return True

    def __call__(self, choice, tokens: int, number: int) -> float:
        return 1e-3 * choice.stages


def test_a_model_is_tuned_where_its_configuration_asks_for_it(called, lines, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.Build, "take", lambda self, seconds: self.finish())
    monkeypatch.setattr(cute, "LayerTimer", LeastStages)
    for source in ("tuning: tuned in ", "tuning: from cache in "):
        lines.clear()
        called.clear()
        config = stock_config(NVFP4 | {"tuning": {"seconds": 5, "memory_mib": 100}})
        layers = [layer_of(config, f"layer {i}") for i in range(2)]
        for layer in layers:
            load(layer)
            layer.quant_method.process_weights_after_loading(layer)
        served = execution(layers[0])._served
        assert served is execution(layers[1])._served
        table = make_plan(served.plan.geometry, served.plan.limits)
        assert served.plan != table
        assert set(called) == set(served.plan.programs())
        tuned = [line for line in lines if source in line]
        assert len(tuned) == 1
        assert " 0 steps not the table's" not in tuned[0]
        assert run(layers[1], 3).shape == (3, HIDDEN)
        with pytest.raises(UndeclaredProgramError):
            run(layers[0], served.plan.limits.tokens + 1)


def address(tensor: torch.Tensor) -> int | None:
    """None for a tensor that another test has traced with: it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def test_sources_are_gone_when_the_engine_measures():
    """Of the tensors that a layer was given, none but the resident ones lives on."""
    layer = layer_of(stock_config(dict(NVFP4)), "layer")
    load(layer)
    sources = [layer.w13_weight.data, layer.w2_weight.data, layer.csf_scales13.data, layer.csf_scales2.data]
    addresses = {tensor.data_ptr() for tensor in sources}
    del sources
    layer.quant_method.process_weights_after_loading(layer)
    gc.collect()
    tensors = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))
    held = {address(t) for t in tensors if t.device.type == "cpu"}
    resident = {t.data_ptr() for t in layer.parameters()}
    assert not addresses & (held - resident)
    names = {name for name, _ in layer.named_parameters()}
    assert names >= {"csf_tiles13", "csf_tiles2", "csf_flags"}
    assert not names & {"w13_weight", "w2_weight", "csf_scales13", "csf_scales2"}


def test_engines_that_go_take_their_programs_along(called):
    for _ in range(20):
        config = stock_config(dict(NVFP4))
        layer = layer_of(config, "layer")
        load(layer)
        layer.quant_method.process_weights_after_loading(layer)
        run(layer, 3)
        del layer, config
    gc.collect()
    assert not [holder for holder in build._holders if holder.programs]


def test_the_line_says_how_many_tokens_of_cache_were_bought():
    totals = Totals(layers=2, native=1 << 20, resident=600_000, exceptions=10)
    assert totals.line(0, "cute", 1000).endswith("; 438.06 KiB saved are 448 tokens of KV cache")
    for unknown in (0, 1 << 30):
        assert totals.line(0, "cute", unknown).endswith("execution cute")
    assert Totals(2, 1000, 1500).line(0, "cute", 1).endswith("execution cute")
