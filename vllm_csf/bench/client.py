"""vLLM's own `vllm bench serve` client, kept running: importing it takes longer than a short window.

    python -m vllm_csf.bench.client

Reads one JSON list of `vllm bench serve` arguments a line, runs it, answers `{"error": null | text}` on one
line. What the client prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .records import BenchError
from .server import log_tail


class Client:
    """The process and what it is asked. log: file for what vLLM's client prints."""

    def __init__(self, log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_csf.bench.client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, arguments: Sequence[str], result: Path) -> dict[str, Any]:
        """What `vllm bench serve ARGUMENTS --save-result` saves. Raises BenchError, with its last lines."""
        save = ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps([*arguments, *save]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        error = json.loads(answer)["error"] if answer else "it ended"
        if error or not result.exists():
            raise BenchError(f"vllm bench serve: {error}\n{log_tail(self._log)}")
        return json.loads(result.read_text())

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for line in sys.stdin:
        error = None
        try:
            parser = FlexibleArgumentParser()
            serve.add_cli_args(parser)
            serve.main(parser.parse_args(json.loads(line)))
        except (Exception, SystemExit) as failure:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"error": error}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
