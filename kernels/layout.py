"""The prepared form: how one layer's expert weights lie in device memory for the kernels.

One `PreparedMatrix` holds a stack of E matrices [R, K] (w13: gate and up interleaved, R = 2 I, K = H;
w2: R = H, K = I), cut into tiles of 32 rows x 64 columns. A tile is contiguous, tiles follow each other
along K, then along R, then over experts:

    tiles   uint8  [E, RB, KT, 1024 + 64]    FP4 weights in MMA fragment order, then the scale codes
    bases   uint8  [E, RB, 8, 4]             the row bases of the block, by lane quad: base | 0x80, or 0
    slices  int32  [E, RB, S]                exceptions of each K slice: see `Slice entries`
    starts  int64  [E, 2]                    first exception record and first dense slot of the expert
    positions uint16 [n], bytes uint8 [n]    exception records: depth << 13 | tile << 7 | scale in the tile
    dense   uint8  [m, 64]                   the upper nibbles of tiles that are kept uncompressed

RB = R / 32, KT = K / 64, S = the number of warps that share a row block (`split_k`).

Fragment order. Lane l of a warp owns rows `l // 4` and `l // 4 + 8` of each 16-row fragment and the 16
columns `16 * (l % 4)` onwards: one scale group per row. Word s of its 16 bytes holds columns 4s .. 4s+3
of both rows, with the nibble bits placed so that each bf16 pair comes out by one shift and one mask.

Codes. The 16-bit word of a lane holds four codes: rows l//4 (fragments 0 and 1), then rows l//4 + 8.
A scale is `base + code`. Only normal positive E4M3 bytes (8 .. 126) are coded, because for these the
bf16 pattern is `(byte << 4) + constant`; every other byte is an exception record, and a row of zeros
has the base 0. The native form keeps the byte itself in place of the code (128 bytes a tile, no bases).

Exceptions. The scales of a tile are numbered fragment, half, lane (64, 32, 1); the low five bits of a
record name the lane that uses the scale. Each lane takes its own records in the order of the tiles, and
`depth` counts them within the slice.

Slice entries. count << 24 | first record, relative to the expert's `starts`. A slice holds at most
`MAX_RECORDS` records, `max_depth` of one lane; one with more exceptions is dense: `DENSE_FLAG | first
slot`, and each of its tiles has one slot in `dense`, which completes the 4-bit codes to whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_ROWS = 32
TILE_K = 64
GROUP = 16
WEIGHT_BYTES = TILE_ROWS * TILE_K // 2
TILE_SCALES = TILE_ROWS * TILE_K // GROUP
CODE_BYTES = TILE_SCALES // 2
LOWEST_CODED, HIGHEST_CODED = 8, 126
HIGHEST_BASE = HIGHEST_CODED - 15
MAX_RECORDS = 64
MAX_DEPTH, MAX_DEPTH_NATIVE = 5, 2
MAX_SLICE_TILES = 62
ROW_FLAG = 0x80
DENSE_SHARE = 16  # a slice is dense when more than one byte in so many is an exception
DENSE_FLAG = 1 << 31

# Bit of the packed word that holds bit b (3 = sign) of nibble n. Nibbles 2j and 2j+1 are the low and the
# high half of bf16 pair j: (row, columns 0 and 1), (row + 8, 0 and 1), (row, 2 and 3), (row + 8, 2 and 3).
_NIBBLE_BITS = (
    (4, 5, 6, 13),
    (20, 21, 22, 29),
    (0, 1, 2, 9),
    (16, 17, 18, 25),
    (10, 11, 12, 19),
    (26, 27, 28, 3),
    (14, 7, 8, 15),
    (30, 23, 24, 31),
)


def split_k(k_tiles: int) -> int:
    """Warps (1, 2, 4 or 8) that share one row block, each with at least four tiles along K."""
    for warps in (8, 4, 2):
        if -(-k_tiles // warps) >= 4:
            return warps
    return 1


@dataclass(frozen=True)
class Shape:
    """Sizes of one prepared stack, padding included. `gated`: rows are gate and up channels."""

    experts: int
    rows: int
    k: int
    gated: bool
    native: bool = False

    def __post_init__(self) -> None:
        if self.rows % TILE_ROWS or self.k % TILE_K:
            raise ValueError(f"rows {self.rows} and k {self.k} must be multiples of {TILE_ROWS} and {TILE_K}")
        if self.slice_tiles > MAX_SLICE_TILES:
            raise ValueError(f"k is {self.k}; at most {8 * MAX_SLICE_TILES * TILE_K} columns can be prepared")

    @property
    def max_depth(self) -> int:
        """Most exception records of one lane in one slice."""
        return MAX_DEPTH_NATIVE if self.native else MAX_DEPTH

    @property
    def row_blocks(self) -> int:
        return self.rows // TILE_ROWS

    @property
    def k_tiles(self) -> int:
        return self.k // TILE_K

    @property
    def slices(self) -> int:
        return split_k(self.k_tiles)

    @property
    def slice_tiles(self) -> int:
        return -(-self.k_tiles // self.slices)

    @property
    def tile_bytes(self) -> int:
        return WEIGHT_BYTES + CODE_BYTES * (2 if self.native else 1)

    def row_order(self) -> torch.Tensor:
        """Source row of each prepared row: int64 [rows], in the order block, fragment, half, row of 8."""
        index = torch.arange(self.rows).view(self.row_blocks, 2, 2, 8)
        if not self.gated:
            return index.reshape(-1)
        channel = torch.arange(self.rows // 2).view(self.row_blocks, 2, 8)
        return torch.stack((channel, channel + self.rows // 2), dim=2).reshape(-1)


@dataclass(frozen=True)
class PreparedMatrix:
    """One stack of expert matrices on its device; fields as in the module's docstring."""

    shape: Shape
    tiles: torch.Tensor
    bases: torch.Tensor
    slices: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    bytes: torch.Tensor
    dense: torch.Tensor

    @property
    def scale_bytes(self) -> int:
        """Resident bytes of everything that is not an FP4 weight."""
        s = self.shape
        total = sum(t.numel() * t.element_size() for t in self.tensors())
        return total - s.experts * s.row_blocks * s.k_tiles * WEIGHT_BYTES

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tiles, self.bases, self.slices, self.starts, self.positions, self.bytes, self.dense)


def pad(matrix: torch.Tensor, rows: int, columns: int, halves: int = 1) -> torch.Tensor:
    """Zero-pads [E, R, C] to [E, rows, columns]; each of the `halves` (gate, up) is padded at its own end."""
    experts, r, c = matrix.shape
    if (r, c) == (rows, columns):
        return matrix
    out = matrix.new_zeros(experts, halves, rows // halves, columns)
    out[:, :, : r // halves, :c] = matrix.view(experts, halves, r // halves, c)
    return out.view(experts, rows, columns)


# ---- FP4 weights ---------------------------------------------------------------------------------


def _placement(device: torch.device) -> torch.Tensor:
    """int32 [4, 256]: the packed word that byte b contributes as pair j (low nibble = low half)."""
    table = torch.zeros(4, 256, dtype=torch.int64)
    byte = torch.arange(256)
    for pair in range(4):
        for nibble in range(2):
            for bit, target in enumerate(_NIBBLE_BITS[2 * pair + nibble]):
                table[pair] |= ((byte >> (4 * nibble + bit)) & 1) << target
    return table.to(torch.int32).to(device) if device.type != "cpu" else table.to(torch.int32)


def pack_weights(weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """FP4 bytes uint8 [E, R, K/2] (low nibble = even column) to fragment order uint8 [E, RB, KT, 1024]."""
    e, s = weight.shape[0], shape
    rows = weight.index_select(1, s.row_order().to(weight.device))
    # block, fragment, half, row of 8, k tile, lane quarter, step, byte of the step
    v = rows.view(e, s.row_blocks, 2, 2, 8, s.k_tiles, 4, 4, 2).permute(0, 1, 5, 2, 4, 6, 7, 8, 3)
    table = _placement(weight.device)
    words = torch.zeros(v.shape[:-2], dtype=torch.int32, device=weight.device)
    for pair in range(4):
        words |= table[pair][v[..., pair // 2, pair % 2].to(torch.int32)]
    return words.contiguous().view(torch.uint8).view(e, s.row_blocks, s.k_tiles, WEIGHT_BYTES)


def unpack_weights(packed: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The inverse of `pack_weights`: uint8 [E, R, K/2]."""
    e, s = packed.shape[0], shape
    words = packed.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words = words.view(e, s.row_blocks, s.k_tiles, 2, 8, 4, 4)
    pairs = []
    for pair in range(4):
        byte = torch.zeros_like(words)
        for nibble in range(2):
            for bit, source in enumerate(_NIBBLE_BITS[2 * pair + nibble]):
                byte |= ((words >> source) & 1) << (4 * nibble + bit)
        pairs.append(byte)
    v = torch.stack(pairs, dim=-1).to(torch.uint8).view(e, s.row_blocks, s.k_tiles, 2, 8, 4, 4, 2, 2)
    rows = v.permute(0, 1, 3, 8, 4, 2, 5, 6, 7).reshape(e, s.rows, s.k // 2)
    out = torch.empty_like(rows)
    out[:, s.row_order().to(rows.device)] = rows
    return out


# ---- scales --------------------------------------------------------------------------------------


def _tile_order(scale: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[E, R, K/16] to [E, RB, KT, fragment, half, 8, 4], rows reordered."""
    e, s = scale.shape[0], shape
    rows = scale.index_select(1, s.row_order().to(scale.device))
    return rows.view(e, s.row_blocks, 2, 2, 8, s.k_tiles, 4).permute(0, 1, 5, 2, 3, 4, 6)


def _from_tile_order(tiled: torch.Tensor, shape: Shape) -> torch.Tensor:
    e, s = tiled.shape[0], shape
    rows = tiled.permute(0, 1, 3, 4, 5, 2, 6).reshape(e, s.rows, s.k // GROUP)
    out = torch.empty_like(rows)
    out[:, s.row_order().to(rows.device)] = rows
    return out


def choose_bases(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [..., R]: the lowest base in 8 .. 111 whose window of 16 holds the most bytes of a row; 0 for zeros."""
    flat = scale.reshape(-1, scale.shape[-1])
    out = torch.empty(flat.shape[0], dtype=torch.uint8, device=scale.device)
    for part, rows in zip(out.split(1 << 16), flat.split(1 << 16), strict=True):
        counts = torch.zeros(rows.shape[0], 256, dtype=torch.int32, device=scale.device)
        counts.scatter_add_(1, rows.to(torch.int64), torch.ones_like(rows, dtype=torch.int32))
        total = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
        window = total[:, LOWEST_CODED + 16 : HIGHEST_CODED + 2] - total[:, LOWEST_CODED : HIGHEST_BASE + 1]
        best, base = window.max(dim=1)
        # torch.max does not promise the first of equals
        base = (window == best[:, None]).to(torch.uint8).argmax(dim=1) + LOWEST_CODED
        part.copy_(torch.where(counts[:, 0] > best, 0, base))
    return out.view(scale.shape[:-1])


@dataclass(frozen=True)
class _Slices:
    """Exception bookkeeping of one stack: counts and density per slice, in slice order."""

    entries: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    bytes: torch.Tensor
    dense_tile: torch.Tensor


def _slice_exceptions(exception: torch.Tensor, scale: torch.Tensor, shape: Shape) -> _Slices:
    """`exception`, `scale`: bool and uint8 in tile order [E, RB, KT, 2, 2, 8, 4]."""
    e, s, device = exception.shape[0], shape, exception.device
    per_tile = exception.view(e, s.row_blocks, s.k_tiles, TILE_SCALES)
    tile_count = per_tile.sum(-1, dtype=torch.int32)
    padded = torch.nn.functional.pad(tile_count, (0, s.slices * s.slice_tiles - s.k_tiles))
    count = padded.view(e, s.row_blocks, s.slices, s.slice_tiles).sum(-1, dtype=torch.int32)
    limit = min(MAX_RECORDS, s.slice_tiles * TILE_SCALES // DENSE_SHARE)
    dense = (count > limit) | (_lane_counts(exception, s).amax(-1) > s.max_depth)
    tiles_in = (s.k_tiles - torch.arange(s.slices, device=device) * s.slice_tiles).clamp(0, s.slice_tiles)
    records = torch.where(dense, 0, count).view(e, -1).to(torch.int64)
    slots = (dense * tiles_in).view(e, -1).to(torch.int64)
    first_record, first_slot = records.cumsum(1) - records, slots.cumsum(1) - slots
    totals = torch.stack((records.sum(1), slots.sum(1)), dim=1)
    entry = torch.where(
        dense.view(e, -1), first_slot - DENSE_FLAG, (records << 24) | first_record
    ).to(torch.int32)
    slice_of_tile = torch.arange(s.k_tiles, device=device) // s.slice_tiles
    dense_tile = dense[:, :, slice_of_tile]
    kept = per_tile & ~dense_tile[..., None]
    where = kept.reshape(-1).nonzero().squeeze(1)
    tile = (where // TILE_SCALES) % s.k_tiles
    slice_index = where // (TILE_SCALES * s.k_tiles) * s.slices + tile // s.slice_tiles
    depth = _ranks(slice_index * 32 + where % 32)
    position = depth << 13 | (tile % s.slice_tiles) * TILE_SCALES | where % TILE_SCALES
    return _Slices(
        entries=entry.view(e, s.row_blocks, s.slices),
        starts=totals.cumsum(0) - totals,
        positions=position.to(torch.int16).view(torch.uint16),
        bytes=scale.reshape(-1)[where],
        dense_tile=dense_tile,
    )


def _lane_counts(exception: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Exceptions of each lane in each slice: int32 [E, RB, S, 32]."""
    s = shape
    lanes = exception.reshape(-1, s.row_blocks, s.k_tiles, 4, 32).sum(3, dtype=torch.int32)
    padded = torch.nn.functional.pad(lanes, (0, 0, 0, s.slices * s.slice_tiles - s.k_tiles))
    return padded.view(-1, s.row_blocks, s.slices, s.slice_tiles, 32).sum(3, dtype=torch.int32)


def _ranks(keys: torch.Tensor) -> torch.Tensor:
    """How many equal keys stand before each key: int64, same shape [n]."""
    order = torch.sort(keys, stable=True)
    place = torch.arange(keys.numel(), device=keys.device)
    new = torch.ones_like(order.values, dtype=torch.bool)
    new[1:] = order.values[1:] != order.values[:-1]
    start = torch.where(new, place, 0).cummax(0).values if keys.numel() else place
    out = torch.empty_like(keys)
    out[order.indices] = place - start
    return out


def _join_codes(code: torch.Tensor) -> torch.Tensor:
    """4-bit codes in tile order [..., fragment, half, 8, 4] to the lanes' 16-bit words, uint8 [..., 64]."""
    c = code.to(torch.int32)
    word = c[..., 0, 0, :, :] | c[..., 1, 0, :, :] << 4 | c[..., 0, 1, :, :] << 8 | c[..., 1, 1, :, :] << 12
    return word.to(torch.int16).flatten(-2).contiguous().view(torch.uint8)


def _split_codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_join_codes`: uint8 [..., 2, 2, 8, 4]."""
    w = words.contiguous().view(torch.int16).to(torch.int32).unflatten(-1, (8, 4))
    halves = [torch.stack((w >> (8 * h) & 15, w >> (8 * h + 4) & 15), dim=-3) for h in range(2)]
    return torch.stack(halves, dim=-3).to(torch.uint8)


def pack(weight: torch.Tensor, scale: torch.Tensor, shape: Shape, bases: torch.Tensor | None = None) -> PreparedMatrix:
    """Packs FP4 bytes uint8 [E, R, K/2] and scale bytes uint8 [E, R, K/16] on their device.

    `bases` (uint8 [E, R]) saves the search where a good base is known; any value is allowed.
    """
    s = shape
    expected = ((s.experts, s.rows, s.k // 2), (s.experts, s.rows, s.k // GROUP))
    if (tuple(weight.shape), tuple(scale.shape)) != expected:
        raise ValueError(f"weight and scale have shapes {tuple(weight.shape)}, {tuple(scale.shape)}; expected {expected}")
    if bases is None:
        bases = choose_bases(scale)
    tiled = _tile_order(scale, s).contiguous()
    base = bases.index_select(1, s.row_order().to(scale.device)).view(s.experts, s.row_blocks, 2, 2, 8)
    coded = torch.full_like(base, 0) if s.native else base
    code, exception = _code(tiled, coded[:, :, None, :, :, :, None], s.native)
    found = _slice_exceptions(exception, tiled, s)
    dense = tiled.new_empty(0, CODE_BYTES)
    if s.native:
        code = torch.where(found.dense_tile[..., None, None, None, None], tiled, code)
        words = code.permute(0, 1, 2, 5, 6, 4, 3).reshape(*found.dense_tile.shape, 2 * CODE_BYTES)
    else:
        chosen = found.dense_tile
        dense = _join_codes(tiled[chosen] >> 4)
        code = torch.where(chosen[..., None, None, None, None], tiled & 15, code)
        words = _join_codes(code)
    tiles = torch.cat((pack_weights(weight, s), words), dim=-1)
    flagged = torch.where(base == 0, 0, base | ROW_FLAG)
    by_quad = flagged.permute(0, 1, 4, 2, 3).reshape(s.experts, s.row_blocks, 8, 4)
    return PreparedMatrix(
        shape=s,
        tiles=tiles,
        bases=by_quad[:0].contiguous() if s.native else by_quad.contiguous(),
        slices=found.entries.contiguous(),
        starts=found.starts.contiguous(),
        positions=found.positions,
        bytes=found.bytes,
        dense=dense,
    )


def _code(tiled: torch.Tensor, base: torch.Tensor, native: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the mask of the bytes that they do not express (code 0 there)."""
    normal = (tiled >= LOWEST_CODED) & (tiled <= HIGHEST_CODED)
    if native:
        code, fits = tiled, normal
    else:
        code = tiled - base  # wraps below the base, which lands outside the window
        fits = torch.where(base == 0, tiled == 0, normal & (code < 16))
    return torch.where(fits, code, 0), ~fits


def unpack_scales(m: PreparedMatrix) -> torch.Tensor:
    """The scale bytes uint8 [E, R, K/16] of a prepared stack."""
    s = m.shape
    words = m.tiles[..., WEIGHT_BYTES:]
    entry = m.slices.to(torch.int64)
    slice_of_tile = torch.arange(s.k_tiles, device=words.device) // s.slice_tiles
    dense_tile = (entry < 0)[:, :, slice_of_tile]
    if s.native:
        tiled = words.reshape(*dense_tile.shape, 8, 4, 2, 2).permute(0, 1, 2, 6, 5, 3, 4).contiguous()
    else:
        base = (m.bases & ~ROW_FLAG).view(s.experts, s.row_blocks, 8, 2, 2).permute(0, 1, 3, 4, 2)
        code = _split_codes(words)
        tiled = code + base[:, :, None, :, :, :, None]
        tiled[dense_tile] = code[dense_tile] | _split_codes(m.dense) << 4
    count = torch.where(entry < 0, 0, entry >> 24).view(-1)
    owner = torch.repeat_interleave(torch.arange(count.numel(), device=words.device), count)
    position = m.positions.to(torch.int64) & 0x1FFF
    tile = owner % s.slices * s.slice_tiles + position // TILE_SCALES
    flat = (owner // s.slices * s.k_tiles + tile) * TILE_SCALES + position % TILE_SCALES
    tiled.view(-1)[flat] = m.bytes
    return _from_tile_order(tiled, s)


def unpack(m: PreparedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP4 bytes [E, R, K/2] and the scale bytes [E, R, K/16] that were packed, bit for bit."""
    return unpack_weights(m.tiles[..., :WEIGHT_BYTES].contiguous(), m.shape), unpack_scales(m)
