"""The end of a tile of `wide_gemm`: activation or router weight, transposition, stores of 16 bytes."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import ptx
from ..activation import Activation
from .epilogue import PRODUCT_FACTOR, Epilogue, EpilogueConfig
from .feed import GROUPS, ROWS, ROWS_BYTES, TOKEN_BYTES
from .route import Route

AT_ONCE = 4  # tokens that a thread carries from shared to global memory
PADDING = 16  # bytes behind each row, so that eight of them lie in different banks


@dataclass(frozen=True)
class WideEpilogueConfig:
    """`staged`: tokens that are staged in shared memory at a time, a multiple of `tokens_at_once` unless all.

    A warp has `fragments` of 16 rows: two, each with an accumulator of all tokens, or one, whose
    accumulators have half of the tokens each (see `ptx.shares`).
    """

    gated: bool
    tokens: int
    staged: int
    activation: Activation
    fragments: int = 2

    @property
    def parts(self) -> int:
        return -(-self.tokens // self.staged)

    @property
    def halves(self) -> int:
        """Accumulators over which the tokens are spread."""
        return 3 - self.fragments

    @property
    def half_steps(self) -> int:
        """Steps of 16 tokens of an accumulator."""
        return self.tokens // 16 // self.halves

    def steps(self, part: int) -> range:
        """Those that are staged together, numbered in the order of the registers."""
        first = part * self.staged // 16
        return range(first, min(first + self.staged // 16, self.tokens // 16))

    @property
    def piece_bytes(self) -> int:
        """Of a token in shared memory, what one fragment of one warp gives: 8 or 16 channels."""
        return 16 if self.gated else 32

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
        return 2 * self.fragments * self.piece_bytes

    @property
    def chunks(self) -> int:
        """Of 16 bytes, of a token and a warpgroup: one a thread."""
        return self.channels // 8

    @property
    def tokens_at_once(self) -> int:
        """Tokens that a warpgroup stores in one go, and how many it stages at least."""
        return 128 // self.chunks

    @property
    def row_bytes(self) -> int:
        return 2 * self.channels + PADDING

    @property
    def shared_bytes(self) -> int:
        """Of one warpgroup."""
        return self.table_bytes + self.staged * self.row_bytes


class WideEpilogue:
    """Device code; the two accumulators are those of `wgmma` of 64 rows, a warp's 16 rows each."""

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
        """`room`: the warpgroup's shared memory; what it staged before has been read by all of it. `width`:
        of the products, in steps of 16 tokens."""
        rows, weights = addressed
        alphas = tuple(alpha * Float32(PRODUCT_FACTOR) for alpha in alphas)
        member = warp % 4
        for i in cutlass.range_constexpr(self.c.rounds):
            ptx.sts64(room + (i * 128 + member * 32 + lane) * 8, Uint32(rows[i]), weights[i])
        self.meet(group)
        held = (width,)
        if cutlass.const_expr(self.c.halves > 1):
            held = tuple(ptx.shares(width, self.c.halves))
        tokens = (held, count)
        if cutlass.const_expr(self.c.gated):
            self.store_gated(acc, tokens, alphas, target, room, m_tile, group, row_blocks, member, lane)
        else:
            self.store_down(acc, tokens, alphas, target, room, m_tile, group, row_blocks, member, lane)

    # ---- accumulators and tokens: tokens are staged in the order of the registers -----------------

    @cute.jit
    def any_held(self, steps: cutlass.Constexpr, held: tuple):
        """Whether any of these steps of 16 tokens has some. `held`: steps of each accumulator."""
        found = cutlass.Boolean(False)
        for half in cutlass.range_constexpr(self.c.halves):
            mine = cutlass.const_expr([i for i in steps if i // self.c.half_steps == half])
            if cutlass.const_expr(len(mine) > 0):
                found = found | (mine[0] - half * self.c.half_steps < held[half])
        return found

    @cute.jit
    def place_of(self, staged: Int32, tokens: tuple):
        """Of a token in the order of the registers: the number in the work tile, and above which number
        there are none in its accumulator."""
        held, count = tokens
        if cutlass.const_expr(self.c.halves == 1):
            return staged, count
        token, limit = staged, cutlass.min(held[0] * 16, count)
        beyond = staged - self.c.half_steps * 16
        if beyond >= 0:
            token = beyond + held[0] * 16
            limit = count
        return token, limit

    # ---- gate and up -----------------------------------------------------------------------------

    @cute.jit
    def store_gated(
        self, acc: tuple, tokens: tuple, alphas: tuple, target: tuple, room: Int32,
        m_tile: Int32, group: Int32, row_blocks: Int32, member: Int32, lane: Int32,
    ):  # fmt: skip
        """16 rows of a warp are 8 channels, gate and up eight rows apart: 16 bytes of a token.

        64 channels of a token go to memory in MMA order, see `arrange`. Of a chunk of 16 bytes each of four
        row blocks gives 4, so that a warpgroup either has all of a token's eight, or, where it has one
        fragment of each block, four.
        """
        c = self.c
        staged = room + c.table_bytes
        _, _, out, out_stride = target
        mine = staged + lane % 16 * c.row_bytes + member * (c.fragments * 16)
        thread = member * 32 + lane
        chunk = thread % c.chunks
        sixty_four = m_tile * c.fragments
        first_chunk = Int32(0)
        if cutlass.const_expr(c.fragments == 2):
            sixty_four += group
        else:
            first_chunk = group * 4
        for p in cutlass.range_constexpr(c.parts):
            steps = cutlass.const_expr(c.steps(p))
            if self.any_held(steps, tokens[0]):
                for j in cutlass.range_constexpr(len(steps)):
                    half, inside = cutlass.const_expr(divmod(steps[j], c.half_steps))
                    if inside < tokens[0][half]:
                        for m in cutlass.range_constexpr(c.fragments):
                            place = mine + j * (16 * c.row_bytes) + m * 16
                            self.stage_gated(acc[half + m], inside, alphas, place)
                self.meet(group)
                if sixty_four * 4 < row_blocks:
                    rounds = cutlass.const_expr(len(steps) * 16 // c.tokens_at_once)
                    for i in cutlass.range_constexpr(0, rounds, AT_ONCE):
                        local = [
                            thread // c.chunks + j * c.tokens_at_once
                            for j in range(i, min(i + AT_ONCE, rounds))
                        ]
                        places = [self.place_of(p * c.staged + one, tokens) for one in local]
                        found = [
                            self.gated_words(staged, room, one, token, chunk)
                            for one, (token, _) in zip(local, places, strict=True)
                        ]
                        for (token, limit), (words, slot) in zip(places, found, strict=True):
                            if token < limit:
                                self.put_gated(out, out_stride, slot, sixty_four, first_chunk + chunk, words)
                self.meet(group)

    @cute.jit
    def gated_words(self, staged: Int32, room: Int32, local: Int32, token: Int32, chunk: Int32):
        """A thread's words of a staged token, and the token's slot."""
        source = staged + local * self.c.row_bytes + chunk * 4
        words = [ptx.lds32(source + q * (self.c.fragments * 16)) for q in range(4)]
        return words, Int32(ptx.lds32(room + token * 8))

    @cute.jit
    def put_gated(self, h: Int64, groups: Int32, slot: Int32, sixty_four: Int32, chunk: Int32, words: list):
        """16 bytes of h, which lies as `feed` wants it."""
        row = slot & Int32(ROWS - 1)
        group = Int64(sixty_four) * Int64(groups) + Int64(slot // ROWS)
        ptx.stg128(h + group * ROWS_BYTES + Int64(row * TOKEN_BYTES + ((chunk ^ row) * 16)), *words)

    @cute.jit
    def stage_gated(self, acc: cute.Tensor, j: cutlass.Constexpr, alphas: tuple, mine: Int32):
        """16 tokens of one of the warp's fragments."""
        words = []
        for half in cutlass.range_constexpr(2):
            at = cutlass.const_expr((2 * j + half) * 4)
            values = [self.values.act(acc[at + i] * alphas[0], acc[at + 2 + i] * alphas[1]) for i in range(2)]
            words.append(ptx.pack_bf16x2(values[0], values[1]))
        ptx.store_transposed2(mine, *words)

    # ---- down ------------------------------------------------------------------------------------

    @cute.jit
    def store_down(
        self, acc: tuple, tokens: tuple, alphas: tuple, target: tuple, room: Int32,
        m_tile: Int32, group: Int32, row_blocks: Int32, member: Int32, lane: Int32,
    ):  # fmt: skip
        """16 rows of a warp are 16 channels: 32 bytes of a token."""
        c = self.c
        staged = room + c.table_bytes
        _, _, out, out_stride = target
        thread = member * 32 + lane
        # matrices 0, 1: rows r and r + 8 of eight tokens; 2, 3: of the next eight
        matrix = lane // 8
        mine = staged + (matrix // 2 * 8 + lane % 8) * c.row_bytes
        mine = mine + member * (c.fragments * 32) + matrix % 2 * 16
        chunk = thread % c.chunks
        channel = (m_tile * GROUPS + group) * c.channels + chunk * 8
        for p in cutlass.range_constexpr(c.parts):
            steps = cutlass.const_expr(c.steps(p))
            if self.any_held(steps, tokens[0]):
                for j in cutlass.range_constexpr(len(steps)):
                    half, inside = cutlass.const_expr(divmod(steps[j], c.half_steps))
                    if inside < tokens[0][half]:
                        begin = inside * 16
                        if cutlass.const_expr(half > 0):
                            begin = (inside + tokens[0][0]) * 16
                        factors = self.down_factors(begin, alphas, room, lane)
                        for m in cutlass.range_constexpr(c.fragments):
                            place = mine + j * (16 * c.row_bytes) + m * 32
                            self.stage_down(acc[half + m], inside, factors, place)
                self.meet(group)
                if channel < row_blocks * 32:
                    rounds = cutlass.const_expr(len(steps) * 16 // c.tokens_at_once)
                    for i in cutlass.range_constexpr(0, rounds, AT_ONCE):
                        local = [
                            thread // c.chunks + j * c.tokens_at_once
                            for j in range(i, min(i + AT_ONCE, rounds))
                        ]
                        places = [self.place_of(p * c.staged + one, tokens) for one in local]
                        found = [
                            self.down_words(staged, room, one, token, chunk)
                            for one, (token, _) in zip(local, places, strict=True)
                        ]
                        for (token, limit), (words, pair) in zip(places, found, strict=True):
                            if token < limit:
                                row = out + Int64(pair) * Int64(out_stride) * 2
                                ptx.stg128(row + Int64(channel) * 2, *words)
                self.meet(group)

    @cute.jit
    def down_words(self, staged: Int32, room: Int32, local: Int32, token: Int32, chunk: Int32):
        """A thread's words of a staged token, and the token's pair."""
        words = ptx.lds128(staged + local * self.c.row_bytes + chunk * 16)
        return words, ptx.lds32(room + token * 8)

    @cute.jit
    def down_factors(self, begin: Int32, alphas: tuple, room: Int32, lane: Int32):
        """Of the lane's four of 16 tokens."""
        factors = []
        for half in cutlass.range_constexpr(2):
            token = begin + half * 8 + lane % 4 * 2
            for i in cutlass.range_constexpr(2):
                factors.append(ptx.bits_float(ptx.lds32(room + (token + i) * 8 + 4)) * alphas[0])
        return factors

    @cute.jit
    def stage_down(self, acc: cute.Tensor, j: cutlass.Constexpr, factors: list, mine: Int32):
        """16 tokens of one of the warp's fragments."""
        words = []
        for half in cutlass.range_constexpr(2):
            at = cutlass.const_expr((2 * j + half) * 4)
            f = factors[2 * half : 2 * half + 2]
            for r in cutlass.range_constexpr(2):
                low, high = acc[at + 2 * r], acc[at + 2 * r + 1]
                words.append(ptx.pack_bf16x2(low * f[0], high * f[1]))
        ptx.store_transposed4(mine, *words)
