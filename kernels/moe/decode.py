"""The expert layer for few tokens (decode): routing, two grouped GEMMs and the reduction in one call.

Four kernels in one host function, chained by programmatic dependent launch on sm_90 and later. The call
allocates nothing, does not synchronise and takes all run-time sizes as arguments, so that it can be
captured in a CUDA graph.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from ..activation import SILU, Activation
from .combine import Combine, CombineConfig
from .expert_gemm import ExpertGemm, GemmConfig
from .programs import DecodeChoice, Geometry, number


@dataclass(frozen=True)
class DecodeConfig:
    """Everything that one compiled program depends on; sizes not listed here are run-time values.

    `split_up`, `split_down`: how the two GEMMs share out their items, see `expert_gemm`.
    `capacity`: upper bound of local experts, a multiple of 1024. `n_tiles`: work tiles hold 8 times as
    many tokens. `warps`: of a CTA. `own_pairs`: most pairs that a program without a routing launch can
    take, 0: any number.
    """

    split_up: int
    split_down: int
    topk: int
    capacity: int
    n_tiles: int
    wide_ids: bool
    mapped: bool
    native: bool = False
    activation: Activation = SILU
    bulk: bool = True
    bf16_fma: bool = False
    blocks: int = 2
    min_ctas: int = 0
    stages: int = 2
    chunk_tiles: int = 2
    warps: int = 8
    own_pairs: int = 0

    def gemm(self, gated: bool) -> GemmConfig:
        return GemmConfig(
            gated=gated,
            native=self.native,
            n_tiles=self.n_tiles,
            split=self.split_up if gated else self.split_down,
            blocks=self.blocks,
            min_ctas=self.min_ctas,
            chunk_tiles=self.chunk_tiles,
            stages=self.stages,
            warps=self.warps,
            bulk=self.bulk,
            bf16_fma=self.bf16_fma,
            activation=self.activation,
            capacity=self.capacity,
            wide_ids=self.wide_ids,
            mapped=self.mapped,
            own_pairs=self.own_pairs,
        )


def decode_config(g: Geometry, choice: DecodeChoice) -> DecodeConfig:
    """The configuration of the program that `programs` chose for a geometry."""
    return DecodeConfig(
        split_up=choice.split_up,
        split_down=choice.split_down,
        topk=g.topk,
        capacity=g.capacity,
        n_tiles=choice.n_tiles,
        wide_ids=g.wide_ids,
        mapped=g.mapped,
        native=g.native,
        activation=g.activation,
        bulk=number(g.arch) >= 90,
        bf16_fma=number(g.arch) < 90,
        blocks=choice.blocks,
        min_ctas=choice.min_ctas,
        stages=choice.stages,
        chunk_tiles=choice.chunk_tiles,
        warps=choice.warps,
        own_pairs=choice.own_pairs,
    )


class Decode:
    """Host function of a program; compile `__call__` with `cute.compile`."""

    def __init__(self, config: DecodeConfig):
        self.c = config
        self.up = ExpertGemm(config.gemm(gated=True))
        self.down = ExpertGemm(config.gemm(gated=False))
        self.route = self.up.route
        self.combine = Combine(CombineConfig(config.topk, config.gemm(True).route, config.bulk))

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
        partials: Int64,
        flags: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """x: bf16 [tokens, hidden]; ids, router: [tokens, topk]; all but x are numbers and addresses."""
        x_address = x.iterator.toint()
        topk = Int32(self.c.topk)
        inputs = (ids, tokens * topk, expert_map, global_experts, experts)
        if cutlass.const_expr(self.c.own_pairs == 0):
            self.route.launch(inputs, entries, pairs, stream, self.c.bulk)
        self.up.launch(
            x_address, hidden, tiles13, bases13, slices13, starts13, records13, dense13, alpha13, inputs,
            entries, pairs, router, h, inner, partials, flags, inner // 16, hidden // 64, topk, ctas, stream,
        )  # fmt: skip
        flags2 = flags + Int64(ctas) * (4 * self.c.warps)
        self.down.launch(
            h, inner, tiles2, bases2, slices2, starts2, records2, dense2, alpha2, inputs, entries, pairs,
            router, y, hidden, partials, flags2, hidden // 32, inner // 64, topk, ctas, stream,
        )  # fmt: skip
        self.combine.launch(y, inputs, out, tokens, hidden, stream)


def compile_decode(config: DecodeConfig, arch: str, options: str = "--enable-tvm-ffi"):
    """Compiles a program for `arch` (sm_90a, ...); needs no GPU."""
    x = cute.runtime.make_fake_compact_tensor(
        BFloat16, (cute.sym_int(), cute.sym_int(divisibility=64)), stride_order=(1, 0), assumed_align=16
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    numbers = [Int64(0)] * 4 + [Int32(1)] * 5 + [Int64(0)] * 20 + [Int32(1)]
    return cute.compile(Decode(config), x, *numbers, stream, options=f"--gpu-arch {arch} {options}")
