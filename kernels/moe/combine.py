"""The last step of the layer: out[t] = the sum over k of y[t, k], in that order, in FP32; bf16 output."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import ptx
from .route import Route, RouteConfig

THREADS = 128
CHANNELS = 4 * THREADS  # of one CTA


@dataclass(frozen=True)
class CombineConfig:
    """`bf16`: the type of y, else FP32."""

    topk: int
    route: RouteConfig
    pdl: bool = True
    bf16: bool = False


class Combine:
    """Device code of one reduction program. y: [T * topk, hidden]; rows of pairs that no local expert
    takes are not read."""

    def __init__(self, config: CombineConfig):
        self.c = config
        self.route = Route(config.route)

    @cute.jit
    def launch(
        self, y: Int64, inputs: tuple, out: Int64, tokens: Int32, hidden: Int32, stream: cuda.CUstream
    ):
        """`inputs`: see `Route`."""
        self.kernel(y, inputs, out, hidden).launch(
            grid=[(hidden + (CHANNELS - 1)) // CHANNELS, tokens, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.c.pdl,
        )

    @cute.kernel
    def kernel(self, y: Int64, inputs: tuple, out: Int64, hidden: Int32):
        topk = cutlass.const_expr(self.c.topk)
        tid, _, _ = cute.arch.thread_idx()
        part, token, _ = cute.arch.block_idx()
        ids, _, expert_map, global_experts, experts = inputs
        taken = cute.make_rmem_tensor(topk, Int32)
        for k in cutlass.range_constexpr(topk):
            taken[k] = self.route.local_expert(ids, token * topk + k, expert_map, global_experts, experts)
        if cutlass.const_expr(self.c.pdl):
            ptx.wait_for_predecessor()
            ptx.dependents_may_start()
        channel = part * CHANNELS + tid * 4
        if channel < hidden:
            total = cute.make_rmem_tensor(4, Float32)
            parts = cute.make_rmem_tensor((4, topk), Float32)
            for k in cutlass.range_constexpr(topk):
                pair = Int64(token) * topk + k
                for i in cutlass.range_constexpr(4):
                    parts[i, k] = Float32(0.0)
                if taken[k] >= 0:
                    row = self.load(y, pair * Int64(hidden) + Int64(channel))
                    for i in cutlass.range_constexpr(4):
                        parts[i, k] = row[i]
            for i in cutlass.range_constexpr(4):
                total[i] = Float32(0.0)
            for k in cutlass.range_constexpr(topk):
                for i in cutlass.range_constexpr(4):
                    total[i] = total[i] + parts[i, k]
            address = out + (Int64(token) * Int64(hidden) + Int64(channel)) * 2
            ptx.stg64(address, ptx.pack_bf16x2(total[0], total[1]), ptx.pack_bf16x2(total[2], total[3]))

    @cute.jit
    def load(self, y: Int64, index: Int64):
        """Four values in FP32."""
        if cutlass.const_expr(not self.c.bf16):
            return ptx.ldg_f32x4(y + index * 4)
        low, high = ptx.ldg64(y + index * 2)
        words = (low << Uint32(16), low & Uint32(0xFFFF0000), high << Uint32(16), high & Uint32(0xFFFF0000))
        return tuple(ptx.bits_float(word) for word in words)
