"""The order of windows, what a record holds when, and what failures leave; with servers that are made up."""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_csf.bench import records, serve_report, serving
from vllm_csf.bench.records import BenchError
from vllm_csf.bench.server import ServerError
from vllm_csf.bench.serving import MTP, OFF, Load, Wanted
from vllm_csf.bench.subjects import Subject

LOADS = (Load(64, 8, 1), Load(64, 8, 4))
ARMS = tuple(Subject(name, f"/models/{name}") for name in ("stock", "native", "csf"))
SPEED = {"stock": 1.0, "native": 2.0, "csf": 4.0}


class World:
    """What the servers and the client do: a diary, and who is to fail when."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.up: set[str] = set()
        self.most_up = 0
        self.resident_mib: int | None = None  # of each server that is up; None: no device
        self.clock = 0.0
        self.start_takes = 0.0
        self.fails_at_start: set[str] = set()
        self.fails_in_window: dict[str, int] = {}
        self.interrupt_at: int | None = None
        self.flags: dict[str, list[str]] = {}
        self.environments: list[dict[str, str]] = []
        self.loaded = "Loading weights took"
        self.driven: list[dict[str, str]] = []


@pytest.fixture
def world(monkeypatch) -> World:
    state = World()

    class Server:
        def __init__(
            self, model: str, flags: list[str], *, log: Path, environment: dict[str, str], **_: Any
        ) -> None:
            state.environments.append(environment)
            self.model, self.name, self.url = model, Path(model).name, model
            self.steps = 0
            log.write_text("one line\n")
            state.flags[self.name] = flags

        def launch(self) -> None:
            state.diary.append(f"launch {self.name}")
            state.up.add(self.name)
            state.most_up = max(state.most_up, len(state.up))

        def wait_for_log(self, pattern: str) -> None:
            assert pattern == state.loaded
            state.diary.append(f"loaded {self.name}")

        def wait(self) -> float:
            if self.name in state.fails_at_start:
                self.stop()
                raise ServerError("vllm serve ended with 1:\nno memory")
            state.diary.append(f"ready {self.name}")
            state.clock += state.start_takes
            return 12.34

        def stop(self) -> None:
            if self.name in state.up:
                state.up.remove(self.name)
                state.diary.append(f"stop {self.name}")

        def text(self, path: str) -> str:
            self.steps += 50
            return f"vllm:iteration_tokens_total_count {self.steps}\n"

        def log_text(self) -> str:
            return "GPU KV cache size: 1,000 tokens"

        def log_tail(self) -> str:
            return "its last words"

        def peak_host_bytes(self) -> int:
            return 3 << 20

    class Client:
        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            state.diary.append("client ends")

        def run(self, flags: list[str], result: Path) -> dict[str, Any]:
            given = dict(zip(flags[::2], flags[1::2], strict=False))
            name = Path(given["--base-url"]).name
            assert name in state.up
            state.driven.append(given)
            warm = given["--seed"] == "0"
            if not warm:
                state.diary.append(f"{name} {given['--max-concurrency']}")
                if state.interrupt_at == sum(d["--seed"] != "0" for d in state.driven):
                    os.kill(os.getpid(), signal.SIGTERM)
                if state.fails_in_window.get(name) == int(given["--seed"]):
                    raise BenchError("vllm bench serve: it ended")
            tokens = SPEED[name] * 10
            return {
                "duration": 2.0,
                "completed": int(given["--num-prompts"]),
                "total_input_tokens": 64,
                "total_output_tokens": 100,
                "output_throughput": tokens,
                "median_ttft_ms": 5.0,
                "median_tpot_ms": 1.0,
            }

    monkeypatch.setattr(serving, "Server", Server)
    monkeypatch.setattr(serving, "Client", Client)
    monkeypatch.setattr(serving, "has_cuda", lambda: False)
    monkeypatch.setattr(serving, "SETTLE_SECONDS", 0)

    def used_mib() -> int | None:
        return None if state.resident_mib is None else 1000 + state.resident_mib * len(state.up)

    monkeypatch.setattr(serving.machine, "used_mib", used_mib)
    return state


def wanted(**other: Any) -> Wanted:
    return replace(Wanted("/models/m", ARMS, LOADS, rounds=2), **other)


def measure(plan: Wanted, out: Path | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {}
    serving.run(plan, record, out, lambda text: None)
    return record


def windows(world: World) -> list[str]:
    return [entry for entry in world.diary if entry[-1].isdigit()]


def test_one_by_one_arms_take_turns_and_never_meet(world):
    record = measure(wanted())
    assert world.most_up == 1
    assert windows(world) == [
        *("stock 1", "stock 4", "native 1", "native 4", "csf 1", "csf 4"),
        *("native 1", "native 4", "csf 1", "csf 4", "stock 1", "stock 4"),
    ]
    assert len(record["starts"]) == 6
    assert record["starts"][0] == {
        "round": 0,
        "speculation": OFF,
        "arm": "stock",
        "others_up": 0,
        "start_seconds": 12.3,
        "kv_tokens": 1000,
        "host_peak_mib": 3,
    }


def test_together_every_load_meets_all_arms_before_the_next(world):
    record = measure(wanted(together=True))
    assert world.most_up == 3
    assert windows(world) == [
        *("stock 1", "native 1", "csf 1", "stock 4", "native 4", "csf 4"),
        *("native 1", "csf 1", "stock 1", "native 4", "csf 4", "stock 4"),
    ]
    assert [(start["arm"], start["others_up"]) for start in record["starts"]] == [
        *(("stock", 0), ("native", 1), ("csf", 2)),
    ]


def test_together_no_server_starts_while_another_loads(world):
    world.resident_mib = 40
    record = measure(wanted(together=True, speculations=(OFF, MTP)))
    starts = [f"{what} {arm.name}" for arm in ARMS for what in ("launch", "ready")]
    stops = [f"stop {arm.name}" for arm in reversed(ARMS)]
    assert [entry for entry in world.diary if entry.split()[0] in ("launch", "ready", "stop")] == [
        *(*starts, *stops),
        *(*starts, *stops),
    ]
    for start in record["starts"]:
        assert (start["device_mib"], start["host_peak_mib"], start["start_seconds"]) == (40, 3, 12.3)


@pytest.mark.parametrize("cuda", [False, True])
def test_overlapping_a_server_starts_once_the_one_before_is_loaded(world, monkeypatch, cuda):
    monkeypatch.setattr(serving, "has_cuda", lambda: cuda)
    world.loaded = "Model loading took" if cuda else "Loading weights took"
    world.resident_mib = 40
    record = measure(wanted(together=True, overlap_starts=True))
    begun = [f"{what} {arm.name}" for arm in ARMS for what in ("launch", "loaded")]
    assert world.diary[:9] == [*begun, *(f"ready {arm.name}" for arm in ARMS)]
    assert len(record["windows"]) == 12
    for start in record["starts"]:
        assert not {"start_seconds", "device_mib"} & set(start)
        assert start["host_peak_mib"] == 3
    assert any("started overlapping" in line for line in serve_report.notes(record))


def test_overlapping_an_arm_that_does_not_start_leaves_the_rest(world):
    world.fails_at_start.add("stock")
    record = measure(wanted(together=True, overlap_starts=True))
    assert [failure["arm"] for failure in record["failures"]] == ["stock"]
    assert {row["arm"] for row in record["windows"]} == {"native", "csf"}
    assert not world.up


@pytest.mark.parametrize("uniform", [False, True])
def test_all_arms_route_alike(world, uniform):
    record = measure(wanted(uniform_routing=uniform))
    found = {environment.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") for environment in world.environments}
    assert found == {"uniform_random" if uniform else None}
    assert any("at random" in line for line in serve_report.notes(record)) == uniform


def test_vllm_knows_the_routing() -> None:
    from vllm import envs
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator

    ((variable, strategy),) = serving.UNIFORM_ROUTING.items()
    assert variable in envs.environment_variables
    assert strategy in RoutingSimulator.get_available_strategies()


def test_together_an_arm_that_does_not_start_leaves_the_rest(world):
    world.fails_at_start.add("native")
    world.resident_mib = 40
    record = measure(wanted(together=True))
    (failure,) = record["failures"]
    assert (failure["arm"], failure["others_up"]) == ("native", 1)
    assert [(s["arm"], s["others_up"], s["device_mib"]) for s in record["starts"]] == [
        *(("stock", 0, 40), ("csf", 1, 40)),
    ]
    assert {row["arm"] for row in record["windows"]} == {"stock", "csf"}


def test_a_server_that_dies_as_it_is_ready_did_not_start(world, monkeypatch):
    def gone(*_: Any) -> None:
        raise ServerError("/metrics: connection refused")

    monkeypatch.setattr(serving._Session, "_facts", gone)
    record = measure(wanted(together=True))
    assert [failure["arm"] for failure in record["failures"]] == ["stock", "native", "csf"]
    assert not record["starts"]
    assert not world.up


def test_together_no_server_starts_when_time_is_up(world, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: world.clock, sleep=lambda s: None)
    monkeypatch.setattr(serving, "time", clock)
    world.start_takes = 60.0
    plan = wanted(together=True, duration=100.0, speculations=(OFF, MTP))
    record = measure(plan)
    assert [start["arm"] for start in record["starts"]] == ["stock", "native"]
    assert [entry for entry in world.diary if entry.startswith("launch")] == ["launch stock", "launch native"]
    assert not record["windows"]
    assert not record["failures"]


def test_a_window_is_what_client_and_server_saw(world):
    row = measure(wanted(waves=3))["windows"][1]
    assert row["requests"] == 12
    assert row["output_tok_s"] == 10.0
    assert row["steps_s"] == 25.0  # 50 in 2 s
    assert row["acceptance"] is None
    assert (row["prompt"], row["output"], row["concurrency"]) == (64, 8, 4)


def test_all_arms_are_sent_the_same_and_each_window_something_else(world):
    measure(wanted(together=True))
    seeds: dict[str, list[str]] = {}
    for given in world.driven:
        seeds.setdefault(Path(given["--model"]).name, []).append(given["--seed"])
    assert seeds["stock"] == seeds["csf"] == ["0", "1", "0", "1", "2", "2"]  # 0: warm-up, once a load


def test_servers_are_sized_for_the_loads_unless_told(world):
    measure(wanted(rounds=1))
    flags = world.flags["csf"]
    assert flags[flags.index("--max-model-len") + 1] == str(64 + 8 + serving.ROOM)
    assert flags[flags.index("--max-num-seqs") + 1] == "4"
    assert "--no-enable-prefix-caching" in flags
    own = Subject(
        "csf", "/models/csf", ("--max-model-len=999", "--max-num-seqs", "7", "--enable-prefix-caching")
    )
    measure(wanted(subjects=(own,), rounds=1))
    assert world.flags["csf"] == list(own.flags)


def test_mtp_is_asked_for_with_acceptance_made_up(world):
    measure(wanted(speculations=(MTP,), synthetic_acceptance=2.4, rounds=1))
    flags = world.flags["stock"]
    assert json.loads(flags[flags.index("--speculative-config") + 1]) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.4,
    }


def test_an_arm_that_does_not_start_is_left_out(world):
    world.fails_at_start.add("native")
    record = measure(wanted())
    (failure,) = record["failures"]
    assert failure["arm"] == "native"
    assert "no memory" in failure["error"]
    assert {row["arm"] for row in record["windows"]} == {"stock", "csf"}
    assert world.diary.count("launch native") == 1
    assert not world.up


def test_a_server_that_dies_keeps_what_it_gave_and_says_why(world):
    world.fails_in_window["csf"] = 2
    record = measure(wanted(together=True))
    assert "it ended\nits last words" in record["failures"][0]["error"]
    mine = [row for row in record["windows"] if row["arm"] == "csf"]
    assert {row["round"] for row in mine} == {0}
    assert len([row for row in record["windows"] if row["arm"] == "stock"]) == 4


def test_an_unanswered_request_is_a_failure(world, monkeypatch):
    monkeypatch.setattr(serving._Session, "_drive", lambda *_, **__: {"completed": 3})
    record = measure(wanted(subjects=ARMS[:1], rounds=1))
    assert "3 of 4 requests were answered" in record["failures"][0]["error"]


@pytest.mark.parametrize("together", [False, True])
def test_interrupted_it_stops_all_servers_and_keeps_the_record(world, tmp_path, together):
    world.interrupt_at = 4
    out = tmp_path / "record.json"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        measure(wanted(together=together), out)
    assert not world.up
    assert world.diary[-1] == "client ends"
    assert len(records.read(out, "serve")["windows"]) == 3
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("together", [False, True])
def test_when_time_is_up_no_window_begins(world, monkeypatch, together):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    record = measure(wanted(together=together, rounds=1000, duration=95.0))
    assert 0 < len(record["windows"]) < 10
    assert not record["failures"]
    assert not world.up


def test_the_report_compares_within_rounds(world):
    record = measure(wanted(together=True, rounds=3))
    text = serve_report.text(record)
    assert "started one after the other" in text
    starts = next(rows for title, _, rows in serve_report.tables(record) if title == "Starts")
    assert [row[1:4] for row in starts] == [
        ["stock", "0", "12.3"],
        ["native", "1", "12.3"],
        ["csf", "2", "12.3"],
    ]
    assert "4.000 (4.000 to 4.000)" in text  # csf / stock
    assert "2.000 (2.000 to 2.000)" in text
    page = serve_report.html(record)
    assert page.count("<table>") >= 4
    assert "http-equiv" not in page
    assert "src=" not in page


def test_two_records_are_compared_by_case(world):
    old = measure(wanted(rounds=3))
    new = json.loads(json.dumps(old))
    for row in new["windows"]:
        if row["arm"] == "csf":
            row["output_tok_s"] *= 1.5
    new["commit"] = "other"
    said = serve_report.comparison(old, new)
    assert "Different commit: unknown and other" in said
    line = next(x for x in said.splitlines() if "| csf " in x)
    assert "1.500 (1.500 to 1.500)" in line
    old["windows"] = []
    assert "no case in common" in serve_report.comparison(old, new)
