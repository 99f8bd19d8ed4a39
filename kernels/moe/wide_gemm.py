"""One grouped GEMM of the expert layer for many tokens, at the rate of Hopper's tensor cores.

Computes for every work tile (expert, up to 128 or 224 tokens) of the routing, with the weights as the A
operand of `wgmma` from registers (output channels are M, tokens are N):

    gated:   h[slot, i]  = act(alpha_gate * (W13 x)[i]) * (alpha_up * (W13 x)[I + i])      bf16
    else:    y[pair, o]  = router_weight[pair] * alpha * (W2 h)[o]                          bf16

`h` lies as the second product's shared memory has it: see `feed`.

A persistent CTA takes tiles of 256 prepared rows of one work tile. A warpgroup of producers brings stages
of 128 columns into a ring: weights and `h` by bulk copies, the rows of x by 16-byte copies from wherever
they lie. Two warpgroups of consumers take 128 rows each: a warp owns a block of 32 rows, rebuilds its
scales and weights in registers, and hands them to the tensor cores as two 64-row operands in turn, so
that one is multiplied while the other is rebuilt. The consumers do not wait for each other: one stores
its results while the other still multiplies.

In a second form a warp owns one of a block's two fragments of 16 rows, so that a CTA has 128 rows and room
for up to 224 tokens: a weight is rebuilt for more of them, and tokens are read by twice as many CTAs.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from .. import layout, ptx
from ..activation import SILU, Activation
from .chain import FULL, LEFT, Chain
from .dequant import QUEUE_BYTES, Dequant
from .feed import DEPTH, GROUPS, ROWS, Feed, FeedConfig
from .route import Route, RouteConfig
from .slices import Slices
from .wide_epilogue import WideEpilogue, WideEpilogueConfig

THREADS = 128 * (GROUPS + 1)
# Of a thread of the consumers and of the producers, by the CTAs that share a multiprocessor; together at
# most what the CTA starts with, which is 168 and 80 a thread.
REGISTERS = {1: (224, 56), 2: (104, 24)}
# Of a CTA, by the CTAs that share a multiprocessor, less what aligning the ring can take.
SHARED_BYTES = {1: 232448 - 1024, 2: 233472 // 2 - 2048}


@dataclass(frozen=True)
class WideConfig:
    """What one compiled program of this kernel depends on. `tokens`: most of a work tile; `per_sm`: CTAs that
    share a multiprocessor; `fragments`: of 16 rows that a warp takes, 1 or 2.

    Raises ValueError where `tokens` cannot be halved into steps of 16 although a warp has one fragment.
    """

    gated: bool
    native: bool
    topk: int
    tokens: int = 128
    stages: int = 4
    per_sm: int = 1
    activation: Activation = SILU
    capacity: int = 1024
    wide_ids: bool = False
    mapped: bool = False
    fragments: int = 2

    def __post_init__(self) -> None:
        step = ptx.STEP * (3 - self.fragments)
        if self.tokens % step:
            raise ValueError(
                f"tokens is {self.tokens}, expected a multiple of {step} for fragments {self.fragments}"
            )

    @property
    def route(self) -> RouteConfig:
        return RouteConfig(
            self.capacity, self.tokens, self.wide_ids, self.mapped, 0, align=ROWS, step=ptx.STEP
        )

    @property
    def feed(self) -> FeedConfig:
        return FeedConfig(self.gated, self.native, self.topk, self.tokens, self.stages, self.fragments)

    @property
    def epilogue(self) -> WideEpilogueConfig:
        """Stages as many tokens at a time as there is room for."""
        whole = WideEpilogueConfig(self.gated, self.tokens, self.tokens, self.activation, self.fragments)
        least = max(16, whole.tokens_at_once)
        for parts in range(1, self.tokens // 16 + 1):
            staged = -(-self.tokens // (parts * least)) * least
            found = replace(whole, staged=min(staged, self.tokens))
            if self.ring_bytes + GROUPS * found.shared_bytes <= SHARED_BYTES[self.per_sm]:
                return found
        raise ValueError(f"{self} needs more than {SHARED_BYTES[self.per_sm]} bytes of shared memory")

    @property
    def ring_bytes(self) -> int:
        """The ring and the queues of exceptions."""
        return self.feed.shared_bytes + 4 * GROUPS * 32 * QUEUE_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + GROUPS * self.epilogue.shared_bytes


class WideGemm:
    """Device code of one program; `launch` is called from a host function under `cute.jit`."""

    def __init__(self, config: WideConfig):
        self.c = config
        self.route = Route(config.route)
        self.feed = Feed(config.feed, self.route)
        self.dequant = Dequant(config.native, False)
        self.slices = Slices(1, 1, self.dequant)
        self.chain = Chain(self.feed, self.dequant)
        self.epilogue = WideEpilogue(config.epilogue, self.route)

    @cute.jit
    def launch(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, row_blocks: Int32, k_tiles: Int32, ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Enqueues the kernel; all `Int64` are device addresses, see `PreparedMatrix` and `route`.

        Strides are in elements, but for `h`, where they are the groups of slots of a tile of K (see `feed`).
        """
        self.kernel(
            x, x_stride, tiles, bases, slices, starts, records, dense, alpha, entries, pairs, router, out,
            out_stride, row_blocks, k_tiles,
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True,
                 min_blocks_per_mp=self.c.per_sm, preferred_smem_carveout=100)  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int32, tiles: Int64, bases: Int64, slices: Int64, starts: Int64,
        records: Int64, dense: Int64, alpha: Int64, entries: Int64, pairs: Int64, router: Int64, out: Int64,
        out_stride: Int32, row_blocks: Int32, k_tiles: Int32,
    ):  # fmt: skip
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        memory = cutlass.memory.SmemAllocator()
        base = Int32(memory.allocate_array(Uint32, c.shared_bytes // 4, byte_alignment=1024).toint())
        self.feed.init_barriers(base, tid)
        cute.arch.sync_threads()
        if cutlass.const_expr(c.gated):
            ptx.wait_for_predecessor()
        ptx.dependents_may_start()

        m_tiles = (row_blocks + (c.feed.blocks - 1)) // c.feed.blocks
        works = self.route.count(entries)
        total = works * m_tiles
        if warp >= 4 * GROUPS:
            cute.arch.setmaxregister_decrease(REGISTERS[c.per_sm][1])
            thread = tid - 128 * GROUPS
            where = (m_tiles, total, bid, grid, thread)
            if cutlass.const_expr(c.gated):
                self.feed.run(base, x, x_stride, tiles, entries, pairs, row_blocks, k_tiles, *where)
            else:
                ptx.wait_for_predecessor()
                if thread < 32:
                    self.feed.run_bulk(base, x, x_stride, tiles, entries, row_blocks, k_tiles, *where)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[c.per_sm][0])
            weights = (bases, slices, starts, records, dense, alpha, row_blocks, k_tiles)
            target = (pairs, router, out, out_stride)
            self.consume(base, entries, weights, target, m_tiles, works, bid, grid, warp, lane)

    # ---- consumers -------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self, base: Int32, entries: Int64, weights: tuple, target: tuple, m_tiles: Int32,
        works: Int32, bid: Int32, grid: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        """Loads that depend on each other are spread over tiles: a tile's entry is requested two tiles ahead,
        what lies where the entry says one tile ahead, and its exceptions at the end of the one before."""
        c = self.c
        bases, slices, starts, records, dense, alpha, row_blocks, k_tiles = weights
        pairs = target[0]
        group = warp // 4
        queues = base + c.feed.shared_bytes + warp * (32 * QUEUE_BYTES)
        room = base + c.feed.shared_bytes + 4 * GROUPS * 32 * QUEUE_BYTES + group * c.epilogue.shared_bytes
        ahead = self.ahead()
        stride = (grid // m_tiles, grid % m_tiles, m_tiles)
        entry, m_tile = bid // m_tiles, bid % m_tiles
        next_entry, next_m = self.further(entry, m_tile, stride)
        word = self.route.request(entries, entry, works, lane)
        next_word = self.route.request(entries, next_entry, works, lane)
        self.look_ahead(ahead, weights, pairs, word, m_tile, warp, lane)
        self.load_exceptions(ahead, records, lane)
        begun = Int32(0)
        stages = (k_tiles + (DEPTH - 1)) // DEPTH
        while entry < works:
            expert, first, count = self.route.received(word)
            now = self.ahead()
            for mine, theirs in zip(now, ahead, strict=True):
                for i in cutlass.range_constexpr(cute.size(mine)):
                    mine[i] = theirs[i]
            after_entry, after_m = self.further(next_entry, next_m, stride)
            word = next_word
            next_word = self.route.request(entries, after_entry, works, lane)
            self.look_ahead(ahead, weights, pairs, word, next_m, warp, lane)
            block = m_tile * c.feed.blocks + self.c.feed.part(warp)[0]
            if block >= row_blocks:
                block = Int32(-1)
            if m_tile * c.feed.blocks + self.c.feed.part(group * 4)[0] < row_blocks:
                place = (expert, block, first, count, m_tile, group, warp, lane)
                self.tile(base, weights, target, queues, room, now, ahead, place, begun)
            else:
                self.feed.skip(base, begun, stages, lane)
                self.load_exceptions(ahead, records, lane)
            begun += stages
            entry, m_tile = next_entry, next_m
            next_entry, next_m = after_entry, after_m

    @cute.jit
    def further(self, entry: Int32, m_tile: Int32, stride: tuple):
        """The entry and the rows of this CTA's next tile."""
        entry += stride[0]
        m_tile += stride[1]
        if m_tile >= stride[2]:
            m_tile -= stride[2]
            entry += 1
        return entry, m_tile

    def ahead(self) -> tuple:
        """What is known of a tile before it starts: first slice, its bases, exceptions, a word of the
        expert's origins in each lane, the thread's tokens' pairs."""
        return (
            cute.make_rmem_tensor((2, 1), Uint32),
            cute.make_rmem_tensor(1, Uint32),
            cute.make_rmem_tensor((3, 1), Uint32),
            cute.make_rmem_tensor(1, Uint32),
            cute.make_rmem_tensor(self.c.epilogue.rounds, Int32),
        )

    @cute.jit
    def load_exceptions(self, ahead: tuple, records: Int64, lane: Int32):
        """Requests the exceptions of the next tile's first slice."""
        record0 = Uint32(cute.arch.shuffle_sync(ahead[3][0], 0))
        self.slices.load_exceptions(ahead[2], ahead[0], record0, records, lane)

    @cute.jit
    def look_ahead(
        self, ahead: tuple, weights: tuple, pairs: Int64, word: Uint32, m_tile: Int32, warp: Int32,
        lane: Int32,
    ):  # fmt: skip
        """Requests what the warp needs of a tile, but for the exceptions, which depend on it."""
        info, base_words, exceptions, origins, tokens = ahead
        bases, slices, starts, records, dense, alpha, row_blocks, k_tiles = weights
        info.fill(Uint32(0))
        exceptions.fill(Uint32(0))
        base_words.fill(Uint32(0))
        origins.fill(Uint32(0))
        tokens.fill(Int32(0))
        expert, first, count = self.route.received(word)
        block = m_tile * self.c.feed.blocks + self.c.feed.part(warp)[0]
        if cutlass.const_expr(not self.c.gated):
            if expert >= 0:
                self.epilogue.load_pairs(tokens, pairs, first, count, warp, lane)
        if expert >= 0 and block < row_blocks:
            # A word a lane: of a load that is the same in all lanes the compiler waits at once.
            origins[0] = ptx.ldg32(starts + (Int64(expert) * 16 + Int64(lane % 4 * 4)))
            origin = expert * row_blocks
            self.slices.load_info(info, slices, origin, block, Int32(0), Int32(0), k_tiles)
            self.slices.load_bases(base_words, bases, origin, block, Int32(0), lane)

    @cute.jit
    def tile(
        self, base: Int32, weights: tuple, target: tuple, queues: Int32, room: Int32, now: tuple,
        ahead: tuple, place: tuple, begun: Int32,
    ):  # fmt: skip
        """One tile of products, from the ring to memory."""
        c = self.c
        bases, slices, starts, records, dense, alpha, row_blocks, k_tiles = weights
        expert, block, first, count, m_tile, group, warp, lane = place
        width = (count + (ptx.STEP - 1)) // ptx.STEP
        digits = ptx.width_digits(count, c.tokens // ptx.STEP)
        acc = tuple(cute.make_rmem_tensor(c.tokens * c.fragments // 4, Float32) for _ in range(2))
        for part in acc:
            part.fill(0.0)
        info, base_words, exceptions, word, tokens = now
        record0 = Uint32(cute.arch.shuffle_sync(word[0], 0))
        dense0 = Uint32(cute.arch.shuffle_sync(word[0], 2))
        addressed = self.epilogue.address(target, tokens, first, count, warp, lane)
        alphas = self.epilogue.alphas(alpha, expert)
        fragment = self.c.feed.part(warp)[1]
        bases2 = self.dequant.base_pairs(base_words[0])
        next_info = cute.make_rmem_tensor((2, 1), Uint32)
        heads = cute.make_rmem_tensor(1, Uint32)
        queue = cute.make_rmem_tensor((2, 1), Int32)
        pending = cute.make_rmem_tensor(1, Uint32)
        dense_rows = cute.make_rmem_tensor(1, Int64)
        dense_rows.fill(Int64(0))
        origin = expert * row_blocks
        self.slices.load_info(next_info, slices, origin, block, Int32(1), Int32(0), k_tiles)
        raw = cute.make_rmem_tensor(4 * c.fragments + 1, Uint32)
        at, ring = self.chain.enter(base, begun, k_tiles, warp, lane)
        for m in cutlass.range_constexpr(c.fragments):
            self.chain.fetch(raw, at, m, fragment, lane)
        one = None
        if cutlass.const_expr(c.fragments == 1):
            one = self.chain.one(warp, bases2, width)
        visit = Int32(2)
        while at[LEFT] > 0:
            any_dense = self.slices.start_slice(
                info, info, exceptions, heads, queue, pending, dense_rows, dense, dense0, queues,
                Int32(0), lane, fragment if c.fragments == 1 else None,
            )  # fmt: skip
            for i in cutlass.range_constexpr(2):
                info[i] = next_info[i]
            self.slices.load_exceptions(exceptions, info, record0, records, lane)
            self.slices.load_info(next_info, slices, origin, block, visit, Int32(0), k_tiles)
            visit += 1
            rare = cute.make_rmem_tensor(2, Uint32)  # a bit for each tile with exceptions; `bound` of `patch`
            rare[0] = pending[0]
            if any_dense != 0:
                rare[0] = Uint32(0xFFFF)
            rare[1] = Uint32(1 << 26)
            scaling = (bases2, rare, heads, queue, pending, dense_rows, any_dense)
            for _ in cutlass.range(cutlass.min(at[LEFT], Int32(layout.SLICE_TILES)), unroll=1):
                if cutlass.const_expr(c.fragments == 2):
                    self.chain.step(acc, digits, raw, at, ring, scaling, lane)
                else:
                    self.chain.step_of_one(acc, digits, raw, at, ring, scaling, one, lane)
        self.load_exceptions(ahead, records, lane)
        warpgroup.wait_group(0)
        self.feed.release_at(at[FULL], Uint32(lane == 0))
        self.epilogue.store(
            acc, width, alphas, addressed, target, room, first, count, m_tile, group, row_blocks, warp, lane
        )
