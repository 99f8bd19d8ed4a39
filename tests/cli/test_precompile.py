"""`vllm-csf precompile`: the programs that a server will ask for, from the checkpoint alone."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from vllm_csf.kernels.activation import SILU
from vllm_csf.kernels.compiled import build
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.compiled.program import CompileError
from vllm_csf.loaders.checkpoint import open_checkpoint

from vllm_csf.cli import main, parser
from vllm_csf.cli.precompile import plans_of
from vllm_csf.planning import LayerFacts, Limits, geometry_of, make_plan
from vllm_csf.tuning import candidate_programs

EXPERTS, HIDDEN, WIDTH, TOPK = 8, 128, 192, 3


@pytest.fixture(autouse=True)
def _fresh():
    """Nothing that another test loaded is taken for compiled."""
    gc.collect()
    build.reclaim()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("precompile") / "model"
    sizes = {"--experts": EXPERTS, "--hidden": HIDDEN, "--width": WIDTH, "--topk": TOPK, "--layers": 2}
    flags = [str(word) for pair in sizes.items() for word in pair]
    assert main(["make-example", str(out), "--family", "glm4-moe", "--layout", "csf", *flags]) == 0
    return out


def arguments(folder: Path, *flags: str) -> argparse.Namespace:
    return parser().parse_args(["precompile", str(folder), *flags])


def plans(folder: Path, *flags: str):
    with open_checkpoint(folder) as checkpoint:
        return plans_of(checkpoint, arguments(folder, *flags))


def facts(**changes) -> LayerFacts:
    fields = {
        "experts": EXPERTS, "global_experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH, "topk": TOPK,
        "activation": SILU, "mapped": False,
    }  # fmt: skip
    return LayerFacts(**(fields | changes))


@pytest.mark.parametrize(
    ("flags", "rank"),
    [
        ((), facts()),
        (("-tp", "2"), facts(width=96)),
        (("-tp", "4"), facts(width=64)),
        (("-tp", "2", "-ep"), facts(experts=4, mapped=True)),
        (("-tp", "3", "--enable-expert-parallel"), facts(experts=3, mapped=True)),
        (("-ep",), facts()),
    ],
)
def test_ranks_get_the_programs_of_their_part(folder, flags, rank):
    (plan,) = plans(folder, *flags)
    assert plan == make_plan(geometry_of(rank, "sm_90a", 132), Limits(8192))


def test_every_architecture_gets_its_own(folder):
    found = plans(folder, "--arch", "sm_90a", "sm_100a", "--max-num-batched-tokens", "1")
    assert [plan.geometry.arch for plan in found] == ["sm_90a", "sm_100a"]
    assert len({program for plan in found for program in plan.programs()}) == 4


def test_a_full_cache_leaves_nothing_to_do(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "kernels"))
    from tiny_program import tiny
    from vllm_csf.kernels.compiled.objects import compile_object

    data, kept = compile_object(tiny(1)), ProgramCache(tmp_path)
    for plan in plans(folder, "--max-num-batched-tokens", "1"):
        for program in (*plan.preparation, *plan.programs()):
            kept.store(program, data)
    flags = ["--max-num-batched-tokens", "1", "--cache-dir", str(tmp_path)]
    assert main(["precompile", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    assert "plan 1 of 8 experts of 8, H 128, I 192, top 3, up to 1 tokens, on sm_90a" in out
    assert out.endswith(f"0 programs compiled in 0.0 s, 4 were there, in {tmp_path}\n")


def test_candidates_are_compiled_where_they_are_asked_for(folder, tmp_path, monkeypatch, capsys):
    """For both types of routing ids; one that does not compile is done without."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "kernels"))
    from tiny_program import tiny
    from vllm_csf.kernels.compiled.objects import compile_object

    data, kept = compile_object(tiny(1)), ProgramCache(tmp_path)
    (plan,) = plans(folder, "--max-num-batched-tokens", "1")
    own = [*plan.preparation, *plan.programs()]
    others = candidate_programs(plan, (False, True))
    assert len(others) >= 4
    assert not set(own) & set(others)
    for program in (*own, *others[1:]):
        kept.store(program, data)

    def refuse(program):
        raise CompileError(f"{program.name}: no")

    monkeypatch.setattr(build, "compile_object", refuse)
    flags = ["--max-num-batched-tokens", "1", "--cache-dir", str(tmp_path), "--quiet", "--tuning"]
    assert main(["precompile", str(folder), *flags]) == 0
    there = len(own) + len(others) - 1
    assert capsys.readouterr().out == f"0 programs compiled in 0.0 s, {there} were there, in {tmp_path}\n"


@pytest.mark.slow
def test_a_start_after_it_compiles_nothing(folder, tmp_path, monkeypatch, capsys):
    flags = ["--max-num-batched-tokens", "1", "--cache-dir", str(tmp_path), "--quiet"]
    assert main(["precompile", str(folder), *flags]) == 0
    assert capsys.readouterr().out.startswith("4 programs compiled in ")
    from vllm_csf.startup import Startup

    build.reclaim()
    monkeypatch.setattr(build, "compile_in_workers", None)
    monkeypatch.setattr(build, "compile_object", None)
    startup = Startup()
    plan = make_plan(geometry_of(facts(), "sm_90a", 78), Limits(1))
    startup.declare(plan, ProgramCache(tmp_path)).packer()
    account = startup.finish()
    assert (account.compiled, account.from_cache) == (0, 4)


def test_what_is_missing_is_named(folder, tmp_path, capsys):
    import json

    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    del config["num_experts_per_tok"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["precompile", str(tmp_path)]) == 1
    assert "config.json has none of num_experts_per_tok" in capsys.readouterr().err
    (plan,) = plans(tmp_path, "--topk", "3")
    assert plan == plans(folder)[0]
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert main(["precompile", str(tmp_path), "--topk", "3"]) == 1
    assert "has no kernels" in capsys.readouterr().err


def test_more_experts_a_token_than_there_are_is_refused(folder, capsys):
    assert main(["precompile", str(folder), "--topk", "100"]) == 1
    assert "100 experts a token, expected at most 8" in capsys.readouterr().err


def test_a_cache_that_is_a_file_is_refused(folder, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["precompile", str(folder), "--cache-dir", str(tmp_path / "file")]) == 1
    assert "file, a file; expected a folder" in capsys.readouterr().err


def test_wrong_usage_exits_with_two(folder):
    with pytest.raises(SystemExit, match="2"):
        main(["precompile", str(folder), "-tp", "0"])


@pytest.mark.slow
def test_a_compilation_that_was_killed_leaves_nothing_in_the_way(folder, tmp_path):
    """kill -9 for the command and its workers while a program is compiled; the next one starts clean."""
    flags = ["--cache-dir", str(tmp_path), "--max-num-batched-tokens", "1", "--quiet"]
    command = [sys.executable, "-m", "vllm_csf.cli", "precompile", str(folder), *flags]
    killed = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.lock")):  # taken by whoever compiles
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    assert not list(tmp_path.glob("*.program"))
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "4 programs compiled" in again.stdout
    cache = ProgramCache(tmp_path)
    wanted = [p for plan in plans(folder, *flags) for p in (*plan.preparation, *plan.programs())]
    assert len(wanted) == 4
    assert all(cache.find(program) for program in wanted)
