"""The order of starts, whose caches they have, and what a record says; with servers that are made up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_csf import cli
from vllm_csf.bench import records, server, starting
from vllm_csf.bench.server import ServerError
from vllm_csf.bench.starting import Wanted
from vllm_csf.bench.subjects import Subject

ARMS = tuple(Subject(name, f"/models/{name}") for name in ("stock", "csf"))
LOG = (
    "csf_nvfp4: programs: {} compiled in 1.0 s, {} from cache, 0 already loaded; "
    "the start waited 2.50 s for them\n"
)


class World:
    """Starts take longer on empty caches, which they fill; `answers` and `fails` are by arm."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, str]] = []  # arm, caches' folder
        self.up = 0
        self.most_up: list[int] = []
        self.filled: set[str] = set()
        self.answers: dict[str, list[str]] = {}
        self.fails: set[str] = set()
        self.log = "no memory"
        self.interrupted = False
        self.flags: list[Sequence[str]] = []
        self.diary: list[str] = []


@pytest.fixture
def world(monkeypatch) -> World:
    state = World()

    class Server:
        def __init__(
            self, model: str, flags: list[str], *, environment: dict[str, str], log: Path, **_: Any
        ) -> None:
            self.name, self.folder, self.log = Path(model).name, environment["XDG_CACHE_HOME"], log
            assert Path(self.folder).is_dir()
            state.flags.append(flags)

        def launch(self) -> None:
            state.launched.append((self.name, self.folder))
            state.up += 1
            self.running = True
            state.most_up.append(state.up)
            self.cold = self.folder not in state.filled

        def poll(self) -> float:
            state.diary.append("poll")
            if self.name in state.fails:
                raise ServerError(f"vllm serve ended with 1:\n{state.log}")
            state.filled.add(self.folder)
            return 50.0 + 40.0 * self.cold + 5.0 * (self.name == "csf")

        def stop(self) -> None:
            state.up -= self.running
            self.running = False

        def complete(self, prompt: list[int], tokens: int, **_: Any) -> dict[str, str]:
            state.diary.append("ask")
            if state.interrupted and self.name == "csf":
                raise KeyboardInterrupt
            said = state.answers.get(self.name)
            return {"text": said.pop(0) if said else "the same"}

        def log_text(self) -> str:
            return LOG.format(*((20, 0) if self.cold else (0, 20))) if self.name == "csf" else ""

        def peak_host_bytes(self) -> int:
            return 3 << 20

    monkeypatch.setattr(starting, "Server", Server)
    monkeypatch.setattr(starting, "has_cuda", lambda: False)
    return state


def measure(out: Path | None = None, **other: Any) -> dict[str, Any]:
    record: dict[str, Any] = {}
    starting.run(replace(Wanted("/models/m", ARMS, rounds=2), **other), record, out, lambda text: None)
    return record


def test_each_arm_starts_twice_on_caches_of_its_own(world, tmp_path):
    record = measure(tmp_path / "starts.json")
    assert [name for name, _ in world.launched] == [
        "stock",
        "stock",
        "csf",
        "csf",
        "csf",
        "csf",
        "stock",
        "stock",
    ]
    folders = [folder for _, folder in world.launched]
    assert folders[::2] == folders[1::2]
    assert len(set(folders)) == 4
    assert not any(Path(folder).exists() for folder in folders)
    assert set(world.most_up) == {1}
    assert [start["caches"] for start in record["starts"]] == ["empty", "filled"] * 4
    assert records.read(tmp_path / "starts.json", "starts") == record | {
        "settings": record["settings"]
        | {"arms": {n: a | {"flags": list(a["flags"])} for n, a in record["settings"]["arms"].items()}}
    }


def test_several_at_once_are_up_together_on_empty_caches(world):
    record = measure(rounds=1, at_once=3)
    assert max(world.most_up) == 3
    together = world.launched[-3:]
    assert [name for name, _ in together] == ["csf"] * 3
    assert len({folder for _, folder in together}) == 1
    assert together[0][1] not in [folder for _, folder in world.launched[:-3]]
    assert [(s["at_once"], s["server"]) for s in record["starts"][-3:]] == [(3, 0), (3, 1), (3, 2)]
    assert world.diary[-6:] == ["poll"] * 3 + ["ask"] * 3


SLOW_OR_NOT = """
import http.server, os, sys, time
log = os.readlink("/proc/self/fd/1")
if log.endswith("2-1.log"):
    sys.exit("ValueError: no memory")
time.sleep(4 * log.endswith("3-0.log"))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.do_GET()
        self.wfile.write(b'{"choices": [{"text": "the same"}]}')
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def real(monkeypatch, tmp_path):
    """Processes that take the place of `vllm serve`."""
    script = tmp_path / "vllm.py"
    script.write_text(SLOW_OR_NOT)
    monkeypatch.setattr(server, "vllm_command", lambda: [sys.executable, str(script)])
    monkeypatch.setattr(starting, "has_cuda", lambda: False)


def test_each_of_several_has_its_own_time(real, tmp_path):
    record = measure(tmp_path / "starts.json", subjects=ARMS[1:], rounds=1, at_once=3)
    assert not record["failures"]
    slow, *others = (start["start_seconds"] for start in record["starts"][-3:])
    assert slow > 4
    assert max(others) < slow - 1
    assert all(start["answer"] == "the same" for start in record["starts"])


def test_one_of_several_that_fails_leaves_the_others(real, tmp_path):
    record = measure(tmp_path / "starts.json", subjects=ARMS[1:], rounds=1, at_once=2)
    assert [(f["at_once"], f["server"]) for f in record["failures"]] == [(2, 1)]
    assert [(s["at_once"], s["server"]) for s in record["starts"]] == [(1, 0), (1, 0), (2, 0)]
    assert (
        "Failed: round 0, csf, empty caches, 2 at once, server 1: "
        "vllm serve ended with 1: ValueError: no memory\n"
    ) in starting.text(record)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("", ""),
        ("/health: HTTP 500: no\nlast", "/health: HTTP 500: no"),
        (
            "not ready after 9 s:\nfirst error: OSError: a\n\nlast",
            "not ready after 9 s: first error: OSError: a",
        ),
        ("not ready after 9 s:\nfirst\nlast\n", "not ready after 9 s: last"),
    ],
)
def test_a_failure_is_told_with_its_cause(world, error, cause):
    record = measure(duration=1e-9)
    record["failures"] = [{"round": 1, "arm": "csf", "caches": "empty", "at_once": 1, "error": error}]
    assert starting.text(record).endswith(f"\n\nFailed: round 1, csf, empty caches: {cause}\n")


def test_a_long_log_does_not_push_the_cause_out_of_the_record(world):
    world.fails, world.log = {"csf"}, "first error: OSError: a\n" + "x" * 5000 + " the end"
    (failure,) = measure(rounds=1)["failures"]
    assert failure["error"].startswith("vllm serve ended with 1:\nfirst error: OSError: a\n")
    assert failure["error"].endswith(" the end")
    assert len(failure["error"]) < 4100


def test_the_table_tells_programs_and_the_difference_to_stock(world):
    record = measure()
    assert record["starts"][2] | {"answer": ""} == {
        "round": 0,
        "arm": "csf",
        "caches": "empty",
        "at_once": 1,
        "server": 0,
        "start_seconds": 95.0,
        "answer_seconds": 0.0,
        "answer": "",
        "host_peak_mib": 3,
        "plugin": [LOG.format(20, 0).strip()],
        "compiled": 20,
        "from_cache": 0,
        "waited_seconds": 2.5,
    }
    said = starting.text(record)
    assert "csf - stock, empty caches: +5.0 s.\n" in said
    assert "csf - stock, filled caches: +5.0 s.\n" in said
    assert starting.different_answers(record) == []


def test_a_difference_of_single_starts_is_marked(world):
    assert "csf - stock, empty caches: +5.0 s, one start each.\n" in starting.text(measure(rounds=1))


def test_starts_that_answer_differently_are_told(world):
    world.answers["csf"] = ["one", "two"]
    record = measure(rounds=1)
    assert starting.different_answers(record) == ["csf"]
    assert "csf: the answers of its starts differ." in starting.text(record)


def test_an_arm_that_fails_leaves_the_others(world):
    world.fails = {"stock"}
    record = measure(rounds=1)
    assert [f["arm"] for f in record["failures"]] == ["stock"]
    assert [s["arm"] for s in record["starts"]] == ["csf", "csf"]
    assert world.up == 0
    said = "Failed: round 0, stock, empty caches: vllm serve ended with 1: no memory\n"
    assert said in starting.text(record)


def test_nothing_starts_when_the_time_is_over(world):
    record = measure(duration=1e-9)
    assert not world.launched
    assert "No server came up." in starting.text(record)


def test_mtp_is_asked_for(world):
    measure(rounds=1, speculation="mtp", speculative_tokens=2)
    assert all('"num_speculative_tokens": 2' in flags[-1] for flags in world.flags)


def test_downloads_stay_where_they_are(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/cache")
    found = starting.own_caches(tmp_path)
    assert "TVM_FFI_CACHE_DIR" in found
    assert found.pop("HF_HOME") == "/home/cache/huggingface"
    assert all(value.startswith(str(tmp_path)) for value in found.values())


UNUSED = ["--out", "record.json", "--duration", "1e-9"]


@pytest.fixture
def start(monkeypatch, checkpoint, tmp_path):
    """`bench starts` of a small checkpoint on a device, in an empty folder; nothing is launched."""
    monkeypatch.setattr("vllm_csf.bench.server.has_cuda", lambda: True)
    monkeypatch.chdir(tmp_path)
    folder = str(checkpoint("qwen3-moe", "csf"))
    return lambda *flags: cli.main(["bench", "starts", folder, "--stock", folder, *UNUSED, *flags])


@pytest.mark.parametrize("arms", ["stock,csf", "csf", "native,stock"])
@pytest.mark.parametrize("flags", [[], ["--stock-args=--gpu-memory-utilization 0.3"]])
def test_at_once_on_a_device_needs_a_share_of_it(start, arms, flags, tmp_path, capsys):
    assert start("--at-once", "2", "--arms", arms, *flags) == 1
    assert "--at-once 2 needs --gpu-memory-utilization" in capsys.readouterr().err
    assert not list(tmp_path.glob("record*"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--server-args=--gpu-memory-utilization 0.3"],
        ["--server-args=--gpu-memory-utilization=0.3"],
        ["--server-args=--gpu_memory_utilization 0.3"],
        ["--plugin-args=--gpu_memory_utilization=0.3"],
        ["--arms=stock"],
        ["--at-once=1"],
    ],
)
def test_a_share_is_found_where_it_is_given_and_needed(start, flags, capsys):
    start("--at-once", "2", *flags)
    captured = capsys.readouterr()
    assert not captured.err
    assert "No server came up." in captured.out


def test_it_fails_where_nothing_was_measured(start):
    assert start() == 1


def test_interrupted_it_prints_what_was_measured(world, start, monkeypatch, tmp_path, capsys):
    world.interrupted = True
    stock, csf = ARMS
    monkeypatch.setattr("vllm_csf.bench.subjects.subjects", lambda *_: ([stock, csf], {}))
    assert start("--duration", "60") == 130
    captured = capsys.readouterr()
    assert captured.err == "vllm-csf bench: interrupted\n"
    assert [line.split()[1] for line in captured.out.splitlines() if line.startswith("|")][2:] == [
        "stock"
    ] * 2
    assert len(records.read(tmp_path / "record.json", "starts")["starts"]) == 2
    assert world.up == 0


@pytest.mark.parametrize("to", ["server", "plugin"])
@pytest.mark.parametrize(
    "flags",
    [
        """--additional-config '{"csf_cache_dir": "/x"}'""",
        """--additional_config='{"csf_scales": "csf", "csf_cache_dir":"/x"}'""",
        "--additional-config.csf_cache_dir /x",
        "--additional-config.csf_cache_dir=/x",
        """--compilation-config='{"cache_dir": "/x"}'""",
        "-cc.cache_dir=/x",
    ],
)
def test_a_folder_for_caches_is_refused(start, to, flags, tmp_path, capsys):
    assert start(f"--{to}-args={flags}") == 1
    assert "cache_dir is given for" in capsys.readouterr().err
    assert not list(tmp_path.glob("record*"))


def test_a_path_that_is_called_so_is_not_refused(start, capsys):
    start("--server-args=--download-dir /data/cache_dir --chat-template /x/csf_cache_dir.jinja")
    assert not capsys.readouterr().err
