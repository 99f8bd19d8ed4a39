"""The end of a tile of `wide_gemm`: activation or router weight, transposition, stores of 16 bytes."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import ptx
from ..activation import Activation
from ..layout import TILE_K
from .epilogue import PRODUCT_FACTOR, Epilogue, EpilogueConfig
from .feed import BLOCKS, ROWS, ROWS_BYTES, TOKEN_BYTES
from .route import Route

AT_ONCE = 4  # tokens that a thread carries from shared to global memory
PADDING = 16  # bytes behind each row, so that eight of them lie in different banks


@dataclass(frozen=True)
class WideEpilogueConfig:
    """`staged`: tokens that are staged in shared memory at a time, a multiple of 16 that divides `tokens`."""

    gated: bool
    tokens: int
    staged: int
    activation: Activation

    @property
    def rounds(self) -> int:
        """Tokens of the table that each thread looks up."""
        return -(-self.tokens // 128)

    @property
    def table_bytes(self) -> int:
        """Row of the output and router weight of each token."""
        return 8 * 128 * self.rounds

    @property
    def channels(self) -> int:
        """Of one warpgroup."""
        return 64 if self.gated else 128

    @property
    def row_bytes(self) -> int:
        return 2 * self.channels + PADDING

    @property
    def shared_bytes(self) -> int:
        """Of one warpgroup."""
        return self.table_bytes + self.staged * self.row_bytes


class WideEpilogue:
    """Device code; accumulators are those of two `wgmma` of 64 rows, a warp's 16 rows each."""

    def __init__(self, config: WideEpilogueConfig, route: Route):
        self.c = config
        self.route = route
        self.values = Epilogue(EpilogueConfig(config.gated, 1, 1, 1, config.activation), route)

    @cute.jit
    def alphas(self, alpha: Int64, expert: Int32):
        """Global scales, on their way; to be multiplied by PRODUCT_FACTOR."""
        first, second = self.values.stored_alphas(alpha, expert)
        return first, second

    @cute.jit
    def load_pairs(
        self, tokens: cute.Tensor, pairs: Int64, first: Int32, count: Int32, warp: Int32, lane: Int32
    ):
        """Requests the pairs of the thread's tokens of a work tile."""
        for i in cutlass.range_constexpr(self.c.rounds):
            token = i * 128 + (warp % 4) * 32 + lane
            if token < count:
                tokens[i] = self.route.pair(pairs, first + token)

    @cute.jit
    def address(
        self, target: tuple, tokens: cute.Tensor, first: Int32, count: Int32, warp: Int32, lane: Int32
    ):
        """The thread's tokens of the work tile: their rows of the output, and their router weights. `tokens`:
        their pairs, where rows are those of pairs."""
        _, router, _, _ = target
        rows, weights = [], []
        for i in cutlass.range_constexpr(self.c.rounds):
            token = i * 128 + (warp % 4) * 32 + lane
            row = Int32(0)
            weight = Uint32(0)
            if token < count:
                row = first + token
                if cutlass.const_expr(not self.c.gated):
                    row = tokens[i]
                    weight = ptx.ldg32(router + Int64(row) * 4)
            rows.append(row)
            weights.append(weight)
        return rows, weights

    @cute.jit
    def meet(self, group: Int32):
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)

    @cute.jit
    def store(
        self, acc: tuple, width: Int32, alphas: tuple, addressed: tuple, target: tuple,
        room: Int32, first: Int32, count: Int32, m_tile: Int32, group: Int32, row_blocks: Int32, warp: Int32,
        lane: Int32,
    ):  # fmt: skip
        """`room`: the warpgroup's shared memory; what it staged before has been read by all of it."""
        rows, weights = addressed
        alphas = tuple(alpha * Float32(PRODUCT_FACTOR) for alpha in alphas)
        member = warp % 4
        for i in cutlass.range_constexpr(self.c.rounds):
            ptx.sts64(room + (i * 128 + member * 32 + lane) * 8, Uint32(rows[i]), weights[i])
        self.meet(group)
        if cutlass.const_expr(self.c.gated):
            self.store_gated(acc, width, alphas, target, room, count, m_tile, group, row_blocks, member, lane)
        else:
            self.store_down(acc, width, alphas, target, room, count, m_tile, group, row_blocks, member, lane)

    # ---- gate and up -----------------------------------------------------------------------------

    @cute.jit
    def store_gated(
        self, acc: tuple, width: Int32, alphas: tuple, target: tuple, room: Int32, count: Int32,
        m_tile: Int32, group: Int32, row_blocks: Int32, member: Int32, lane: Int32,
    ):  # fmt: skip
        """A warp's 32 rows are 16 channels, gate and up eight rows apart: 32 bytes of a token."""
        staged = room + self.c.table_bytes
        _, _, out, out_stride = target
        mine = staged + lane % 16 * self.c.row_bytes + member * 32
        # 64 channels of a token go to memory in MMA order, see `arrange`.
        thread = member * 32 + lane
        chunk = thread % 8
        channel = m_tile * (BLOCKS * 16) + group * 64
        steps = cutlass.const_expr(self.c.staged // 16)
        for p in cutlass.range_constexpr(self.c.tokens // self.c.staged):
            if p * steps < width:
                for j in cutlass.range_constexpr(steps):
                    if p * steps + j < width:
                        for m in cutlass.range_constexpr(2):
                            place = mine + j * (16 * self.c.row_bytes) + m * 16
                            self.stage_gated(acc[m], p * steps + j, alphas, place)
                self.meet(group)
                if channel < row_blocks * 16:
                    for i in cutlass.range_constexpr(0, steps, AT_ONCE):
                        local = [thread // 8 + j * 16 for j in range(i, min(i + AT_ONCE, steps))]
                        found = [self.gated_words(staged, room, p, one, chunk) for one in local]
                        for one, (words, slot) in zip(local, found, strict=True):
                            if p * self.c.staged + one < count:
                                self.put_gated(out, out_stride, slot, channel, chunk, words)
                self.meet(group)

    @cute.jit
    def gated_words(self, staged: Int32, room: Int32, p: cutlass.Constexpr, local: Int32, chunk: Int32):
        """A thread's words of a staged token, and the token's slot."""
        source = staged + local * self.c.row_bytes + chunk * 4
        words = [ptx.lds32(source + q * 32) for q in range(4)]
        return words, Int32(ptx.lds32(room + (p * self.c.staged + local) * 8))

    @cute.jit
    def put_gated(self, h: Int64, groups: Int32, slot: Int32, channel: Int32, chunk: Int32, words: list):
        """16 bytes of h, which lies as `feed` wants it."""
        row = slot & Int32(ROWS - 1)
        group = Int64(channel // TILE_K) * Int64(groups) + Int64(slot // ROWS)
        ptx.stg128(h + group * ROWS_BYTES + Int64(row * TOKEN_BYTES + ((chunk ^ row) * 16)), *words)

    @cute.jit
    def stage_gated(self, acc: cute.Tensor, j: cutlass.Constexpr, alphas: tuple, mine: Int32):
        """16 tokens of one of the warp's two fragments."""
        words = []
        for half in cutlass.range_constexpr(2):
            at = cutlass.const_expr((2 * j + half) * 4)
            values = [self.values.act(acc[at + i] * alphas[0], acc[at + 2 + i] * alphas[1]) for i in range(2)]
            words.append(ptx.pack_bf16x2(values[0], values[1]))
        ptx.store_transposed2(mine, *words)

    # ---- down ------------------------------------------------------------------------------------

    @cute.jit
    def store_down(
        self, acc: tuple, width: Int32, alphas: tuple, target: tuple, room: Int32, count: Int32,
        m_tile: Int32, group: Int32, row_blocks: Int32, member: Int32, lane: Int32,
    ):  # fmt: skip
        """A warp's 32 rows are 32 channels: 64 bytes of a token."""
        staged = room + self.c.table_bytes
        _, _, out, out_stride = target
        thread = member * 32 + lane
        # matrices 0, 1: rows r and r + 8 of eight tokens; 2, 3: of the next eight
        matrix = lane // 8
        mine = staged + (matrix // 2 * 8 + lane % 8) * self.c.row_bytes + member * 64 + matrix % 2 * 16
        chunk = thread % 16
        channel = m_tile * (BLOCKS * 32) + group * 128 + chunk * 8
        steps = cutlass.const_expr(self.c.staged // 16)
        for p in cutlass.range_constexpr(self.c.tokens // self.c.staged):
            if p * steps < width:
                for j in cutlass.range_constexpr(steps):
                    if p * steps + j < width:
                        self.stage_down(
                            acc, p * steps + j, alphas, room, mine + j * (16 * self.c.row_bytes), lane
                        )
                self.meet(group)
                if channel < row_blocks * 32:
                    rounds = cutlass.const_expr(self.c.staged // 8)
                    for i in cutlass.range_constexpr(0, rounds, AT_ONCE):
                        local = [thread // 16 + j * 8 for j in range(i, min(i + AT_ONCE, rounds))]
                        found = [self.down_words(staged, room, p, one, chunk) for one in local]
                        for one, (words, pair) in zip(local, found, strict=True):
                            if p * self.c.staged + one < count:
                                row = out + Int64(pair) * Int64(out_stride) * 2
                                ptx.stg128(row + Int64(channel) * 2, *words)
                self.meet(group)

    @cute.jit
    def down_words(self, staged: Int32, room: Int32, p: cutlass.Constexpr, local: Int32, chunk: Int32):
        """A thread's words of a staged token, and the token's pair."""
        words = ptx.lds128(staged + local * self.c.row_bytes + chunk * 16)
        return words, ptx.lds32(room + (p * self.c.staged + local) * 8)

    @cute.jit
    def stage_down(
        self, acc: tuple, j: cutlass.Constexpr, alphas: tuple, room: Int32, mine: Int32, lane: Int32
    ):
        """16 tokens of the warp's two fragments."""
        factors = []
        for half in cutlass.range_constexpr(2):
            token = j * 16 + half * 8 + lane % 4 * 2
            for i in cutlass.range_constexpr(2):
                factors.append(ptx.bits_float(ptx.lds32(room + (token + i) * 8 + 4)) * alphas[0])
        for m in cutlass.range_constexpr(2):
            words = []
            for half in cutlass.range_constexpr(2):
                at = cutlass.const_expr((2 * j + half) * 4)
                f = factors[2 * half : 2 * half + 2]
                for r in cutlass.range_constexpr(2):
                    low, high = acc[m][at + 2 * r], acc[m][at + 2 * r + 1]
                    words.append(ptx.pack_bf16x2(low * f[0], high * f[1]))
            ptx.store_transposed4(mine + m * 32, *words)
