"""Starting and stopping, with a `vllm` command that is made up."""

from __future__ import annotations

import io
import os
import signal
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from vllm_csf.bench import server as module
from vllm_csf.bench.server import Server, ServerError

ANSWERS = """
import http.server, json, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/metrics") else 404)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b"a_metric 3")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES = """
import sys
print("WARNING 12-02 18:50:00 [utils.py:1] Errors like `OSError: [Errno 24]` may follow")
print("ValueError: the cause of it all")
for n in range(100):
    print("INFO shutting down", n)
sys.exit(3)
"""


@pytest.fixture
def serve(tmp_path, monkeypatch):
    def make(body: str, **options) -> Server:
        script = tmp_path / "vllm.py"
        script.write_text(textwrap.dedent(body))
        monkeypatch.setattr(module, "vllm_command", lambda: [sys.executable, str(script)])
        return Server("model", log=tmp_path / "log", cpu=True, **options)

    return make


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def wait_until_dead(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_it_answers_and_takes_its_children_along(serve):
    with serve(ANSWERS) as server:
        assert server.text("/metrics") == "a_metric 3"
        child = int(server.log_text().split("child ")[1].split()[0])
        assert alive(child)
        # Two Python processes; one has more than 5 MB.
        assert server.peak_host_bytes() > 10 << 20
        with pytest.raises(ServerError, match="HTTP 404"):
            server.text("/nothing")
    assert wait_until_dead(child)
    assert server.peak_host_bytes() == 0


def test_an_interrupt_stops_it_too(serve):
    children = []

    def interrupted() -> None:
        with serve(ANSWERS) as server:
            children.append(int(server.log_text().split("child ")[1].split()[0]))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert wait_until_dead(children[0])


def test_a_server_that_dies_shows_its_first_error_and_its_last_lines(serve):
    with pytest.raises(ServerError) as error, serve(DIES):
        pass
    text = str(error.value)
    assert text.startswith("vllm serve ended with 3:\nfirst error: ValueError: the cause of it all\n")
    assert text.endswith("INFO shutting down 99")
    assert "shutting down 3\n" not in text


def test_a_server_that_takes_too_long_is_stopped(serve):
    server = serve("import time; time.sleep(600)", start_seconds=0.5)
    server.launch()
    leader = server._process.pid
    with pytest.raises(ServerError, match="not ready after 0 s"):
        server.wait()
    assert wait_until_dead(leader)


def test_a_server_that_came_up_while_nobody_looked_is_up(serve):
    server = serve(ANSWERS, start_seconds=0.5)
    server.launch()
    time.sleep(3)
    assert server.wait() >= 3
    server.stop()


def test_nothing_outlives_an_interrupt_of_stopping(serve):
    deaf = """
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(600)
    """
    server = serve(deaf, start_seconds=60)
    server.launch()
    server.wait_for_log("up")
    leader = server._process.pid
    again = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    again.start()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert wait_until_dead(leader)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "answered '<html>', expected JSON"),
        (b"\x80", "expected JSON"),
        (b"", r"answered None, expected choices\[0\]\.text"),
        (b"[]", r"answered \[\], expected"),
        (b'{"choices": []}', "expected choices"),
        (b'{"choices": {"text": "a"}}', "expected choices"),
        (b'{"choices": [{"text": null}]}', "expected choices"),
        (b'{"choices": [3]}', "expected choices"),
    ],
)
def test_an_answer_that_is_none_is_named(monkeypatch, tmp_path, body, said):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(body))
    server = Server("model", log=tmp_path / "log", cpu=True)
    server.url = "http://127.0.0.1:1"
    with pytest.raises(ServerError, match=f"/v1/completions: .*{said}"):
        server.complete("a")


def test_what_is_no_http_is_no_answer(serve):
    program = """
    import socket, sys
    listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    while True:
        with listening.accept()[0] as one:
            one.recv(1000)
            one.sendall(b"hello\\n")
    """
    with pytest.raises(ServerError, match="not ready"), serve(program, start_seconds=1.0):
        pass
    server = serve(program, start_seconds=60)
    server.launch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with pytest.raises(ServerError) as error:
            server.text("/metrics")
        if "BadStatusLine: hello" in str(error.value):
            break
        time.sleep(0.1)
    server.stop()
    assert "/metrics: BadStatusLine: hello" in str(error.value)


def test_it_waits_for_its_log(serve):
    server = serve("import time; print('coming', flush=True); time.sleep(600)", start_seconds=60)
    server.launch()
    server.wait_for_log("com.ng")
    assert "coming" in server.log_text()
    server.stop()


@pytest.mark.parametrize("program", ["print('other')", "import time; time.sleep(600)"])
def test_it_does_not_wait_for_ever_for_its_log(serve, program):
    server = serve(program, start_seconds=1.0)
    began = time.monotonic()
    server.launch()
    server.wait_for_log("coming")
    assert time.monotonic() - began < 30
    server.stop()
