"""A process that compiles: ``python -m vllm_csf.kernels.compiled.worker``.

Reads a program a line from standard input, as JSON, and answers each with a line of JSON. Ends when its
input does, and so with the process that started it.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    for line in sys.stdin:
        answers.write(json.dumps(_answer(line)) + "\n")
        answers.flush()


def _answer(line: str) -> dict[str, object]:
    from .objects import compile_object
    from .program import CompileError, Program

    began = time.perf_counter()
    try:
        data = compile_object(Program.from_json(line))
    except CompileError as error:
        return {"error": str(error), "traceback": traceback.format_exc()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"object": base64.b64encode(data).decode(), "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
