"""The format read literally, one byte at a time: what the vectorised codec is compared with."""

from __future__ import annotations


def decode(fixed: bytes, exceptions: list[int], rows: int, cols: int, bits: int) -> bytes:
    """Scale bytes of a plane, row after row; bits is 4 (NVFP4) or 1 (MXFP4)."""
    row_bytes = cols // 2 if bits == 4 else (cols + 7) // 8
    out = bytearray()
    for row in range(rows):
        slab = fixed[(row // 16) * 16 * (1 + row_bytes) :]
        base = slab[row % 16]
        codes = slab[16 + (row % 16) * row_bytes :]
        for col in range(cols):
            if bits == 4:
                code = codes[col // 2] >> 4 if col % 2 else codes[col // 2] & 15
            else:
                code = codes[col // 8] >> (col % 8) & 1
            out.append((base + code) & 255)
    for entry in exceptions:
        out[entry & 0xFFFFFF] = entry >> 24
    return bytes(out)


def lowest_best_base(row: bytes, window: int) -> int:
    """The lowest base whose window covers most of the row's bytes."""
    covered = [sum(base <= byte < base + window for byte in row) for base in range(256 - window + 1)]
    return covered.index(max(covered))
