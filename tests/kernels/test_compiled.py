"""Programs compiled, cached, shared between processes, and given back."""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from vllm_csf.kernels.activation import SILU, Activation

pytest.importorskip("cutlass")

import tiny_program
from tiny_program import tiny
from vllm_csf.kernels.compiled import build, cache, objects, workers
from vllm_csf.kernels.compiled.build import Build, ProgramSet, UndeclaredProgramError
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.compiled.objects import LoadedObject, compile_object
from vllm_csf.kernels.compiled.program import CompileError, Program
from vllm_csf.kernels.moe import programs


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Workers know that they are none of this process; nothing that another test loaded is there."""
    monkeypatch.setenv("CSF_TINY_PARENT", str(os.getpid()))
    gc.collect()
    build.reclaim()


@pytest.fixture(scope="module")
def tiny_object() -> bytes:
    return compile_object(tiny(1))


def test_a_program_survives_the_way_to_a_worker():
    g = programs.Geometry(8, 8, 256, 128, 2, Activation("silu", limit=7.0), True, True, "sm_90a", 132)
    for choice in programs.choices(g):
        program = programs.declared(g, choice)
        assert Program.from_json(program.to_json()) == program
        assert Program.from_json(program.to_json()).config.activation == g.activation


def test_multiprocessors_and_token_counts_do_not_make_another_program():
    g = programs.Geometry(8, 8, 4096, 1536, 2, SILU, False, False, "sm_90a", 132)
    other = dataclasses.replace(g, multiprocessors=78, experts=16, global_experts=16)
    assert [programs.declared(g, c) for c in programs.choices(g)] == [
        programs.declared(other, c) for c in programs.choices(other)
    ]


def test_every_field_is_part_of_the_key(tmp_path):
    kept = ProgramCache(tmp_path)
    first = tiny(1)
    others = [
        tiny(2),
        dataclasses.replace(first, arch="sm_100a"),
        dataclasses.replace(first, kind=dataclasses.replace(first.kind, name="other")),
        dataclasses.replace(first, config=dataclasses.replace(first.config, activation=Activation("gelu"))),
    ]
    assert len({kept.key(p) for p in (first, *others)}) == 5
    assert kept.key(first) == ProgramCache(tmp_path / "elsewhere").key(tiny(1))


def test_sources_versions_and_switches_are_part_of_the_key(tmp_path, monkeypatch):
    def environment() -> str:
        cache.environment.cache_clear()
        return cache.environment()

    found = {environment()}
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    found.add(environment())
    monkeypatch.setattr(cache, "_version", lambda name: "9.9")
    found.add(environment())
    monkeypatch.setattr(cache, "_cuda_flavour", lambda: "12.9")
    found.add(environment())
    monkeypatch.setattr(cache, "_host", lambda: "x86-64-v1")
    found.add(environment())
    monkeypatch.setattr(cache, "_hash_of_sources", lambda folder: "other")
    found.add(environment())
    assert len(found) == 6
    cache.environment.cache_clear()
    (tmp_path / "a.py").write_text("1")
    monkeypatch.undo()
    before = cache._hash_of_sources(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert cache._hash_of_sources(tmp_path) != before


def test_kept_and_found(tmp_path, tiny_object):
    kept = ProgramCache(tmp_path / "new" / "folder")
    assert kept.find(tiny(1)) is None
    kept.store(tiny(1), tiny_object)
    assert ProgramCache(kept.folder).find(tiny(1)) == tiny_object
    assert kept.find(tiny(2)) is None
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in kept.folder.iterdir()] == [".program"]


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.parametrize("damage", [_truncate, _flip, lambda data: b"", lambda data: b"no entry at all"])
def test_damaged_entries_are_made_anew(tmp_path, tiny_object, caplog, damage):
    kept = ProgramCache(tmp_path)
    kept.store(tiny(1), tiny_object)
    path = kept.path(tiny(1))
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "vllm.csf"):
        assert kept.find(tiny(1)) is None
    assert "is damaged" in caplog.text
    ready = Build([tiny(1)], kept)
    assert callable(ready.finish()[tiny(1)])
    assert ready.account.compiled == 1
    assert ProgramCache(tmp_path).find(tiny(1)) is not None


def test_an_entry_under_another_name_is_refused(tmp_path, tiny_object):
    kept = ProgramCache(tmp_path)
    kept.store(tiny(1), tiny_object)
    kept.path(tiny(1)).rename(kept.path(tiny(2)))
    assert kept.find(tiny(2)) is None


def test_a_whole_entry_that_does_not_load_is_made_anew(tmp_path):
    kept = ProgramCache(tmp_path)
    kept.store(tiny(1), b"not an object")
    ready = Build([tiny(1)], kept)
    assert callable(ready.finish()[tiny(1)])
    assert ready.account.compiled == 1
    assert callable(LoadedObject(kept.find(tiny(1))).function)


def test_without_a_writable_folder_it_works_and_says_so_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    kept = ProgramCache(tmp_path / "file" / "programs")
    with caplog.at_level(logging.WARNING, "vllm.csf"):
        ready = Build([tiny(1), tiny(2)], kept, workers=0).finish()
    assert callable(ready[tiny(1)])
    assert callable(ready[tiny(2)])
    assert len([r for r in caplog.records if "not kept" in r.message]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_second_start_compiles_nothing(tmp_path, monkeypatch):
    wanted = [tiny(n, tmp_path / "count") for n in (1, 2, 3)]
    ready = Build(wanted, ProgramCache(tmp_path / "cache"))
    ready.start()
    held = ready.finish()
    assert ready.account.compiled == 3
    assert (tmp_path / "count").read_bytes() == b"xxx"
    del held
    gc.collect()
    assert build.reclaim() == 3
    monkeypatch.setattr(build, "compile_in_workers", None)
    monkeypatch.setattr(build, "compile_object", None)
    again = Build(wanted, ProgramCache(tmp_path / "cache"))
    held = again.finish()
    assert (again.account.compiled, again.account.from_cache) == (0, 3)
    third = Build(wanted, ProgramCache(tmp_path / "cache"))
    assert third.finish()[wanted[0]] is held[wanted[0]]
    assert third.account.in_process == 3


def test_one_program_needs_no_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compile_in_workers", None)
    assert callable(Build([tiny(1)], ProgramCache(tmp_path)).finish()[tiny(1)])


@pytest.mark.parametrize("count", [1, 2])
def test_errors_name_the_program(tmp_path, count):
    wanted = [tiny(7, trouble="error"), tiny(8, trouble="error")][:count]
    ready = Build(wanted, ProgramCache(tmp_path))
    ready.start()
    with pytest.raises(
        CompileError, match=r"tiny\(constant=[78], trouble='error'\) for sm_90a: ValueError: no"
    ):
        ready.finish()


def test_killed_workers_are_reported_and_made_up_for(tmp_path, caplog):
    wanted = [tiny(1, trouble="kill"), tiny(2, trouble="kill"), tiny(3)]
    with caplog.at_level(logging.WARNING, "vllm.csf"):
        ready = Build(wanted, ProgramCache(tmp_path)).finish()
    assert all(callable(ready[program]) for program in wanted)
    assert "tiny(constant=1, trouble='kill') for sm_90a: its worker ended with status -9" in caplog.text


def test_a_worker_that_cannot_start_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(workers, "COMMAND", ("-c", "import sys; sys.exit('nothing here')"))
    with caplog.at_level(logging.WARNING, "vllm.csf"):
        ready = Build([tiny(1), tiny(2)], ProgramCache(tmp_path)).finish()
    assert callable(ready[tiny(2)])
    assert "status 1: nothing here" in caplog.text


def test_optional_programs_that_do_not_compile_are_done_without(tmp_path, caplog):
    broken = [tiny(7, trouble="error"), tiny(8, trouble="error")]
    with caplog.at_level(logging.WARNING, "vllm.csf"):
        wanted = Build([broken[0], tiny(1), broken[1]], ProgramCache(tmp_path), optional=True)
        wanted.start()
        there = wanted.take(120)
    assert there.programs == {tiny(1)}
    assert callable(there[tiny(1)])
    assert [record.getMessage().count("done without: tiny(constant=") for record in caplog.records] == [1, 1]
    assert ProgramCache(tmp_path).find(tiny(1)) is not None


def test_optional_programs_that_take_too_long_are_not_waited_for(tmp_path, monkeypatch, tiny_object):
    """What is there by then is taken; nothing is begun afterwards."""
    here, ended = threading.Event(), threading.Event()

    def slow(programs, done, most, failed, stop):
        done(tiny(1), tiny_object)
        here.set()
        assert stop.wait(60)
        ended.set()
        return [tiny(2)]

    monkeypatch.setattr(build, "compile_in_workers", slow)
    wanted = Build([tiny(1), tiny(2)], ProgramCache(tmp_path), optional=True)
    wanted.start()
    assert here.wait(60)
    assert wanted.take(0.0).programs == {tiny(1)}
    assert ended.wait(60)


def test_a_build_begins_when_the_one_before_has_compiled(tmp_path, monkeypatch, tiny_object):
    order = []

    def note(programs, done, *rest):
        order.append(programs)
        time.sleep(0.1)
        for program in programs:
            done(program, tiny_object)
        return []

    monkeypatch.setattr(build, "compile_in_workers", note)
    first = Build([tiny(1)], ProgramCache(tmp_path))
    second = Build([tiny(2)], ProgramCache(tmp_path), optional=True)
    first.start()
    second.start(after=first)
    assert second.take(60).programs == {tiny(2)}
    assert order == [[tiny(1)], [tiny(2)]]


def _build_in_daemon(folder: str, count: str, barrier, results) -> None:
    barrier.wait()
    ready = Build([tiny(n, count) for n in (1, 2)], ProgramCache(folder))
    ready.finish()
    results.put(ready.account.compiled)


@pytest.mark.slow
def test_processes_that_start_at_once_share_the_work(tmp_path):
    """Daemonic ones, as vLLM's workers are: `multiprocessing` lets those have no children."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(3), spawn.Queue()
    arguments = (str(tmp_path / "cache"), str(tmp_path / "count"), barrier, results)
    started = [spawn.Process(target=_build_in_daemon, args=arguments, daemon=True) for _ in range(3)]
    for process in started:
        process.start()
    compiled = [results.get(timeout=120) for _ in started]
    for process in started:
        process.join()
    assert sum(compiled) == 2
    assert (tmp_path / "count").read_bytes() == b"xx"


def test_killed_in_the_middle_then_a_clean_start(tmp_path):
    script = (
        "import sys, time; from tiny_program import tiny\n"
        "from vllm_csf.kernels.compiled.build import Build\n"
        "from vllm_csf.kernels.compiled.cache import ProgramCache\n"
        "cache = ProgramCache(sys.argv[1])\n"
        "with cache.lock(tiny(1), wait=False) as mine:\n"
        "    print(mine, flush=True)\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tiny_program.FOLDER)},
    )
    assert holder.stdout.readline() == "True\n"
    ready = Build([tiny(1)], ProgramCache(tmp_path))
    ready.start()
    time.sleep(0.5)
    assert ready._thread.is_alive()
    assert ProgramCache(tmp_path).find(tiny(1)) is None
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert callable(ready.finish()[tiny(1)])
    assert ready.account.compiled == 1


def test_undeclared_programs_are_refused_by_name(tmp_path, tiny_object):
    kept = ProgramCache(tmp_path)
    kept.store(tiny(1), tiny_object)
    ready = Build([tiny(1)], kept, owner="the plan of a test").finish()
    with pytest.raises(UndeclaredProgramError, match=r"tiny\(constant=2\) for sm_90a .* the plan of a test"):
        ready[tiny(2)]


def test_nothing_is_left_of_many_engines(tmp_path, tiny_object):
    kept = ProgramCache(tmp_path)
    for n in range(20):
        kept.store(tiny(n), tiny_object)
    held = None
    for n in range(20):
        held = None  # the engine before is gone
        assert build.reclaim() == (2 if n else 0)
        held = Build([tiny(n), tiny((n + 1) % 20)], kept).finish()
        assert build.loaded() == 2
        assert len(held.programs) == 2
    held = None
    gc.collect()
    assert build.reclaim() == 2
    assert build.loaded() == 0
    assert not [holder for holder in build._holders if holder.programs]


def test_reclaimed_programs_give_their_device_code_back(tmp_path, tiny_object, monkeypatch):
    """Each once, by the destructor that its object has; without a GPU that finds nothing to do."""
    unloaded = []
    unload = LoadedObject.unload
    monkeypatch.setattr(LoadedObject, "unload", lambda self: unloaded.append(self) or unload(self))
    kept = ProgramCache(tmp_path)
    for n in range(3):
        kept.store(tiny(n), tiny_object)
    held, other = Build([tiny(0), tiny(1)], kept).finish(), Build([tiny(1), tiny(2)], kept).finish()
    assert build.reclaim() == 0
    del held
    assert build.reclaim() == 1
    assert len(unloaded) == 1
    del other
    assert build.reclaim() == 2
    assert len({id(one) for one in unloaded}) == 3
    assert build.reclaim() == 0
    assert len(unloaded) == 3


def test_an_object_without_its_destructor_is_said_once(tiny_object, monkeypatch, caplog):
    """Of a compiler that names it otherwise: it serves, and its device code stays."""
    assert LoadedObject(tiny_object)._unload is not None
    monkeypatch.setattr(objects, "_EXPORTED_UNLOAD", "of_another_compiler")
    objects._warn_of_code_that_stays.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.csf"):
        for _ in range(2):
            without = LoadedObject(tiny_object)
            assert callable(without.function)
            without.unload()
    assert caplog.text.count("their device code stays loaded") == 1


def test_what_somebody_holds_stays_loaded(tiny_object):
    holder = ProgramSet({tiny(1): LoadedObject(tiny_object).function})
    build._loaded[tiny(1)] = holder[tiny(1)]
    build.reclaim()
    assert build.loaded() == 1
    del holder
    gc.collect()
    assert build.reclaim() == 1


def test_default_folder_follows_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert ProgramCache().folder == Path("/somewhere/vllm-csf/programs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ProgramCache().folder == Path("~/.cache/vllm-csf/programs").expanduser()
