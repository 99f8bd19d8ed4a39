"""The CSF codecs: block scales as a fixed stream of codes and a list of exceptions.

This module alone knows the bytes. One plane holds the scale bytes of one projection of one expert:
R rows (output channels) x C columns (input channels / group size). `byte = base[row] + code`, unless
an exception names the position.

    fixed       uint8   R/16 slabs: 16 bases in row order, then the codes of these rows, row after row
    exceptions  uint32  byte << 24 | row * C + col, positions strictly increasing

NVFP4 codes have 4 bits, low nibble = even column; MXFP4 codes have 1 bit, bit 0 first, and the unused
bits of a row's last byte are 0. A writer takes the lowest base whose window covers most bytes of the
row and writes code 0 under an exception; a reader takes any base.

All work is done on bytes with numpy, which stays on the calling thread; planes are handed over as
torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ._windows import lowest_best_bases
from .errors import FormatError

SLAB_ROWS = 16
POSITION_BITS = 24
MAX_ELEMENTS = 1 << POSITION_BITS
_POSITION_MASK = np.uint32(MAX_ELEMENTS - 1)
# Elements worked on at a time, so that the temporaries stay in the core's cache.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class CodecSpec:
    """One codec. `group_size`: weights per scale; `window`: bytes a base covers; `code_bits`: 4 or 1."""

    name: str
    group_size: int
    window: int
    code_bits: int
    max_base: int
    suffix: str

    @property
    def fixed_suffix(self) -> str:
        """What follows the scale tensor's name in the name of its fixed stream."""
        return f".{self.suffix}_fixed"

    @property
    def exceptions_suffix(self) -> str:
        """What follows the scale tensor's name in the name of its exceptions."""
        return f".{self.suffix}_exceptions"

    def code_bytes(self, cols: int) -> int:
        """Bytes of one row's codes."""
        return -(-cols * self.code_bits // 8)

    def slab_bytes(self, cols: int) -> int:
        """Bytes of 16 rows: their bases and their codes."""
        return SLAB_ROWS * (1 + self.code_bytes(cols))

    def fixed_bytes(self, rows: int, cols: int) -> int:
        """Bytes of the fixed stream of a plane."""
        return rows // SLAB_ROWS * self.slab_bytes(cols)

    def check_shape(self, rows: int, cols: int, name: str) -> None:
        """Raises FormatError, naming `name`, where the codec does not define a plane [rows, cols]."""
        if rows <= 0 or rows % SLAB_ROWS:
            raise FormatError(f"{name}: {rows} rows, expected a positive multiple of {SLAB_ROWS}")
        if cols <= 0 or (self.code_bits == 4 and cols % 2):
            even = "even and " if self.code_bits == 4 else ""
            raise FormatError(f"{name}: {cols} columns, expected {even}positive")
        if rows * cols > MAX_ELEMENTS:
            raise FormatError(
                f"{name}: {rows} x {cols} = {rows * cols} scales, expected at most {MAX_ELEMENTS}"
            )


NVFP4 = CodecSpec("byte-window4-fixed-stream-u24-exceptions/1", 16, 16, 4, 240, "nvfp4_csf")
MXFP4 = CodecSpec("row-base-offset1-u24-exceptions/1", 32, 2, 1, 254, "mxfp4_csf")
CODECS = {spec.name: spec for spec in (NVFP4, MXFP4)}


def codec_by_name(name: str) -> CodecSpec:
    """The codec of that name. Raises FormatError for an unknown one."""
    try:
        return CODECS[name]
    except KeyError:
        raise FormatError(f"unknown codec {name!r}, expected one of {sorted(CODECS)}") from None


@dataclass(frozen=True)
class Plane:
    """One compressed plane.

    fixed: uint8 [spec.fixed_bytes(rows, cols)], contiguous, on the CPU.
    exceptions: uint32 [n], contiguous, on the CPU.
    """

    spec: CodecSpec
    rows: int
    cols: int
    fixed: torch.Tensor
    exceptions: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both streams."""
        return self.fixed.numel() + 4 * self.exceptions.numel()

    @property
    def native_nbytes(self) -> int:
        """Bytes of the plane before compression."""
        return self.rows * self.cols

    @property
    def exception_share(self) -> float:
        """Exceptions per scale, 0.0 to 1.0."""
        return self.exceptions.numel() / (self.rows * self.cols)


# ---- encode --------------------------------------------------------------------------------------


def encode(scale: torch.Tensor, spec: CodecSpec = NVFP4, name: str = "scale") -> Plane:
    """Compress one plane.

    scale: [R, C], a one-byte dtype (uint8, float8_e4m3fn, float8_e8m0fnu), on the CPU.
    Raises FormatError, naming `name`, for a shape or dtype that the codec does not define.
    """
    if scale.ndim != 2:
        raise FormatError(f"{name}: shape {list(scale.shape)}, expected 2 dimensions")
    return encode_batch(scale[None], spec, name)[0]


def encode_batch(scale: torch.Tensor, spec: CodecSpec = NVFP4, name: str = "scale") -> list[Plane]:
    """Compress E planes of one shape: [E, R, C] to E planes. Dtype and errors as in `encode`."""
    if scale.ndim != 3:
        raise FormatError(f"{name}: shape {list(scale.shape)}, expected 3 dimensions")
    source = _bytes_of(scale, name)
    planes, rows, cols = source.shape
    spec.check_shape(rows, cols, name)
    flat = source.reshape(planes * rows, cols)
    slabs = np.empty((planes * rows // SLAB_ROWS, spec.slab_bytes(cols)), np.uint8)
    pieces: list[list[np.ndarray]] = [[] for _ in range(planes)]
    for part in _row_chunks(len(flat), cols):
        for plane, entries in _encode_rows(flat, part, slabs, spec, rows):
            pieces[plane].append(entries)
    fixed = slabs.reshape(planes, spec.fixed_bytes(rows, cols))
    return [
        # Copies: a plane must not keep the whole batch alive.
        _plane(spec, rows, cols, fixed[i].copy() if planes > 1 else fixed[i], np.concatenate(pieces[i]))
        for i in range(planes)
    ]


def _encode_rows(
    flat: np.ndarray, part: slice, slabs: np.ndarray, spec: CodecSpec, plane_rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Fill the slabs of some rows; yield their exceptions by plane, for every plane that they touch."""
    rows = flat[part]
    base = lowest_best_bases(rows, spec.window)
    code = rows - base[:, None]  # wraps below the base, which lands outside the window
    outside = code >= spec.window
    code *= ~outside  # code 0 under an exception
    position = np.flatnonzero(outside)
    slab = slabs[part.start // SLAB_ROWS : part.stop // SLAB_ROWS]
    slab[:, :SLAB_ROWS] = base.reshape(-1, SLAB_ROWS)
    slab[:, SLAB_ROWS:] = _pack(code, spec).reshape(len(slab), -1)
    value = rows.reshape(-1)[position]
    size, start = plane_rows * flat.shape[1], part.start * flat.shape[1]
    first, last = part.start // plane_rows, (part.stop - 1) // plane_rows
    cuts = np.searchsorted(position, np.arange(first + 1, last + 1) * size - start).tolist()
    for plane, (a, b) in enumerate(pairwise([0, *cuts, len(position)]), first):
        yield plane, _entries(position[a:b] + (start - plane * size), value[a:b])


# ---- decode --------------------------------------------------------------------------------------


def decode(plane: Plane) -> torch.Tensor:
    """The scale bytes uint8 [R, C] of a valid plane (see `validate`)."""
    out = np.empty((plane.rows, plane.cols), np.uint8)
    slabs = _slabs(plane)
    for part in _row_chunks(plane.rows, plane.cols):
        slab = slabs[part.start // SLAB_ROWS : part.stop // SLAB_ROWS]
        base = slab[:, :SLAB_ROWS].reshape(-1, 1)
        codes = slab[:, SLAB_ROWS:].reshape(len(base), -1)
        np.add(_unpack(codes, plane.cols, plane.spec), base, out=out[part])
    flat = out.reshape(-1)
    for some in plane.exceptions.split(_CHUNK):
        position, value = _split(some)
        flat[position] = value
    return torch.from_numpy(out)


# ---- accept --------------------------------------------------------------------------------------


def plane_from_streams(
    fixed: torch.Tensor,
    exceptions: torch.Tensor,
    rows: int,
    cols: int,
    spec: CodecSpec = NVFP4,
    name: str = "scale",
    part: tuple[int, int] | None = None,
) -> Plane:
    """The plane [rows, cols] that two stored streams describe, validated; or rows [r0, r1) of it.

    fixed: uint8, 1-D or [rows / 16, slab bytes]. exceptions: uint32 1-D, at any alignment.
    part: r0 and r1, multiples of 16, where `fixed` holds the slabs of these rows only (the exceptions
    are those of the whole plane: their positions tell nothing before they are read).
    Raises FormatError, naming the stream (`name` is that of the scale tensor).
    """
    spec.check_shape(rows, cols, name)
    r0, r1 = part or (0, rows)
    if not 0 <= r0 < r1 <= rows or r0 % SLAB_ROWS or r1 % SLAB_ROWS:
        raise FormatError(f"{name}: rows [{r0}, {r1}) of {rows}, expected multiples of {SLAB_ROWS}")
    slabs = ((r1 - r0) // SLAB_ROWS, spec.slab_bytes(cols))
    stream = name + spec.fixed_suffix
    if fixed.dtype != torch.uint8:
        raise FormatError(f"{stream}: dtype {fixed.dtype}, expected torch.uint8")
    if tuple(fixed.shape) not in (slabs, (slabs[0] * slabs[1],)):
        raise FormatError(
            f"{stream}: shape {list(fixed.shape)}, expected [{slabs[0] * slabs[1]}] or {list(slabs)} "
            f"for a plane of {r1 - r0} x {cols} scales"
        )
    check_exceptions(exceptions, rows, cols, name + spec.exceptions_suffix)
    fixed = fixed.reshape(-1).contiguous()
    check_slabs(fixed.numpy().reshape(slabs), cols, spec, stream, r0)
    entries = exceptions.numpy()
    if part is not None:
        first, last = np.searchsorted(entries & _POSITION_MASK, (r0 * cols, r1 * cols))
        entries = entries[first:last] - np.uint32(r0 * cols)
    # Copied, not viewed: a file gives the stream no alignment, and a view would keep it mapped.
    return Plane(spec, r1 - r0, cols, fixed, torch.from_numpy(entries.copy()))


def validate(plane: Plane, name: str) -> None:
    """Check every rule of the format.

    Raises FormatError with the stream's name (`name` is that of the scale tensor), the offending
    position, the value found and the value expected.
    """
    spec, rows, cols = plane.spec, plane.rows, plane.cols
    spec.check_shape(rows, cols, name)
    stream, expected = name + spec.fixed_suffix, spec.fixed_bytes(rows, cols)
    if plane.fixed.dtype != torch.uint8 or plane.fixed.ndim != 1:
        raise FormatError(
            f"{stream}: {plane.fixed.dtype} {list(plane.fixed.shape)}, expected torch.uint8 1-D"
        )
    if plane.fixed.numel() != expected:
        raise FormatError(
            f"{stream}: {plane.fixed.numel()} bytes, expected {expected} for {rows} x {cols} scales"
        )
    check_slabs(_slabs(plane), cols, spec, stream)
    check_exceptions(plane.exceptions, rows, cols, name + spec.exceptions_suffix)


def check_slabs(slabs: np.ndarray, cols: int, spec: CodecSpec, stream: str, first_row: int = 0) -> None:
    """Check bases and unused bits of uint8 [n, slab bytes]; `first_row` is the plane's row of slab 0."""
    bases = slabs[:, :SLAB_ROWS].reshape(-1)
    if bases.size and bases.max() > spec.max_base:
        row = int(np.argmax(bases > spec.max_base))
        offset = row // SLAB_ROWS * spec.slab_bytes(cols) + row % SLAB_ROWS
        raise FormatError(
            f"{stream}: base {bases[row]} of row {first_row + row} (byte {offset} of the rows read), "
            f"expected 0 to {spec.max_base}"
        )
    unused = spec.code_bytes(cols) * 8 - cols * spec.code_bits
    if unused:
        last = slabs[:, SLAB_ROWS:].reshape(bases.size, -1)[:, -1]
        wrong = np.flatnonzero(last >> (8 - unused))
        if wrong.size:
            row = int(wrong[0])
            raise FormatError(
                f"{stream}: last selector byte 0x{last[row]:02x} of row {first_row + row}, "
                f"expected its upper {unused} bits to be 0"
            )


def check_exceptions(exceptions: torch.Tensor, rows: int, cols: int, stream: str) -> None:
    """Check that uint32 [n] is in strictly increasing order and inside [rows, cols]."""
    _check_exception_tensor(exceptions, rows * cols, stream)
    position, _ = _split(exceptions)
    if position.size and position.max() >= rows * cols:
        i = int(np.argmax(position >= rows * cols))
        raise FormatError(f"{stream}: entry {i} has position {position[i]}, expected less than {rows * cols}")
    wrong = np.flatnonzero(position[1:] <= position[:-1])
    if wrong.size:
        i = int(wrong[0]) + 1
        what = "repeats" if position[i] == position[i - 1] else "is below"
        raise FormatError(
            f"{stream}: entry {i} has position {position[i]} (row {position[i] // cols}, column "
            f"{position[i] % cols}), which {what} that of entry {i - 1}; expected more than {position[i - 1]}"
        )


def _check_exception_tensor(exceptions: torch.Tensor, limit: int, stream: str) -> None:
    if exceptions.dtype != torch.uint32 or exceptions.ndim != 1:
        found = f"{exceptions.dtype} {list(exceptions.shape)}"
        raise FormatError(f"{stream}: {found}, expected torch.uint32 1-D")
    if exceptions.numel() > limit:
        raise FormatError(f"{stream}: {exceptions.numel()} entries, expected at most {limit}")


# ---- cut and join --------------------------------------------------------------------------------


def slice_plane(
    plane: Plane,
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
    name: str = "plane",
) -> Plane:
    """The plane of rows [r0, r1) and scale columns [c0, c1), with rebased exceptions. None means all.

    Bases are kept, so the result decodes to exactly that part of the decoded plane. Raises FormatError
    (naming `name`) where r0 or r1 are no multiples of 16, or (NVFP4) c0 or c1 are odd, or the part is
    empty or outside.
    """
    r0, r1 = rows or (0, plane.rows)
    c0, c1 = cols or (0, plane.cols)
    spec = plane.spec
    if not (0 <= r0 < r1 <= plane.rows and 0 <= c0 < c1 <= plane.cols):
        raise FormatError(
            f"{name}: rows [{r0}, {r1}) and columns [{c0}, {c1}), "
            f"expected a part of {plane.rows} x {plane.cols}"
        )
    if r0 % SLAB_ROWS or r1 % SLAB_ROWS:
        raise FormatError(f"{name}: rows [{r0}, {r1}), expected multiples of {SLAB_ROWS}")
    if spec.code_bits == 4 and (c0 % 2 or c1 % 2):
        raise FormatError(f"{name}: columns [{c0}, {c1}), expected even numbers")
    slabs = _slabs(plane)[r0 // SLAB_ROWS : r1 // SLAB_ROWS]
    fixed = _cut_columns(slabs, plane.cols, c0, c1, spec)
    entries = plane.exceptions.numpy()
    position = entries & _POSITION_MASK
    first, last = np.searchsorted(position, (r0 * plane.cols, r1 * plane.cols))
    row, col = np.divmod(position[first:last].astype(np.int64), plane.cols)
    inside = (col >= c0) & (col < c1)
    rebased = (row[inside] - r0) * (c1 - c0) + (col[inside] - c0)
    value = (entries[first:last][inside] >> POSITION_BITS).astype(np.uint8)
    return _plane(spec, r1 - r0, c1 - c0, fixed.reshape(-1), _entries(rebased, value))


def _cut_columns(slabs: np.ndarray, cols: int, c0: int, c1: int, spec: CodecSpec) -> np.ndarray:
    """Slabs of columns [c0, c1): uint8 [n, slab bytes], a copy."""
    if (c0, c1) == (0, cols):
        return slabs.copy()
    out = np.empty((len(slabs), spec.slab_bytes(c1 - c0)), np.uint8)
    out[:, :SLAB_ROWS] = slabs[:, :SLAB_ROWS]
    codes = slabs[:, SLAB_ROWS:].reshape(len(slabs) * SLAB_ROWS, -1)
    if spec.code_bits == 4:
        cut = codes[:, c0 // 2 : c1 // 2]
    else:
        cut = _pack(_unpack(codes, cols, spec)[:, c0:c1], spec)
    out[:, SLAB_ROWS:] = cut.reshape(len(slabs), -1)
    return out


def stack(planes: Sequence[Plane]) -> Plane:
    """Planes of equal columns and codec, one over the other (gate over up).

    Raises FormatError where they differ or the result exceeds 2^24 scales.
    """
    if not planes:
        raise FormatError("no planes to stack, expected at least one")
    spec, cols = planes[0].spec, planes[0].cols
    for i, plane in enumerate(planes):
        if (plane.spec, plane.cols) != (spec, cols):
            found = f"{plane.spec.name} with {plane.cols} columns"
            raise FormatError(f"plane {i} of the stack: {found}, expected {spec.name} with {cols} columns")
    rows = sum(p.rows for p in planes)
    spec.check_shape(rows, cols, "stack of planes")
    above = np.cumsum([0, *(p.rows * cols for p in planes[:-1])])
    shifted = [p.exceptions.numpy() + np.uint32(offset) for p, offset in zip(planes, above, strict=True)]
    fixed = np.concatenate([p.fixed.numpy() for p in planes])
    return _plane(spec, rows, cols, fixed, np.concatenate(shifted))


def pad_plane(plane: Plane, rows: int, cols: int, name: str = "padded plane") -> Plane:
    """The plane with rows added below and columns added at the right.

    New rows decode to 0. New columns decode to the row's base, a finite value (0x7F, NaN in E4M3, is
    avoided), so they cost no exceptions. Raises FormatError where a size shrinks or is not defined.
    """
    spec = plane.spec
    if rows < plane.rows or cols < plane.cols:
        raise FormatError(
            f"{name}: padding {plane.rows} x {plane.cols} to {rows} x {cols}, expected no smaller size"
        )
    spec.check_shape(rows, cols, name)
    old = _slabs(plane)
    slabs = np.zeros((rows // SLAB_ROWS, spec.slab_bytes(cols)), np.uint8)
    kept = slabs[: len(old)]
    kept[:, :SLAB_ROWS] = old[:, :SLAB_ROWS]
    codes = np.zeros((plane.rows, cols), np.uint8)
    codes[:, : plane.cols] = _unpack(old[:, SLAB_ROWS:].reshape(plane.rows, -1), plane.cols, spec)
    codes[:, plane.cols :] = (old[:, :SLAB_ROWS] == 0x7F).reshape(-1, 1)
    kept[:, SLAB_ROWS:] = _pack(codes, spec).reshape(len(old), -1)
    position, value = _split(plane.exceptions)
    row, col = np.divmod(position, plane.cols)
    return _plane(spec, rows, cols, slabs.reshape(-1), _entries(row * cols + col, value))


# ---- bytes ---------------------------------------------------------------------------------------


def _bytes_of(scale: torch.Tensor, name: str) -> np.ndarray:
    if scale.element_size() != 1 or scale.dtype in (torch.int8, torch.bool):
        raise FormatError(
            f"{name}: dtype {scale.dtype}, expected torch.uint8, float8_e4m3fn or float8_e8m0fnu"
        )
    return np.ascontiguousarray(scale.view(torch.uint8).numpy())


def _plane(spec: CodecSpec, rows: int, cols: int, fixed: np.ndarray, entries: np.ndarray) -> Plane:
    return Plane(spec, rows, cols, torch.from_numpy(fixed), torch.from_numpy(entries))


def _slabs(plane: Plane) -> np.ndarray:
    return plane.fixed.numpy().reshape(plane.rows // SLAB_ROWS, -1)


def _row_chunks(rows: int, cols: int) -> Iterator[slice]:
    step = max(_CHUNK // cols // SLAB_ROWS, 1) * SLAB_ROWS
    return (slice(r, min(r + step, rows)) for r in range(0, rows, step))


def _entries(position: np.ndarray, value: np.ndarray) -> np.ndarray:
    return position.astype(np.uint32) | value.astype(np.uint32) << np.uint32(POSITION_BITS)


def _split(exceptions: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Positions (intp) and bytes (uint8) of an exception stream."""
    entries = exceptions.numpy().astype("<u4", copy=False)
    # Signed before it is widened, which is the faster cast; the byte is the last of the four.
    position = (entries & _POSITION_MASK).view(np.int32).astype(np.intp)
    return position, np.ascontiguousarray(entries.view(np.uint8)[POSITION_BITS // 8 :: 4])


def _pack(code: np.ndarray, spec: CodecSpec) -> np.ndarray:
    """uint8 codes [n, C] to uint8 [n, code bytes]."""
    if spec.code_bits == 1:
        return np.packbits(code, axis=1, bitorder="little")
    pair = np.ascontiguousarray(code).view("<u2")  # even column in the low byte
    return (pair | pair >> 4).astype(np.uint8)


def _unpack(packed: np.ndarray, cols: int, spec: CodecSpec) -> np.ndarray:
    """The inverse of `_pack`: uint8 [n, cols]."""
    if spec.code_bits == 1:
        return np.unpackbits(packed, axis=1, count=cols, bitorder="little")
    pair = packed.astype("<u2")
    return ((pair | pair << 4) & 0x0F0F).view(np.uint8)
