"""Object files in memory: what the compiler exports and the loader reads are both paths."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .program import CompileError, Program

# Two threads must not be inside the compiler at once: it aborts the process.
_compiler = threading.Lock()
_SYMBOL = "csf_program"


def compile_object(program: Program) -> bytes:
    """Compiles a program in this process. Raises CompileError naming it."""
    with _compiler, _memory_file() as (handle, path):
        compiled = program.compile()
        try:
            compiled.export_to_c(path, function_name=_SYMBOL)
        except Exception as error:
            raise CompileError(f"{program.name}: no object could be made of it: {error}") from error
        os.lseek(handle, 0, os.SEEK_SET)
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read()


def load_object(data: bytes) -> Callable:
    """The host function of an object. No C compiler is needed, no GPU is touched before the first call."""
    import cutlass.cute as cute

    with _memory_file() as (handle, path):
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(data)
        return getattr(cute.runtime.load_module(path, enable_tvm_ffi=True), _SYMBOL)


@contextmanager
def _memory_file() -> Iterator[tuple[int, str]]:
    handle = os.memfd_create(_SYMBOL)
    try:
        yield handle, f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)
