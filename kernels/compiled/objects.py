"""Object files in memory: what the compiler exports and the loader reads are both paths."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .program import CompileError, Program

logger = logging.getLogger("vllm.csf")

# Two threads must not be inside the compiler at once: it aborts the process.
_compiler = threading.Lock()
_SYMBOL = "csf_program"
# A destructor of every object, which gives its device code back, and its name once exported. The loader of
# objects runs no destructors.
_UNLOAD = "__dtor_cuda_dialect_unload_library_once"
_EXPORTED_UNLOAD = f"__cute_internal_{_SYMBOL}_{_UNLOAD}"


def compile_object(program: Program) -> bytes:
    """Compiles a program in this process. Raises CompileError naming it."""
    with _compiler, _memory_file() as (handle, path):
        compiled = program.compile()
        try:
            _export_unload(compiled.ir_module)
            compiled.export_to_c(path, function_name=_SYMBOL)
        except Exception as error:
            raise CompileError(f"{program.name}: no object could be made of it: {error}") from error
        os.lseek(handle, 0, os.SEEK_SET)
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read()


def _export_unload(module: Any) -> None:
    """Makes the destructor a symbol of the object, where the compiler made one of that name."""
    ir: Any = importlib.import_module("cutlass._mlir.ir")

    def look(operation: Any) -> Any:
        if operation.name == "llvm.func" and operation.attributes["sym_name"].value == _UNLOAD:
            operation.attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<external>")
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(look)


class LoadedObject:
    """`function`: the host function. No C compiler is needed, no GPU is touched before its first call."""

    def __init__(self, data: bytes) -> None:
        import cutlass.cute as cute

        with _memory_file() as (handle, path):
            with os.fdopen(os.dup(handle), "wb") as file:
                file.write(data)
            module = cute.runtime.load_module(path, enable_tvm_ffi=True)
        self.function: Callable = getattr(module, _SYMBOL)
        self._engine = module.engine  # what `_unload` points into
        self._unload = _destructor(self._engine)

    def unload(self) -> None:
        """Gives the device code back, if a call has loaded it. None of its kernels may be running, and no
        graph that has them may be replayed again."""
        if self._unload is not None:
            self._unload()


def _destructor(engine: Any) -> Callable[[], None] | None:
    try:
        address = engine.lookup(_EXPORTED_UNLOAD)
    except Exception:
        address = None
    if not address:
        _warn_of_code_that_stays()
        return None
    return ctypes.CFUNCTYPE(None)(address)


@functools.cache
def _warn_of_code_that_stays() -> None:
    logger.warning("csf_nvfp4: this compiler's programs have no %s: their device code stays loaded", _UNLOAD)


@contextmanager
def _memory_file() -> Iterator[tuple[int, str]]:
    handle = os.memfd_create(_SYMBOL)
    try:
        yield handle, f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)
