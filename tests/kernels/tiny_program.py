"""The smallest real program: adds a constant to a vector. Compiles in about a second."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from vllm_csf.kernels.activation import SILU, Activation
from vllm_csf.kernels.compiled.program import Kind, Program


@dataclass(frozen=True)
class TinyConfig:
    """`count`: a file that gets a byte for each compilation; `trouble`: "", "error" or "kill"."""

    constant: int
    count: str = ""
    trouble: str = ""
    activation: Activation = SILU


class Tiny:
    def __init__(self, constant: int) -> None:
        self.constant = constant

    @cute.kernel
    def add(self, x: cute.Tensor):
        x[cute.arch.thread_idx()[0]] = x[cute.arch.thread_idx()[0]] + cutlass.Int32(self.constant)

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        self.add(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_tiny(config: TinyConfig, arch: str):
    if config.trouble == "error":
        raise ValueError("no such constant")
    in_worker = os.environ.get("CSF_TINY_PARENT") != str(os.getpid())
    if config.trouble == "kill" and in_worker:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.count:
        with open(config.count, "ab") as file:
            file.write(b"x")
    x = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Tiny(config.constant), x, stream, options=f"--gpu-arch {arch} --enable-tvm-ffi")


KIND = Kind("tiny", "tiny_program", "TinyConfig", "compile_tiny")
FOLDER = Path(__file__).parent


def tiny(constant: int, count: Path | str = "", trouble: str = "") -> Program:
    return Program(KIND, TinyConfig(constant, str(count), trouble), "sm_90a")
