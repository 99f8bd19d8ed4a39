"""The end of a work item: partial sums added in a fixed order, activation or router weight, stores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import ptx
from ..activation import Activation
from .route import Route

# FP4 bits read as bf16 are the value times 2^-126; with scales times 2^119 the products are 2^-7 too small
PRODUCT_FACTOR = 128.0


@dataclass(frozen=True)
class EpilogueConfig:
    gated: bool
    n_tiles: int
    blocks: int
    split: int
    activation: Activation

    @property
    def units(self) -> int:
        """16 x 8 accumulator fragments of a warp."""
        return 2 * self.blocks * self.n_tiles

    @property
    def partial_bytes(self) -> int:
        """Shared memory for the partial sums of one warp."""
        return self.units * 512 if self.split > 1 else 0

    @property
    def target_bytes(self) -> int:
        """Shared memory of one team for where its outputs go; of two work tiles where warps share it."""
        return (2 if self.split > 1 else 1) * 8 * self.n_tiles * 16


class Epilogue:
    """Device code; accumulators are FP32 [4, units], see `ptx.mma_m16n8k16`."""

    def __init__(self, config: EpilogueConfig, route: Route):
        self.c = config
        self.route = route

    @cute.jit
    def targets_of(self, target: Int32, entry: Int32):
        """The team's table for a work tile; the one before it may still be read by other warps."""
        table = target
        if cutlass.const_expr(self.c.split > 1):
            table = target + (entry & 1) * (self.c.target_bytes // 2)
        return table

    @cute.jit
    def write_targets(
        self, targets: Int32, pairs, router: Int64, out: Int64, out_stride: Int32, first: Int32, count: Int32,
        lane: Int32,
    ):  # fmt: skip
        """Where each token of the work tile is stored and with which weight, one lane a token."""
        c = self.c
        cute.arch.sync_warp()
        if lane < count and lane < 8 * c.n_tiles:
            pair = Int64(self.route.pair(pairs, first + lane))
            weight = Float32(1.0)
            at = out + pair * (Int64(out_stride) * (2 if c.gated else 4))
            if cutlass.const_expr(not c.gated):
                weight = ptx.ldg_f32(router + pair * 4)
            ptx.sts_target(targets + lane * 16, at, weight)
        cute.arch.sync_warp()

    # ---- a team adds up in shared memory ---------------------------------------------------------

    @cute.jit
    def finish_team(
        self, acc: cute.Tensor, partial: Int32, targets: Int32, team: Int32, member: Int32, lane: Int32,
        row: Int32, count: Int32, stored: tuple,
    ):  # fmt: skip
        """`row`: the item within its expert; `stored`: see `stored_alphas`. Every warp of the team calls this
        for every item."""
        c = self.c
        threads = cutlass.const_expr(32 * c.split)
        cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
        for u in cutlass.range_constexpr(c.units):
            mine = partial + (member * c.units + u) * 512 + lane * 16
            ptx.sts_f32x4(mine, acc[0, u], acc[1, u], acc[2, u], acc[3, u])
        cute.arch.barrier(barrier_id=1 + team, number_of_threads=threads)
        for u in cutlass.range_constexpr(c.units):
            if member == u % c.split:
                alphas = self.alphas(stored)
                total = [Float32(0.0) for _ in range(4)]
                for s in cutlass.range_constexpr(c.split):
                    part = ptx.lds_f32x4(partial + (s * c.units + u) * 512 + lane * 16)
                    total = [a + b for a, b in zip(total, part, strict=True)]
                self.store(u, tuple(total), targets, lane, row, count, alphas)

    # ---- runs of the sequence of chunks ----------------------------------------------------------

    @cute.jit
    def finish_run(
        self, acc: cute.Tensor, targets: Int32, lane: Int32, row: Int32, count: Int32, stored: tuple,
        partials: Int64, flags: Int64, worker: Int32, runs: tuple, item: Int32, a: Int32,
        b: Int32, chunks: Int32,
    ):  # fmt: skip
        """A warp with the chunks [a, b) of an item stores it, or leaves its part for the warp with the end.

        Warps take their items in descending order, so a part that another warp waits for is the first
        thing that its warp computes, and no order of CTAs can make them wait for each other.
        """
        c = self.c
        if b < chunks:
            mine = partials + Int64(worker) * (c.units * 512) + Int64(lane * 16)
            for u in cutlass.range_constexpr(c.units):
                words = [ptx.float_bits(acc[i, u]) for i in range(4)]
                ptx.stg128(mine + u * 512, *words)
            cute.arch.sync_warp()
            if lane == 0:
                ptx.release32(flags + Int64(worker) * 4, Uint32(1))
        else:
            if a > 0:
                self.add_parts(acc, partials, flags, worker, runs, item, chunks, lane)
            alphas = self.alphas(stored)
            for u in cutlass.range_constexpr(c.units):
                values = (acc[0, u], acc[1, u], acc[2, u], acc[3, u])
                self.store(u, values, targets, lane, row, count, alphas)

    @cute.jit
    def add_parts(
        self, acc: cute.Tensor, partials: Int64, flags: Int64, worker: Int32, runs: tuple, item: Int32,
        chunks: Int32, lane: Int32,
    ):  # fmt: skip
        """acc = the parts of the warps before this one, in order, plus acc; frees their flags."""
        c = self.c
        run, longer = runs
        start = item * chunks
        owner = start // (run + 1)
        if owner >= longer:
            owner = longer + (start - longer * (run + 1)) // run
        own = cute.make_rmem_tensor((4, c.units), Float32)
        for u in cutlass.range_constexpr(c.units):
            for i in cutlass.range_constexpr(4):
                own[i, u] = acc[i, u]
        acc.fill(0.0)
        for w in cutlass.range(owner, worker, unroll=1):
            ready = ptx.acquire32(flags + Int64(w) * 4)
            while ready == 0:
                ready = ptx.acquire32(flags + Int64(w) * 4)
            cute.arch.sync_warp()
            other = partials + Int64(w) * (c.units * 512) + Int64(lane * 16)
            for u in cutlass.range_constexpr(c.units):
                part = ptx.ldg_f32x4_uncached(other + u * 512)
                for i in cutlass.range_constexpr(4):
                    acc[i, u] = acc[i, u] + part[i]
            if lane == 0:
                ptx.stg32(flags + Int64(w) * 4, Uint32(0))
        for u in cutlass.range_constexpr(c.units):
            for i in cutlass.range_constexpr(4):
                acc[i, u] = acc[i, u] + own[i, u]

    # ---- stores ----------------------------------------------------------------------------------

    @cute.jit
    def store(
        self, unit: cutlass.Constexpr, values: tuple, targets: Int32, lane: Int32, item: Int32, count: Int32,
        alphas: tuple,
    ):  # fmt: skip
        """Stores two tokens' values of rows r (the first two) and r + 8 of one fragment."""
        c = self.c
        fragment = item * (2 * c.blocks) + unit // c.n_tiles
        row = lane // 4
        token = cutlass.const_expr(unit % c.n_tiles) * 8 + lane % 4 * 2
        for i in cutlass.range_constexpr(2):
            if token + i < count:
                at, weight = ptx.lds_target(targets + (token + i) * 16)
                low = values[i] * alphas[0]
                high = values[2 + i] * alphas[1]
                if cutlass.const_expr(c.gated):
                    value = self.act(low, high)
                    ptx.stg16(at + Int64(fragment * 8 + row) * 2, ptx.pack_bf16x2(value, value))
                else:
                    at = at + Int64(fragment * 16 + row) * 4
                    ptx.stg_f32(at, low * weight)
                    ptx.stg_f32(at + 32, high * weight)

    @cute.jit
    def alphas(self, stored: tuple):
        """Global scales of rows r and r + 8 (gate and up where gated), with the products' power of two."""
        return stored[0] * Float32(PRODUCT_FACTOR), stored[1] * Float32(PRODUCT_FACTOR)

    @cute.jit
    def stored_alphas(self, alpha: Int64, expert: Int32):
        """An expert's global scales as they are in memory, on their way."""
        if cutlass.const_expr(self.c.gated):
            first = ptx.ldg_f32(alpha + Int64(expert) * 8)
            second = ptx.ldg_f32(alpha + Int64(expert) * 8 + 4)
        else:
            first = ptx.ldg_f32(alpha + Int64(expert) * 4)
            second = first
        return first, second

    @cute.jit
    def act(self, gate: Float32, up: Float32):
        """The gated activation; `supported` lists the kinds."""
        a = self.c.activation
        if cutlass.const_expr(a.kind == "swiglu_step"):
            silu = self.clamp(gate * self.sigmoid(gate), a.limit, False)
            return silu * self.clamp(up, a.limit, True)
        if cutlass.const_expr(a.limit is not None):
            gate = self.clamp(gate, a.limit, False)
            up = self.clamp(up, a.limit, True)
        if cutlass.const_expr(a.kind == "swiglu_oai"):
            return gate * self.sigmoid(gate * Float32(a.alpha)) * (up + Float32(a.beta))
        return gate * self.sigmoid(gate) * up

    @cute.jit
    def sigmoid(self, v: Float32):
        return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-v, fastmath=True))

    @cute.jit
    def clamp(self, v: Float32, limit: cutlass.Constexpr, both: cutlass.Constexpr):
        v = ptx.min_nan(v, Float32(limit))
        if cutlass.const_expr(both):
            v = ptx.max_nan(v, Float32(-limit))
        return v


def supported(activation: Activation) -> bool:
    """Whether `Epilogue.act` computes this activation."""
    return activation.gated and activation.kind in ("silu", "swiglu_oai", "swiglu_step")
