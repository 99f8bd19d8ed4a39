"""The prepared form: how one layer's expert weights lie in device memory for the kernels.

One `PreparedMatrix` holds a stack of E matrices [R, K] (w13: gate and up interleaved, R = 2 I, K = H;
w2: R = H, K = I), cut into tiles of 32 rows x 64 columns. A tile is contiguous, tiles follow each other
along K, then along R, then over experts:

    tiles   uint8  [E, RB, KT, 1024 + 64]    FP4 weights in MMA fragment order, then the scale codes
    bases   uint8  [E, RB, 8, 4]             the row bases of the block, by lane quad: base | 0x80, or 0
    slices  int32  [E, RB, S, 2]             exceptions of each K slice: see `Slices`
    starts  int64  [E, 2]                    first word of `records` and first slot of `dense` of the expert
    records uint16 [n]                       exceptions
    dense   uint8  [m, 64]                   the upper nibbles of tiles that are kept uncompressed

RB = R / 32, KT = K / 64, S = ceil(KT / 16).

Fragment order. Lane l of a warp owns rows `l // 4` and `l // 4 + 8` of each 16-row fragment and the 16
columns `16 * (l % 4)` onwards: one scale group per row. Word s of its 16 bytes holds columns 4s .. 4s+3
of both rows, with the nibble bits placed so that each bf16 pair comes out by one shift and one mask.

Codes. The 16-bit word of a lane holds four codes: rows l//4 (fragments 0 and 1), then rows l//4 + 8.
A scale is `base + code`. Only normal positive E4M3 bytes (8 .. 126) are coded, because for these the
bf16 pattern is `(byte << 4) + constant`; every other byte is an exception, and a row of zeros has the
base 0. The native form keeps the byte itself in place of the code (128 bytes a tile, no bases).

Slices. A slice is 16 tiles of a row block. Each of its exceptions belongs to the lane that uses the
scale, and a lane meets its own in the order of the tiles. Word 0 of a slice is the mask of the lanes that
have one. Word 1 is `further << 24 | first word`, relative to the expert's `starts`: there lie the first
exceptions of these lanes in the order of the lanes, one word each (`place << 8 | byte`, place = tile in
the slice << 2 | fragment << 1 | half), padded to an even count, then the `further` ones, two words each
(`depth << 5 | lane`, then as before), depth 0 being a lane's second. A slice with too many is dense:
word 1 is `DENSE_FLAG | first slot`, and each of its tiles has a slot in `dense`, which completes the
4-bit codes to whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TILE_ROWS = 32
TILE_K = 64
GROUP = 16
WEIGHT_BYTES = TILE_ROWS * TILE_K // 2
TILE_SCALES = TILE_ROWS * TILE_K // GROUP
CODE_BYTES = TILE_SCALES // 2
LOWEST_CODED, HIGHEST_CODED = 8, 126
HIGHEST_BASE = HIGHEST_CODED - 15
SLICE_TILES = 16
MAX_FURTHER, MAX_DEPTH = 64, 4  # exceptions behind the lanes' first ones: of a slice, of one lane
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

    @property
    def row_blocks(self) -> int:
        return self.rows // TILE_ROWS

    @property
    def k_tiles(self) -> int:
        return self.k // TILE_K

    @property
    def slices(self) -> int:
        return -(-self.k_tiles // SLICE_TILES)

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
    records: torch.Tensor
    dense: torch.Tensor

    @property
    def scale_bytes(self) -> int:
        """Resident bytes of everything that is not an FP4 weight."""
        s = self.shape
        total = sum(t.numel() * t.element_size() for t in self.tensors())
        return total - s.experts * s.row_blocks * s.k_tiles * WEIGHT_BYTES

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tiles, self.bases, self.slices, self.starts, self.records, self.dense)


def pad(matrix: torch.Tensor, rows: int, columns: int, halves: int = 1) -> torch.Tensor:
    """Zero-pads [E, R, C] to [E, rows, columns]; each of the `halves` (gate, up) is padded at its own end."""
    experts, r, c = matrix.shape
    if (r, c) == (rows, columns):
        return matrix
    out = matrix.new_zeros(experts, halves, rows // halves, columns)
    out[:, :, : r // halves, :c] = matrix.view(experts, halves, r // halves, c)
    return out.view(experts, rows, columns)


def pad_scales(scale: torch.Tensor, rows: int, columns: int, halves: int = 1) -> torch.Tensor:
    """As `pad`, of scale bytes: added columns repeat the last one, so that they are seldom exceptions. The
    weights there are zeros; only a NaN shows, in a row that the last column makes NaN anyway."""
    out = pad(scale, rows, columns, halves)
    own = scale.shape[2]
    if own < columns:
        out[:, :, own:] = out[:, :, own - 1 : own]
    return out


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


def byte_counts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of uint8 [n, C]: how often each byte occurs in a row, int32 [n, 256], and how often smaller ones than
    b do, int32 [n, 257]."""
    counts = torch.zeros(rows.shape[0], 256, dtype=torch.int32, device=rows.device)
    counts.scatter_add_(1, rows.to(torch.int64), torch.ones_like(rows, dtype=torch.int32))
    return counts, torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))


def choose_bases(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [..., R]: the lowest base in 8 .. 111 whose window of 16 holds most of a row; 0 for zeros."""
    flat = scale.reshape(-1, scale.shape[-1])
    out = torch.empty(flat.shape[0], dtype=torch.uint8, device=scale.device)
    for part, rows in zip(out.split(1 << 16), flat.split(1 << 16), strict=True):
        counts, total = byte_counts(rows)
        window = total[:, LOWEST_CODED + 16 : HIGHEST_CODED + 2] - total[:, LOWEST_CODED : HIGHEST_BASE + 1]
        best, base = window.max(dim=1)
        # torch.max does not promise the first of equals
        base = (window == best[:, None]).to(torch.uint8).argmax(dim=1) + LOWEST_CODED
        part.copy_(torch.where(counts[:, 0] > best, 0, base))
    return out.view(scale.shape[:-1])


@dataclass(frozen=True)
class _Slices:
    """What `PreparedMatrix` says of exceptions, and which tiles [E, RB, KT] belong to a dense slice."""

    slices: torch.Tensor
    starts: torch.Tensor
    records: torch.Tensor
    dense_tile: torch.Tensor


def _exceptions(exception: torch.Tensor, scale: torch.Tensor, shape: Shape) -> _Slices:
    """`exception`, `scale`: bool and uint8 in tile order [E, RB, KT, 2, 2, 8, 4]."""
    e, s, device = exception.shape[0], shape, exception.device
    lanes = _lane_counts(exception, s)
    first, further = (lanes > 0).sum(-1), (lanes - 1).clamp(min=0).sum(-1)
    padded = first + (first & 1)
    limit = SLICE_TILES * TILE_SCALES // DENSE_SHARE
    dense = (first + further > limit) | (further > MAX_FURTHER) | (lanes.amax(-1) > 1 + MAX_DEPTH)
    words = torch.where(dense, 0, padded + 2 * further).view(e, -1)
    tiles_in = (s.k_tiles - torch.arange(s.slices, device=device) * SLICE_TILES).clamp(max=SLICE_TILES)
    slots = (dense * tiles_in).view(e, -1)
    word0, slot0 = (x.cumsum(1) - x for x in (words, slots))
    totals = torch.stack((words.sum(1), slots.sum(1)), dim=1)
    starts = totals.cumsum(0) - totals
    mask = ((lanes > 0).to(torch.int64) << torch.arange(32, device=device)).sum(-1)
    entry = torch.where(dense.view(e, -1), slot0 - DENSE_FLAG, further.view(e, -1) << 24 | word0)
    pair = torch.stack((torch.where(dense, 0, mask), entry.view_as(mask)), dim=-1)
    dense_tile = dense.repeat_interleave(SLICE_TILES, dim=2)[:, :, : s.k_tiles]
    base = (starts[:, :1] + word0).view(-1)
    return _Slices(
        slices=as_int32(pair),
        starts=starts,
        records=_records(exception, scale, dense_tile, base, padded.view(-1), int(totals[:, 0].sum())),
        dense_tile=dense_tile,
    )


def _records(
    exception: torch.Tensor,
    scale: torch.Tensor,
    dense_tile: torch.Tensor,
    base: torch.Tensor,
    padded: torch.Tensor,
    total: int,
) -> torch.Tensor:
    """The record words uint16 [total].

    `base`, `padded`: of each slice, its first word and the words of the lanes' first exceptions.
    """
    k_tiles = exception.shape[2]
    slices = -(-k_tiles // SLICE_TILES)
    kept = exception.flatten(3) & ~dense_tile[..., None]
    where = kept.reshape(-1).nonzero().squeeze(1)
    tile = where // TILE_SCALES % k_tiles
    inside = where % TILE_SCALES  # fragment, half, lane
    owner = where // (TILE_SCALES * k_tiles) * slices + tile // SLICE_TILES
    lane = inside % 32
    rank = _ranks(owner * 32 + lane)
    is_first = rank == 0
    word = (tile % SLICE_TILES << 2 | inside >> 5) << 8 | scale.reshape(-1)[where]
    out = torch.zeros(total, dtype=torch.int64, device=exception.device)
    ordered = torch.sort(owner[is_first] * 32 + lane[is_first])
    out[base[ordered.values // 32] + _ranks(ordered.values // 32)] = word[is_first][ordered.indices]
    at = (base + padded)[owner[~is_first]] + 2 * _ranks(owner[~is_first])
    out[at] = (rank[~is_first] - 1) << 5 | lane[~is_first]
    out[at + 1] = word[~is_first]
    return out.to(torch.int16).view(torch.uint16)


def as_int32(values: torch.Tensor) -> torch.Tensor:
    """int64 values of 32 bits, signed or not, to int32."""
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def _lane_counts(exception: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Exceptions of each lane in each slice: int64 [E, RB, S, 32]."""
    s = shape
    lanes = exception.reshape(-1, s.row_blocks, s.k_tiles, 4, 32).sum(3)
    padded = torch.nn.functional.pad(lanes, (0, 0, 0, s.slices * SLICE_TILES - s.k_tiles))
    return padded.view(-1, s.row_blocks, s.slices, SLICE_TILES, 32).sum(3)


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


def check_sources(weight: torch.Tensor, scale: torch.Tensor, shape: Shape) -> None:
    """Raises ValueError where they are not what `pack` takes."""
    expected = ((shape.experts, shape.rows, shape.k // 2), (shape.experts, shape.rows, shape.k // GROUP))
    if (tuple(weight.shape), tuple(scale.shape)) != expected:
        raise ValueError(
            f"weight and scale have shapes {tuple(weight.shape)}, {tuple(scale.shape)}; expected {expected}"
        )


def pack(
    weight: torch.Tensor, scale: torch.Tensor, shape: Shape, bases: torch.Tensor | None = None
) -> PreparedMatrix:
    """Packs FP4 bytes uint8 [E, R, K/2] and scale bytes uint8 [E, R, K/16] on their device.

    `bases` (uint8 [E, R]) saves the search where a good base is known; any value is allowed.
    """
    s = shape
    check_sources(weight, scale, s)
    if bases is None:
        bases = choose_bases(scale)
    tiled = _tile_order(scale, s).contiguous()
    base = bases.index_select(1, s.row_order().to(scale.device)).view(s.experts, s.row_blocks, 2, 2, 8)
    coded = torch.full_like(base, 0) if s.native else base
    code, exception = _code(tiled, coded[:, :, None, :, :, :, None], s.native)
    found = _exceptions(exception, tiled, s)
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
        slices=found.slices.contiguous(),
        starts=found.starts.contiguous(),
        records=found.records,
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
    dense_tile = (m.slices[..., 1] < 0).repeat_interleave(SLICE_TILES, dim=2)[:, :, : s.k_tiles]
    if s.native:
        tiled = words.reshape(*dense_tile.shape, 8, 4, 2, 2).permute(0, 1, 2, 6, 5, 3, 4).contiguous()
    else:
        base = (m.bases & ~ROW_FLAG).view(s.experts, s.row_blocks, 8, 2, 2).permute(0, 1, 3, 4, 2)
        code = _split_codes(words)
        tiled = code + base[:, :, None, :, :, :, None]
        dense = m.dense[: int(dense_tile.sum())]  # there may be room behind
        tiled[dense_tile] = code[dense_tile] | _split_codes(dense) << 4
    owner, lane, word = _read_records(m)
    tile = owner % s.slices * SLICE_TILES + (word >> 10)
    place = (word >> 8 & 3) * 32 + lane
    tiled.view(-1)[(owner // s.slices * s.k_tiles + tile) * TILE_SCALES + place] = (word & 255).to(
        torch.uint8
    )
    return _from_tile_order(tiled, s)


def _read_records(m: PreparedMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slice, lane and word of every exception: int64 [n] each."""
    device = m.slices.device
    entry = m.slices.view(m.shape.experts, -1, 2).to(torch.int64)
    mask, info = entry[..., 0], entry[..., 1]
    base = (m.starts[:, :1] + (info & 0xFFFFFF)).view(-1)
    records = m.records.to(torch.int64)
    bits = (mask.view(-1)[:, None] >> torch.arange(32, device=device) & 1).to(torch.bool)
    owner, lane = bits.nonzero(as_tuple=True)
    first = bits.sum(1)
    further = torch.where(info < 0, 0, info >> 24).view(-1)
    deep = torch.repeat_interleave(torch.arange(further.numel(), device=device), further)
    at = (base + first + (first & 1))[deep] + 2 * _ranks(deep)
    words = torch.cat((records[base[owner] + _ranks(owner)], records[at + 1]))
    return torch.cat((owner, deep)), torch.cat((lane, records[at] & 31)), words


def exceptions(m: PreparedMatrix) -> int:
    """How many scales are kept outside the codes: in records, or in dense slices. Waits for the device."""
    s = m.shape
    mask, info = m.slices.to(torch.int64).unbind(-1)
    lanes = (mask[..., None] >> torch.arange(32, device=mask.device) & 1).sum(-1)
    tiles = (s.k_tiles - torch.arange(s.slices, device=mask.device) * SLICE_TILES).clamp(max=SLICE_TILES)
    return int(torch.where(info < 0, tiles * TILE_SCALES, lanes + (info >> 24)).sum())


def unpack(m: PreparedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP4 bytes [E, R, K/2] and the scale bytes [E, R, K/16] that were packed, bit for bit."""
    return unpack_weights(m.tiles[..., :WEIGHT_BYTES].contiguous(), m.shape), unpack_scales(m)


def concatenate(parts: list[PreparedMatrix]) -> PreparedMatrix:
    """One stack of the experts of several, in order."""
    shape = replace(parts[0].shape, experts=sum(p.shape.experts for p in parts))
    tiles, bases, slices = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("tiles", "bases", "slices")
    )
    return join(parts, shape, tiles, bases, slices)


def join(
    parts: list[PreparedMatrix],
    shape: Shape,
    tiles: torch.Tensor,
    bases: torch.Tensor,
    slices: torch.Tensor,
) -> PreparedMatrix:
    """As `concatenate`, where the tensors of one size an expert lie together already."""
    records = [p.records.view(torch.int16) for p in parts]
    counts = torch.tensor([[len(r), len(p.dense)] for r, p in zip(records, parts, strict=True)])
    before = (counts.cumsum(0) - counts).to(parts[0].starts.device)
    return PreparedMatrix(
        shape=shape,
        tiles=tiles,
        bases=bases,
        slices=slices,
        starts=torch.cat([p.starts + b for p, b in zip(parts, before, strict=True)]),
        records=torch.cat(records).view(torch.uint16),
        dense=torch.cat([p.dense for p in parts]),
    )
