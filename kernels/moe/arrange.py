"""The first launch for many tokens: routing in some CTAs, the tokens' columns in MMA order in the others.

The matrix instructions of a warpgroup read tokens from shared memory in the order of K in which the lanes
hold the weights (see `layout`: a lane owns 16 consecutive columns). Within each 64 columns, that is word
8 * q + c (two columns) of the 32 moved to place 4 * c + q, for q in 0 .. 3 and c in 0 .. 7.
`layout.token_order` is the same in torch.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import ptx
from .route import THREADS, Route, RouteConfig

PARTS = 8  # CTAs that route
AT_ONCE = 4  # chunks of 16 bytes that a thread carries at a time


@dataclass(frozen=True)
class ArrangeConfig:
    """`tables`: the routing whose tables this launch writes, in global memory."""

    tables: RouteConfig

    @property
    def route(self) -> RouteConfig:
        return replace(self.tables, threads=THREADS, parts=PARTS)


class Arrange:
    """Device code; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: ArrangeConfig):
        self.c = config
        self.route = Route(config.route)

    @cute.jit
    def launch(
        self, inputs: tuple, entries: Int64, pairs: Int64, x: Int64, arranged: Int64, tokens: Int32,
        hidden: Int32, ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """x, arranged: bf16 [tokens, hidden], hidden a multiple of 64. `ctas`: in all, more than `PARTS`."""
        ids, count, expert_map, global_experts, experts = inputs
        self.kernel(
            ids, count, expert_map, global_experts, experts, entries, pairs, x, arranged,
            tokens * (hidden // 8),
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self, ids: Int64, count: Int32, expert_map: Int64, global_experts: Int32, experts: Int32,
        entries: Int64, pairs: Int64, x: Int64, arranged: Int64, chunks: Int32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        words = cutlass.const_expr(self.c.route.scratch_bytes // 4)
        scratch = Int32(
            cutlass.memory.SmemAllocator().allocate_array(Uint32, words, byte_alignment=16).toint()
        )
        ptx.wait_for_predecessor()
        ptx.dependents_may_start()
        if bid < PARTS:
            inputs = (ids, count, expert_map, global_experts, experts)
            self.route.build(inputs, scratch, entries, pairs, tid, bid)
        else:
            stride = (grid - PARTS) * THREADS
            for i in cutlass.range((bid - PARTS) * THREADS + tid, chunks, stride * AT_ONCE, unroll=1):
                places = [cutlass.min(i + j * stride, chunks - 1) for j in range(AT_ONCE)]
                found = [self.columns(x, place) for place in places]
                for place, quad in zip(places, found, strict=True):
                    ptx.stg128(arranged + Int64(place) * 16, *quad)

    @cute.jit
    def columns(self, x: Int64, place: Int32):
        """16 bytes of the output: one word of each of the four column groups."""
        block = x + Int64(place >> 3) * 128 + Int64((place & 7) * 4)
        return [ptx.ldg32(block + 32 * q) for q in range(4)]
