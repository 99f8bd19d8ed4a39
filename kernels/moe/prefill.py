"""The expert layer for many tokens (prefill), on Hopper: four kernels in one host function.

Routing and the order of the tokens' columns, two grouped GEMMs on the tensor cores, the reduction. As with
`decode`, the call allocates nothing, does not synchronise and can be captured in a CUDA graph; the
arguments are the same, so that either program serves a call.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from ..activation import SILU, Activation
from .arrange import Arrange, ArrangeConfig
from .combine import Combine, CombineConfig
from .experts import slots
from .feed import ROWS
from .programs import Geometry, PrefillChoice
from .wide_gemm import WideConfig, WideGemm


@dataclass(frozen=True)
class PrefillConfig:
    """Everything that one compiled program depends on; sizes not listed here are run-time values.

    `capacity`: upper bound of local experts, a multiple of 1024. `tokens`: most of a work tile, a multiple
    of 16; `stages`: in the ring; `per_sm`: CTAs that share a multiprocessor; `fragments`: of 16 rows that a
    warp takes, see `WideConfig`.
    """

    topk: int
    capacity: int
    wide_ids: bool
    mapped: bool
    native: bool = False
    activation: Activation = SILU
    tokens: int = 128
    stages: int = 4
    per_sm: int = 1
    fragments: int = 2

    def gemm(self, gated: bool) -> WideConfig:
        return WideConfig(
            gated=gated,
            native=self.native,
            topk=self.topk,
            tokens=self.tokens,
            stages=self.stages,
            per_sm=self.per_sm,
            activation=self.activation,
            capacity=self.capacity,
            wide_ids=self.wide_ids,
            mapped=self.mapped,
            fragments=self.fragments,
        )


def prefill_config(g: Geometry, choice: PrefillChoice) -> PrefillConfig:
    """The configuration of the program that `programs` chose for a geometry."""
    return PrefillConfig(
        topk=g.topk,
        capacity=g.capacity,
        wide_ids=g.wide_ids,
        mapped=g.mapped,
        native=g.native,
        activation=g.activation,
        tokens=choice.tile,
        stages=choice.stages,
        per_sm=choice.per_sm,
        fragments=choice.fragments,
    )


class Prefill:
    """Host function of a program; compile `__call__` with `cute.compile`."""

    def __init__(self, config: PrefillConfig):
        self.c = config
        self.up = WideGemm(config.gemm(gated=True))
        self.down = WideGemm(config.gemm(gated=False))
        route = config.gemm(gated=True).route
        self.arrange = Arrange(ArrangeConfig(route))
        self.combine = Combine(CombineConfig(config.topk, route, pdl=True, bf16=True))

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: Int64,
        ids: Int64,
        router: Int64,
        expert_map: Int64,
        tokens: Int32,
        hidden: Int32,
        inner: Int32,
        global_experts: Int32,
        experts: Int32,
        tiles13: Int64,
        bases13: Int64,
        slices13: Int64,
        starts13: Int64,
        records13: Int64,
        dense13: Int64,
        alpha13: Int64,
        tiles2: Int64,
        bases2: Int64,
        slices2: Int64,
        starts2: Int64,
        records2: Int64,
        dense2: Int64,
        alpha2: Int64,
        entries: Int64,
        pairs: Int64,
        h: Int64,
        y: Int64,
        arranged: Int64,
        flags: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """x: bf16 [tokens, hidden]; ids, router: [tokens, topk]; all but x are numbers and addresses.

        `arranged`: bf16 [tokens, hidden]; `flags` is not used.
        """
        inputs = (ids, tokens * self.c.topk, expert_map, global_experts, experts)
        x_address = x.iterator.toint()
        groups = slots(tokens * self.c.topk, experts, cutlass.min) // ROWS
        self.arrange.launch(inputs, entries, pairs, x_address, arranged, tokens, hidden, ctas, stream)
        self.up.launch(
            arranged, hidden, tiles13, bases13, slices13, starts13, records13, dense13, alpha13, entries,
            pairs, router, h, groups, inner // 16, hidden // 64, ctas, stream,
        )  # fmt: skip
        self.down.launch(
            h, groups, tiles2, bases2, slices2, starts2, records2, dense2, alpha2, entries, pairs, router, y,
            hidden, hidden // 32, inner // 64, ctas, stream,
        )  # fmt: skip
        self.combine.launch(y, inputs, out, tokens, hidden, stream)


def compile_prefill(config: PrefillConfig, arch: str, options: str = "--enable-tvm-ffi"):
    """Compiles a program for `arch` (sm_90a); needs no GPU."""
    x = cute.runtime.make_fake_compact_tensor(
        BFloat16, (cute.sym_int(), cute.sym_int(divisibility=64)), stride_order=(1, 0), assumed_align=16
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    numbers = [Int64(0)] * 4 + [Int32(1)] * 5 + [Int64(0)] * 20 + [Int32(1)]
    return cute.compile(Prefill(config), x, *numbers, stream, options=f"--gpu-arch {arch} {options}")
