"""What a warp of the consumers of `wide_gemm` does over and over: from a tile in the ring to its products.

A warp's rows are two fragments of 16, rebuilt in turn into two operands with an accumulator of all tokens
each, so that one is multiplied while the other is rebuilt; or one, whose operand both accumulators take, for
half of the tokens each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from .. import layout, ptx
from .dequant import Dequant
from .feed import BARRIERS, TOKEN_BYTES, Feed

# Where a warp is in the ring: addresses of its words of the tile and (as the matrix instructions want it) of
# the tokens; the stage's barrier and phase; tiles left; whether the tile is the second of its stage; the
# barrier of the stage before, and whether that is still to be released by this lane.
WORDS, TOKENS, FULL, PHASE, LEFT, ODD, FULL_BEFORE, DONE = range(8)
STATE = 8
FRAGMENT_BYTES = layout.WEIGHT_BYTES // 2  # of a tile's weights
STEP_UNITS = ptx.STEP * TOKEN_BYTES // 16  # by which a descriptor grows for so many tokens as a width's step


class Chain:
    """Device code; `width`: of the products, see `ptx.products_of_64`."""

    def __init__(self, feed: Feed, dequant: Dequant):
        self.c = feed.c
        self.feed = feed
        self.dequant = dequant

    @cute.jit
    def enter(self, base: Int32, begun: Int32, k_tiles: Int32, warp: Int32, lane: Int32):
        """Where the warp is in the ring, at a tile whose first stage is number `begun`, once that is full;
        and where the ring begins and ends."""
        feed = self.feed
        slot = begun % self.c.stages
        block, fragment = self.c.part(warp)
        words = feed.weights(base, Int32(0), block) + (fragment * FRAGMENT_BYTES + lane * 16)
        tokens = Int32(ptx.rows_descriptor(feed.token_rows(base, Int32(0), 0)))
        at = cute.make_rmem_tensor(STATE, Int32)
        at[WORDS] = words + slot * self.c.weight_bytes
        at[TOKENS] = tokens + slot * (self.c.tokens_bytes // 16)
        at[FULL] = feed.full(base, slot)
        at[PHASE] = (begun // self.c.stages) & 1
        at[LEFT] = k_tiles
        at[ODD] = Int32(0)
        at[FULL_BEFORE] = at[FULL]
        at[DONE] = Int32(0)
        feed.wait(at[FULL], at[PHASE])
        return at, (words, tokens, feed.full(base, Int32(0)))

    @cute.jit
    def fetch(self, raw: cute.Tensor, at: cute.Tensor, m: cutlass.Constexpr, fragment: Int32, lane: Int32):
        """The lane's packed weights of a fragment of the tile where the warp is; first its codes, too."""
        found = ptx.lds128(at[WORDS] + m * FRAGMENT_BYTES)
        for i in cutlass.range_constexpr(4):
            raw[m * 4 + i] = found[i]
        if cutlass.const_expr(m == 0):
            raw[4 * self.c.fragments] = self.dequant.codes(self.tile_at(at, fragment, lane), lane)

    @cute.jit
    def tile_at(self, at: cute.Tensor, fragment: Int32, lane: Int32):
        """Where the tile begins whose words the warp has."""
        return at[WORDS] - (fragment * FRAGMENT_BYTES + lane * 16)

    @cute.jit
    def operand(self, words: list, scale: Uint32):
        """16 rows of 64 columns, in the registers of four A fragments."""
        a = []
        for word in words:
            a.extend(self.dequant.fragment(word, scale))
        return a

    @cute.jit
    def multiply(self, accs: tuple, a: list, bs: list, width: list):
        """Issues acc + a @ b of each accumulator and its b, as one group."""
        size = cutlass.const_expr(cute.size(accs[0]))
        values = [[acc[i] for i in range(size)] for acc in accs]
        warpgroup.fence()
        after = ptx.products_of_64(values, a, bs, width, self.c.tokens // ptx.STEP)
        for acc, new in zip(accs, after, strict=True):
            for i in cutlass.range_constexpr(size):
                acc[i] = new[i]

    @cute.jit
    def step(
        self, acc: tuple, width: list, raw: cute.Tensor, at: cute.Tensor, ring: tuple, scaling: tuple,
        lane: Int32,
    ):  # fmt: skip
        """Issues the products of a tile, 64 columns, and fetches the next one.

        This is the only place where products are issued: ptxas gives every place registers of its own.
        Few instructions count more here than anything else.
        """
        sv = self.scales(raw[8], at, scaling, lane)
        tokens = ptx.descriptors(at[TOKENS], layout.TILE_K // 16)
        before, done = at[FULL_BEFORE], at[DONE]
        at[DONE] = Int32(0)
        for m in cutlass.range_constexpr(2):
            # The registers of two groups ago are free; so is the stage before this one, once the first
            # group of this one is the only one left.
            warpgroup.wait_group(1)
            if cutlass.const_expr(m == 1):
                self.feed.release_at(before, Uint32(done))
            a = self.operand([raw[m * 4 + i] for i in range(4)], sv[m])
            self.multiply((acc[m],), a, [tokens], width)
            if cutlass.const_expr(m == 0):
                self.advance(at, ring, lane)
            self.fetch(raw, at, m, Int32(0), lane)

    @cute.jit
    def step_of_one(
        self, acc: tuple, width: list, raw: cute.Tensor, at: cute.Tensor, ring: tuple, scaling: tuple,
        one: tuple, lane: Int32,
    ):  # fmt: skip
        """As `step`, of one fragment a warp, whose operand both accumulators take. `one`: see there.

        The products of the tile before read their operand while this one's weights are taken apart; only
        the multiplications with the scales, which write the operand's registers, wait for them.
        """
        fragment, _, _, second = one
        # Before the branch to exceptions: ptxas moves what stands right before the wait behind it.
        values = ptx.here([self.dequant.values(raw[i // 4], i % 4) for i in range(16)])
        sv = self.scales_of_one(raw[4], at, scaling, one, lane)
        tokens = [ptx.descriptors(first, layout.TILE_K // 16) for first in (at[TOKENS], at[TOKENS] + second)]
        before, done = at[FULL_BEFORE], at[DONE]
        at[DONE] = Int32(0)
        warpgroup.wait_group(0)
        self.feed.release_at(before, Uint32(done))
        a = [self.dequant.scaled(value, sv, i % 4) for i, value in enumerate(values)]
        self.multiply(acc, a, tokens, width)
        self.advance(at, ring, lane)
        self.fetch(raw, at, 0, fragment, lane)

    @cute.jit
    def one(self, warp: Int32, bases2: tuple, width: Int32):
        """Of a warp with one fragment: which one, how its codes are found, its bases, and how far the tokens
        of the second accumulator lie behind those of the first, in units of the descriptors."""
        _, fragment = self.c.part(warp)
        base = Uint32(cutlass.select_(fragment == 0, bases2[0], bases2[1]))
        return fragment, ptx.here(self.dequant.split(fragment)), base, ptx.shares(width, 2)[0] * STEP_UNITS

    @cute.jit
    def advance(self, at: cute.Tensor, ring: tuple, lane: Int32):
        """To the next tile, once it is there. Behind the last one, what is fetched is not used."""
        f = self.c
        at[LEFT] = at[LEFT] - 1
        odd = at[ODD]
        at[ODD] = odd ^ 1
        if odd == 0:
            at[WORDS] = at[WORDS] + f.tile_bytes
            at[TOKENS] = at[TOKENS] + f.rows_bytes // 16
        elif at[LEFT] > 0:
            at[WORDS] = at[WORDS] + (f.weight_bytes - f.tile_bytes)
            at[TOKENS] = at[TOKENS] + (f.tokens_bytes - f.rows_bytes) // 16
            at[FULL_BEFORE] = at[FULL]
            at[DONE] = Int32(lane == 0)
            at[FULL] = at[FULL] + BARRIERS
            if at[FULL] == ring[2] + self.c.stages * BARRIERS:
                at[WORDS] = ring[0]
                at[TOKENS] = ring[1]
                at[FULL] = ring[2]
                at[PHASE] = at[PHASE] ^ 1
            self.feed.wait(at[FULL], at[PHASE])

    @cute.jit
    def scales(self, codes: Uint32, at: cute.Tensor, scaling: tuple, lane: Int32):
        """The lane's scales of a tile: bf16 pairs of its two fragments."""
        bases2, rare = scaling[:2]
        sv0, sv1 = self.dequant.scales_of(codes, bases2[0], bases2[1])
        if (rare[0] & Uint32(1)) != 0:
            sv0, sv1 = self.rare_scales(sv0, sv1, self.tile_at(at, Int32(0), lane), scaling, lane)
        rare[0] = rare[0] >> Uint32(1)
        rare[1] = rare[1] + Uint32(1 << 26)
        return sv0, sv1

    @cute.jit
    def scales_of_one(self, codes: Uint32, at: cute.Tensor, scaling: tuple, one: tuple, lane: Int32):
        """As `scales`, of one fragment: `one` says which."""
        fragment, split, base, _ = one
        rare = scaling[1]
        own = self.dequant.scales_of_one(codes, split, base)
        if (rare[0] & Uint32(1)) != 0:
            sv0, sv1 = self.rare_scales(own, own, self.tile_at(at, fragment, lane), scaling, lane)
            own = Uint32(cutlass.select_(fragment == 0, sv0, sv1))
        rare[0] = rare[0] >> Uint32(1)
        rare[1] = rare[1] + Uint32(1 << 26)
        return own

    @cute.jit
    def rare_scales(self, sv0: Uint32, sv1: Uint32, address: Int32, scaling: tuple, lane: Int32):
        """The scales of a tile that has exceptions, or keeps whole bytes."""
        _, rare, heads, queue, pending, dense_rows, any_dense = scaling
        if any_dense != 0:
            inside = Int32(rare[1] >> Uint32(26)) - 1
            sv0, sv1 = self.dequant.dense_scales(address, lane, dense_rows[0], inside)
        else:
            sv0, sv1, heads[0], queue[0, 0] = self.dequant.patch_pending(
                sv0, sv1, heads[0], queue[0, 0], queue[1, 0], rare[1], pending[0]
            )
        return sv0, sv1
