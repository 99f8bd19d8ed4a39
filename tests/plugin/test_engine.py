"""The engine in this process, on the CPU: what needs no server to be seen."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_csf import flag, stock
from vllm_csf.report import Ledger
from vllm_csf.tuning import Budget

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs vLLM's CPU build"),
]

PROMPTS = ([5, 17, 33, 99], [7, 201, 120, 64, 64, 12, 31, 90], list(range(10, 60)))
FAMILY = "qwen3-moe"


@pytest.fixture(autouse=True, scope="module")
def in_this_process() -> Iterator[None]:
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",  # graphs are traced and then run as they are, not compiled to C++
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture
def engine() -> Iterator[Any]:
    made: list[Any] = []

    def start(model: Path, **options: Any) -> Any:
        from vllm import LLM

        arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
        made.append(LLM(str(model), **(arguments | options)))
        return made[-1]

    yield start
    made.clear()
    gc.collect()


def tokens(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def reference(checkpoint) -> Callable[..., list[list[int]]]:
    """Tokens of Hugging Face transformers on the dequantised weights."""
    from transformers import AutoModelForCausalLM

    @functools.cache
    def answers(seed: int = 0) -> list[list[int]]:
        folder = checkpoint(FAMILY, "dequantized", seed=seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return [_continue(model, list(prompt)) for prompt in PROMPTS]

    return answers


@torch.no_grad()
def _continue(model: Any, ids: list[int]) -> list[int]:
    start = len(ids)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


@pytest.fixture(scope="module")
def want(reference) -> list[list[int]]:
    return reference()


# What the servers of tests/serving do not go through.
@pytest.mark.parametrize(
    ("layout", "load_format"), [("modelopt", "auto"), ("csf", "csf"), ("compressed-tensors", "csf")]
)
def test_layouts_and_loaders(checkpoint, engine, want, layout: str, load_format: str) -> None:
    llm = engine(checkpoint(FAMILY, layout), quantization="csf_nvfp4", load_format=load_format)
    assert tokens(llm) == want


def test_container_is_claimed_by_its_place(checkpoint, engine, want) -> None:
    assert tokens(engine(checkpoint(FAMILY, "container"), load_format="csf")) == want


def test_tuning_is_asked_for_by_the_flag(checkpoint, engine, want, monkeypatch) -> None:
    """What `vllm serve` makes of the flag reaches the layers; where nothing is compiled, nothing is tuned."""
    budgets = []
    monkeypatch.setattr(stock, "Ledger", lambda *given: budgets.append(given[2]) or Ledger(*given))
    given = flag.arguments({"tuning": {"seconds": 5}})
    llm = engine(checkpoint(FAMILY, "csf"), quantization="csf_nvfp4", quantization_config=given)
    assert tokens(llm) == want
    assert budgets == [Budget(seconds=5.0)]


def test_compiled(checkpoint, engine, want) -> None:
    assert tokens(engine(checkpoint(FAMILY, "csf"), enforce_eager=False)) == want


@pytest.mark.parametrize(("layout", "load_format"), [("csf", "auto"), ("modelopt", "csf")])
def test_reload(checkpoint, engine, reference, layout: str, load_format: str) -> None:
    """The same weights, others with other exceptions, and the first again."""
    first, other = (checkpoint(FAMILY, layout, seed=seed) for seed in (0, 1))
    llm = engine(first, quantization="csf_nvfp4", load_format=load_format)
    llm.collective_rpc("reload_weights")
    assert tokens(llm) == reference(0)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    assert tokens(llm) == reference(1) != reference(0)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(first)})
    assert tokens(llm) == reference(0)


def test_dummy_weights_start_and_make_way_for_real_ones(checkpoint, engine, want) -> None:
    room = {"csf_exception_room": 0.2}
    llm = engine(checkpoint(FAMILY, "csf"), load_format="dummy", additional_config=room)
    assert tokens(llm) != want
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")
    assert tokens(llm) == want


def test_made_up_weights_are_those_of_a_checkpoint_that_stores_them(engine, tmp_path: Path) -> None:
    """The same tokens, whether they are read or made; each engine reloads its own, too."""
    from safetensors.torch import save_file
    from vllm_csf.loaders import example, made_up

    bare = example.make_example(tmp_path / "bare", "glm4-moe", weights=False)
    stored = example.make_example(tmp_path / "stored", "glm4-moe", weights=False)
    made = dict(made_up.tensors(json.loads((stored / "config.json").read_text())))
    save_file(made, stored / "model.safetensors")
    llm = engine(bare, quantization="csf_nvfp4", load_format="csf_made_up")
    want = tokens(engine(stored, quantization="csf_nvfp4"))
    assert tokens(llm) == want
    llm.collective_rpc("reload_weights")
    assert tokens(llm) == want


def test_one_line_says_what_was_saved(checkpoint, engine) -> None:
    lines = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.csf")
    logger.addFilter(note)  # vLLM drops handlers when an engine starts, and keeps filters
    try:
        engine(checkpoint(FAMILY, "csf")).collective_rpc("reload_weights")
    finally:
        logger.removeFilter(note)
    (line,) = lines
    assert line.startswith("csf_nvfp4: ")
    assert "execution reference" in line


def test_unknown_execution_is_refused(checkpoint, engine) -> None:
    with pytest.raises(Exception, match="csf_execution is 'magic' on cpu"):
        engine(checkpoint(FAMILY, "csf"), additional_config={"csf_execution": "magic"})


def test_missing_stream_is_named(checkpoint, engine, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    lost = 0
    for path in checkpoint(FAMILY, "csf").iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            name = "model.layers.1.mlp.experts.2.up_proj.weight_scale.nvfp4_csf_exceptions"
            lost += tensors.pop(name, None) is not None
            save_file(tensors, broken / path.name)
        else:
            (broken / path.name).symlink_to(path)
    assert lost == 1
    with pytest.raises(
        Exception, match=r"layers\.1\.mlp\.experts \(local expert 2\)\.up_proj: has the fixed stream"
    ):
        engine(broken)
