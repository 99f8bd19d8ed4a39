"""The standalone decoder: expands the scale planes of the routed experts, w13 and w2, in one launch.

For consumers that want whole scale bytes, such as FP4 tensor-core kernels; the fused kernels of `moe` do
without. Every CTA finds the routed experts for itself; then its warps take tasks (see `pieces`) in turn,
spread over all CTAs. Nothing is allocated, the host waits for nothing, and the bytes written do not depend
on who writes them: graph-capturable and deterministic.

A program is compiled for the sizes of an expert (hidden, width), the order of the output and the type of
the ids; experts and their number, routes and addresses are run-time values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32

from .. import layout, ptx
from ..compiled.program import Kind, Program
from ..layout import PreparedMatrix
from ..moe.experts import pad_to_tile
from .pieces import Pieces, Work
from .planes import ROWS, Plane, planes_of
from .routed import Routed, RoutedConfig

# Of a CTA; with 1,024 F8_128x4 order takes longer, rows about as long (docs/results/notes.md).
THREADS = 512

KIND = Kind("expand", __name__, "DecoderConfig", "compile_decoder")


@dataclass(frozen=True)
class DecoderConfig:
    """`width`: I as in the checkpoint; `order`: see `planes`; `pdl`: sm_90 and later.

    `capacity`: upper bound of experts, a multiple of 1024.
    """

    hidden: int
    width: int
    order: str = ROWS
    wide_ids: bool = False
    capacity: int = 1024
    threads: int = THREADS
    pdl: bool = True

    @property
    def planes(self) -> tuple[Plane, Plane]:
        """Of w13 and w2."""
        return planes_of(self.hidden, self.width, self.order)

    @property
    def works(self) -> tuple[Work, Work]:
        w13, w2 = self.planes
        return Work(w13, gated=True), Work(w2, gated=False)

    @property
    def tasks(self) -> int:
        """Of one expert."""
        return sum(work.tasks for work in self.works)

    def shift(self, routes: int, ctas: int) -> int:
        """Into how many parts (2^shift) tasks are cut so that few routes keep many warps busy."""
        if all(work.steps == 1 for work in self.works):
            return 0
        warps = ctas * self.threads // 32
        return next((s for s in (2, 1) if routes * self.tasks << s <= warps), 0)


class Decoder:
    """Host function of a program; compile `__call__` with `cute.compile`."""

    def __init__(self, config: DecoderConfig):
        self.c = config
        self.routed = Routed(RoutedConfig(config.capacity, config.wide_ids, config.threads))
        self.up, self.down = (Pieces(work) for work in config.works)

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        experts: Int32,
        tiles13: Int64,
        bases13: Int64,
        slices13: Int64,
        starts13: Int64,
        records13: Int64,
        dense13: Int64,
        out13: Int64,
        tiles2: Int64,
        bases2: Int64,
        slices2: Int64,
        starts2: Int64,
        records2: Int64,
        dense2: Int64,
        out2: Int64,
        shift: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """ids: int32 or int64 [routes], one or more; all `Int64` are device addresses."""
        up = (tiles13, bases13, slices13, starts13, records13, dense13, out13)
        down = (tiles2, bases2, slices2, starts2, records2, dense2, out2)
        self.kernel(
            ids.iterator.toint(), Int32(cute.size(ids)), experts, up, down, shift
        ).launch(
            grid=[ctas, 1, 1], block=[self.c.threads, 1, 1], stream=stream, use_pdl=self.c.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(self, ids: Int64, count: Int32, experts: Int32, up: tuple, down: tuple, shift: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = tid % 32
        warps = cutlass.const_expr(self.c.threads // 32)
        size = cutlass.const_expr(self.routed.c.words)
        bitmap = Int32(cutlass.memory.SmemAllocator().allocate_array(Uint32, size, byte_alignment=16).toint())
        self.routed.clear(bitmap, tid)
        if cutlass.const_expr(self.c.pdl):
            ptx.wait_for_predecessor()
        self.routed.mark(bitmap, ids, count, experts, tid)
        words = cute.make_rmem_tensor(self.routed.c.lane_words, Uint32)
        before, routed = self.routed.count(bitmap, words, lane)
        # One after the other over the CTAs, so that few tasks keep all of them busy.
        for t in cutlass.range(
            tid // 32 * grid + bid, routed * self.c.tasks << shift, warps * grid, unroll=1
        ):
            whole = t >> shift
            rank = whole // self.c.tasks
            task = whole - rank * self.c.tasks
            expert = self.routed.expert(words, before, rank, lane)
            if task < self.up.w.tasks:
                self.up.expand(up, expert, task, t - (whole << shift), shift, lane)
            else:
                self.down.expand(down, expert, task - self.up.w.tasks, t - (whole << shift), shift, lane)


def compile_decoder(config: DecoderConfig, arch: str, options: str = "--enable-tvm-ffi"):
    """Compiles a program for `arch` (sm_90a, ...); needs no GPU."""
    dtype = cutlass.Int64 if config.wide_ids else cutlass.Int32
    ids = cute.runtime.make_fake_compact_tensor(
        dtype, (cute.sym_int(),), assumed_align=8 if config.wide_ids else 4
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    numbers = [Int32(1)] + [Int64(0)] * 14 + [Int32(0), Int32(1)]
    return cute.compile(Decoder(config), ids, *numbers, stream, options=f"--gpu-arch {arch} {options}")


def declared(config: DecoderConfig, arch: str) -> Program:
    """The program of a configuration, to be planned and cached; compiles nothing."""
    return Program(KIND, config, arch)


def run(
    program: Callable,
    config: DecoderConfig,
    w13: PreparedMatrix,
    w2: PreparedMatrix,
    routes: torch.Tensor,
    out13: torch.Tensor,
    out2: torch.Tensor,
    ctas: int,
) -> None:
    """Enqueues the expansion of the routed experts' planes on the current stream.

    routes: int32 or int64 (as the program was compiled for) of any shape and count, contiguous; duplicates
    count once, ids outside 0 .. E - 1 not at all. out13, out2: uint8 [E, bytes of a plane], contiguous,
    16-byte aligned; the planes of other experts are left as they are. ctas: as a rule one for each
    multiprocessor. Raises ValueError naming the argument that does not fit.
    """
    check(config, w13, w2, routes, out13, out2)
    if routes.numel() == 0:
        return
    addresses = [
        [t.data_ptr() for t in (*matrix.tensors(), out)] for matrix, out in ((w13, out13), (w2, out2))
    ]
    most = min(routes.numel(), w13.shape.experts)
    program(
        routes.view(-1), w13.shape.experts, *addresses[0], *addresses[1], config.shift(most, ctas), ctas
    )  # fmt: skip


def check(
    config: DecoderConfig,
    w13: PreparedMatrix,
    w2: PreparedMatrix,
    routes: torch.Tensor,
    out13: torch.Tensor,
    out2: torch.Tensor,
) -> None:
    """Raises ValueError, see `run`. Looks at shapes and types only."""
    padded = pad_to_tile(config.width)
    experts = w13.shape.experts
    shapes = (
        layout.Shape(experts, 2 * padded, config.hidden, gated=True),
        layout.Shape(experts, config.hidden, padded, gated=False),
    )
    for name, matrix, shape in zip(("w13", "w2"), (w13, w2), shapes, strict=True):
        if matrix.shape != shape:
            raise ValueError(f"{name} is {matrix.shape}; expected {shape}")
    if experts > config.capacity:
        raise ValueError(f"w13 has {experts} experts; expected at most {config.capacity}")
    expected = torch.int64 if config.wide_ids else torch.int32
    if routes.dtype != expected or not routes.is_contiguous():
        raise ValueError(
            f"routes are {routes.dtype} with strides {routes.stride()}; expected {expected}, contiguous"
        )
    for name, out, plane in zip(("out13", "out2"), (out13, out2), config.planes, strict=True):
        found = (out.dtype, tuple(out.shape), out.is_contiguous(), out.data_ptr() % 16)
        if found != (torch.uint8, (experts, plane.nbytes), True, 0):
            raise ValueError(
                f"{name} is {out.dtype} {list(out.shape)}, contiguous: {found[2]}, address % 16: {found[3]}; "
                f"expected torch.uint8 [{experts}, {plane.nbytes}], contiguous, at a multiple of 16"
            )
