"""The codec against golden vectors, a literal decoder and brute force."""

from __future__ import annotations

import json
import time
from pathlib import Path

import format_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_csf.loaders.benchmark import heavy_tailed
from vllm_csf.loaders.codec import (
    CODECS,
    MAX_ELEMENTS,
    MXFP4,
    NVFP4,
    CodecSpec,
    Plane,
    codec_by_name,
    decode,
    encode,
    encode_batch,
    pad_plane,
    plane_from_streams,
    slice_plane,
    stack,
    validate,
)
from vllm_csf.loaders.errors import FormatError

# Shared machines stall; a slow example is no failure.
PROPERTY = settings(deadline=None)
VECTORS = json.loads((Path(__file__).parents[1] / "data" / "csf_vectors.json").read_text())
SPECS = pytest.mark.parametrize("spec", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])


def u8(data: bytes, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


def u32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32))


def literal(plane: Plane) -> torch.Tensor:
    data = oracle.decode(
        bytes(plane.fixed.numpy()), plane.exceptions.tolist(), plane.rows, plane.cols, plane.spec.code_bits
    )
    return u8(data, plane.rows, plane.cols)


def random_scale(rows: int, cols: int, share: float, seed: int, spec: CodecSpec = NVFP4) -> torch.Tensor:
    """Rows in one window each, `share` of the bytes replaced by any byte."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, spec.max_base + 1, (rows, 1))
    scale = base + rng.integers(0, spec.window, (rows, cols))
    stray = rng.random((rows, cols)) < share
    return torch.from_numpy(np.where(stray, rng.integers(0, 256, (rows, cols)), scale).astype(np.uint8))


@st.composite
def scales(draw: st.DrawFn, spec: CodecSpec | None = None) -> tuple[CodecSpec, torch.Tensor]:
    spec = spec or draw(st.sampled_from([NVFP4, MXFP4]))
    rows = 16 * draw(st.integers(1, 5))
    cols = draw(st.integers(1, 20)) * 2 - (draw(st.booleans()) if spec is MXFP4 else 0)
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]))
        return spec, random_scale(rows, cols, share, draw(st.integers(0, 2**32)), spec)
    return spec, u8(draw(st.binary(min_size=rows * cols, max_size=rows * cols)), rows, cols)


# ---- golden vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
class TestGolden:
    def test_encode(self, vector: dict) -> None:
        scale = u8(bytes.fromhex(vector["scale"]), vector["rows"], vector["cols"])
        plane = encode(scale, codec_by_name(vector["codec"]))
        assert bytes(plane.fixed.numpy()).hex() == vector["fixed"]
        assert plane.exceptions.tolist() == vector["exceptions"]

    @pytest.mark.parametrize("flat", [True, False])
    def test_decode(self, vector: dict, flat: bool) -> None:
        fixed = u8(bytes.fromhex(vector["fixed"]), *([-1] if flat else vector["fixed_shape"]))
        plane = plane_from_streams(
            fixed, u32(vector["exceptions"]), vector["rows"], vector["cols"], codec_by_name(vector["codec"])
        )
        assert bytes(decode(plane).numpy()).hex() == vector["scale"]

    def test_the_oracle_reads_them_too(self, vector: dict) -> None:
        bits = codec_by_name(vector["codec"]).code_bits
        data = bytes.fromhex(vector["fixed"])
        assert (
            oracle.decode(data, vector["exceptions"], vector["rows"], vector["cols"], bits).hex()
            == vector["scale"]
        )


# ---- properties ----------------------------------------------------------------------------------


@PROPERTY
@given(scales())
def test_roundtrip_equals_the_literal_decoder(case: tuple[CodecSpec, torch.Tensor]) -> None:
    spec, scale = case
    plane = encode(scale, spec)
    validate(plane, "scale")
    assert torch.equal(decode(plane), scale)
    assert torch.equal(literal(plane), scale)


@PROPERTY
@given(scales())
def test_base_is_the_lowest_best_window(case: tuple[CodecSpec, torch.Tensor]) -> None:
    spec, scale = case
    plane = encode(scale, spec)
    bases = plane.fixed.view(plane.rows // 16, -1)[:, :16].reshape(-1).tolist()
    assert bases == [oracle.lowest_best_base(bytes(row.numpy()), spec.window) for row in scale]


@PROPERTY
@given(scales())
def test_code_under_an_exception_is_zero(case: tuple[CodecSpec, torch.Tensor]) -> None:
    spec, scale = case
    plane = encode(scale, spec)
    bare = Plane(spec, plane.rows, plane.cols, plane.fixed, u32([]))
    position = (plane.exceptions.to(torch.int64) & (MAX_ELEMENTS - 1)).numpy()
    bases = plane.fixed.view(plane.rows // 16, -1)[:, :16].reshape(-1).numpy()
    assert np.array_equal(decode(bare).view(-1).numpy()[position], bases[position // plane.cols])


@PROPERTY
@given(scales(), st.data())
def test_slice_is_the_slice_of_the_decoded(case: tuple[CodecSpec, torch.Tensor], data: st.DataObject) -> None:
    spec, scale = case
    rows, cols = scale.shape
    step = 2 if spec is NVFP4 else 1
    r0 = data.draw(st.integers(0, rows // 16 - 1)) * 16
    r1 = data.draw(st.integers(r0 // 16 + 1, rows // 16)) * 16
    c0 = data.draw(st.integers(0, cols // step - 1)) * step
    c1 = data.draw(st.integers(c0 // step + 1, cols // step)) * step
    part = slice_plane(encode(scale, spec), (r0, r1), (c0, c1))
    validate(part, "part")
    assert torch.equal(decode(part), scale[r0:r1, c0:c1])


@PROPERTY
@given(scales(spec=NVFP4), st.integers(0, 2**32))
def test_stack_is_the_concatenation_of_the_decoded(case: tuple[CodecSpec, torch.Tensor], seed: int) -> None:
    spec, gate = case
    up = random_scale(32, gate.shape[1], 0.2, seed)
    both = stack([encode(gate, spec), encode(up, spec)])
    validate(both, "both")
    assert torch.equal(decode(both), torch.cat([gate, up]))


@PROPERTY
@given(scales(), st.integers(0, 2), st.integers(0, 9))
def test_padding_keeps_the_plane_and_is_finite(
    case: tuple[CodecSpec, torch.Tensor], more_slabs: int, more_cols: int
) -> None:
    spec, scale = case
    rows, cols = scale.shape
    more_cols *= 2 if spec is NVFP4 else 1
    padded = pad_plane(encode(scale, spec), rows + 16 * more_slabs, cols + more_cols)
    validate(padded, "padded")
    out = decode(padded)
    assert torch.equal(out[:rows, :cols], scale)
    assert (out[rows:] == 0).all()
    fill = out[:rows, cols:]
    nan = (fill & 127 == 127) if spec is NVFP4 else (fill == 255)
    assert not nan.any()


def test_padding_avoids_nan_where_the_base_itself_is_nan() -> None:
    scale = torch.full((16, 2), 0x7F, dtype=torch.uint8)
    plane = encode(scale)
    plane.fixed[:16] = 0x7F
    plane.fixed[16:] = 0
    assert torch.equal(decode(plane), scale)
    out = decode(pad_plane(plane, 16, 6))
    assert not (out[:, 2:] & 127 == 127).any()
    assert torch.equal(out[:, :2], scale)


@PROPERTY
@given(st.integers(1, 6), scales())
def test_batch_equals_one_by_one(planes: int, case: tuple[CodecSpec, torch.Tensor]) -> None:
    spec, scale = case
    batch = torch.stack([scale.roll(i, 0) for i in range(planes)])
    for got, one in zip(encode_batch(batch, spec), batch, strict=True):
        want = encode(one, spec)
        assert torch.equal(got.fixed, want.fixed)
        assert torch.equal(got.exceptions, want.exceptions)


@SPECS
@pytest.mark.parametrize("share", [0.003, 1.0])
@pytest.mark.parametrize("shape", [(16, 1 << 20), (1 << 21, 6), (16, 70000), (4080, 4110)])
def test_large_planes(spec: CodecSpec, share: float, shape: tuple[int, int]) -> None:
    scale = random_scale(*shape, share, 7, spec)
    plane = encode(scale, spec)
    validate(plane, "large")
    assert torch.equal(decode(plane), scale)


def test_last_position_of_the_largest_plane() -> None:
    scale = torch.full((4096, 4096), 56, dtype=torch.uint8)
    scale[-1, -1] = 255
    plane = encode(scale)
    assert plane.exceptions.tolist() == [255 << 24 | (MAX_ELEMENTS - 1)]
    assert torch.equal(decode(plane), scale)
    corner = slice_plane(plane, (4080, 4096), (4094, 4096))
    assert corner.exceptions.tolist() == [255 << 24 | 31]


@SPECS
def test_accepts_any_base(spec: CodecSpec) -> None:
    """Other writers use the row minimum, or whatever they like; the bytes count."""
    scale = random_scale(16, 6, 0.5, 3, spec)
    for base in (0, 1, 100, spec.max_base):
        code = scale.to(torch.int64) - base
        outside = (code < 0) | (code >= spec.window)
        bits = torch.where(outside, 0, code).numpy()
        if spec.code_bits == 4:
            packed = bits[:, 0::2] | bits[:, 1::2] << 4
        else:
            packed = (bits << np.arange(6)).sum(axis=1, keepdims=True)
        fixed = np.concatenate([np.full(16, base), packed.reshape(-1)]).astype(np.uint8)
        entries = [int(scale.view(-1)[p]) << 24 | p for p in range(96) if outside.view(-1)[p]]
        plane = plane_from_streams(torch.from_numpy(fixed), u32(entries), 16, 6, spec)
        assert torch.equal(decode(plane), scale)


def test_code_under_an_exception_is_ignored() -> None:
    plane = encode(random_scale(16, 4, 0.0, 1))
    fixed = plane.fixed.clone()
    fixed[16] |= 0x0F
    assert decode(Plane(NVFP4, 16, 4, fixed, u32([200 << 24])))[0, 0] == 200


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_takes_scale_dtypes_as_bytes(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert torch.equal(decode(encode(scale.view(dtype))), scale)


def test_takes_strided_scales() -> None:
    scale = random_scale(32, 24, 0.1, 5)
    assert torch.equal(decode(encode(scale[:16, 4:12])), scale[:16, 4:12])


def test_exception_stream_at_an_odd_address() -> None:
    plane = encode(random_scale(16, 16, 0.5, 2))
    raw = b"\0" + plane.exceptions.numpy().tobytes()
    odd = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8)[1:].view(np.uint32))
    taken = plane_from_streams(plane.fixed, odd, 16, 16)
    assert torch.equal(decode(taken), decode(plane))
    assert taken.exceptions.data_ptr() % 4 == 0


def test_sizes_come_from_counts() -> None:
    dispersed = encode(random_scale(16, 32, 1.0, 9))
    assert dispersed.nbytes == 16 + 256 + 4 * dispersed.exceptions.numel() > dispersed.native_nbytes == 512
    assert dispersed.exception_share == dispersed.exceptions.numel() / 512


def test_results_keep_no_larger_memory_alive() -> None:
    planes = encode_batch(torch.stack([random_scale(64, 16, 0.1, i) for i in range(8)]))
    part = slice_plane(planes[3], (16, 32))
    for plane in (*planes, part):
        assert plane.fixed.untyped_storage().nbytes() == plane.fixed.numel()
        assert plane.exceptions.untyped_storage().nbytes() == 4 * plane.exceptions.numel()


# ---- refusals ------------------------------------------------------------------------------------


def refused(match: str, plane: Plane) -> None:
    with pytest.raises(FormatError, match=match):
        validate(plane, "x.weight_scale")


@SPECS
def test_base_out_of_range(spec: CodecSpec) -> None:
    plane = encode(random_scale(32, 8, 0.0, 1, spec), spec)
    slab = spec.slab_bytes(8)
    plane.fixed[slab + 3] = spec.max_base + 1
    stream = f"x.weight_scale.{spec.suffix}_fixed"
    wanted = f"{stream}: base {spec.max_base + 1} of row 19 .byte {slab + 3} .*expected 0 to {spec.max_base}"
    refused(wanted, plane)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([5, 3], r"exceptions: entry 1 has position 3 \(row 0, column 3\), which is below .*more than 5"),
        ([1, 2, 9 << 24 | 2], r"exceptions: entry 2 has position 2 .*which repeats that of entry 1"),
        ([1, 200 << 24 | 128], r"exceptions: entry 1 has position 128, expected less than 128"),
        ([(1 << 32) - 1], r"exceptions: entry 0 has position 16777215, expected less than 128"),
        (list(range(129)), r"exceptions: 129 entries, expected at most 128"),
    ],
)
@SPECS
def test_bad_exceptions(spec: CodecSpec, entries: list[int], match: str) -> None:
    plane = encode(random_scale(16, 8, 0.0, 1, spec), spec)
    refused(f"x.weight_scale.{spec.suffix}_" + match, Plane(spec, 16, 8, plane.fixed, u32(entries)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_exceptions_of_another_dtype(dtype: torch.dtype) -> None:
    fixed = encode(random_scale(16, 8, 0.0, 1)).fixed
    with pytest.raises(FormatError, match=f"s.nvfp4_csf_exceptions: {dtype} .*expected torch.uint32 1-D"):
        plane_from_streams(fixed, torch.zeros(2, dtype=dtype), 16, 8, NVFP4, "s")


def test_exceptions_of_two_dimensions() -> None:
    fixed = encode(random_scale(16, 8, 0.0, 1)).fixed
    with pytest.raises(FormatError, match=r"s.nvfp4_csf_exceptions: torch.uint32 \[1, 1\], expected"):
        plane_from_streams(fixed, u32([1]).view(1, 1), 16, 8, NVFP4, "s")


@pytest.mark.parametrize("shape", [(79,), (81,), (2, 40), (1, 1, 80), (0,)])
def test_fixed_of_another_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=r"s.nvfp4_csf_fixed: shape .*expected \[80\] or \[1, 80\]"):
        plane_from_streams(torch.zeros(shape, dtype=torch.uint8), u32([]), 16, 8, NVFP4, "s")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_fixed_of_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=f"s.nvfp4_csf_fixed: dtype {dtype}, expected torch.uint8"):
        plane_from_streams(torch.zeros(80, dtype=torch.uint8).to(dtype), u32([]), 16, 8, NVFP4, "s")


def test_validate_checks_sizes_itself() -> None:
    plane = encode(random_scale(16, 8, 0.0, 1))
    refused(
        "x.weight_scale.nvfp4_csf_fixed: 80 bytes, expected 144", Plane(NVFP4, 16, 16, plane.fixed, u32([]))
    )
    refused("expected torch.uint8 1-D", Plane(NVFP4, 16, 8, plane.fixed.view(1, 80), u32([])))
    refused("x.weight_scale: 8 rows, expected", Plane(NVFP4, 8, 8, plane.fixed, u32([])))


def test_unused_selector_bits() -> None:
    plane = encode(random_scale(32, 5, 0.0, 1, MXFP4), MXFP4)
    plane.fixed[32 + 16 + 4] |= 0x80
    refused(r"mxfp4_csf_fixed: last selector byte 0x.. of row 20, expected its upper 3 bits to be 0", plane)


@pytest.mark.parametrize(
    ("spec", "shape", "match"),
    [
        (NVFP4, (8, 4), "s: 8 rows, expected a positive multiple of 16"),
        (NVFP4, (0, 4), "s: 0 rows"),
        (NVFP4, (16, 3), "s: 3 columns, expected even and positive"),
        (NVFP4, (16, 0), "s: 0 columns"),
        (MXFP4, (17, 3), "s: 17 rows"),
        (NVFP4, (4112, 4096), "s: 4112 x 4096 = 16842752 scales, expected at most 16777216"),
    ],
)
def test_shapes_no_codec_defines(spec: CodecSpec, shape: tuple[int, int], match: str) -> None:
    with pytest.raises(FormatError, match=match):
        encode(torch.zeros(shape, dtype=torch.uint8), spec, "s")
    with pytest.raises(FormatError, match=match):
        plane_from_streams(torch.zeros(1, dtype=torch.uint8), u32([]), *shape, spec, "s")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_scales_that_are_no_bytes(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=f"s: dtype {dtype}, expected"):
        encode(torch.zeros(16, 4, dtype=dtype), NVFP4, "s")


def test_scales_of_other_ranks() -> None:
    with pytest.raises(FormatError, match=r"s: shape \[16\], expected 2"):
        encode(torch.zeros(16, dtype=torch.uint8), NVFP4, "s")
    with pytest.raises(FormatError, match=r"s: shape \[16, 2\], expected 3"):
        encode_batch(torch.zeros(16, 2, dtype=torch.uint8), NVFP4, "s")


@pytest.mark.parametrize(
    ("rows", "cols", "match"),
    [
        ((0, 8), None, "multiples of 16"),
        ((8, 24), None, "multiples of 16"),
        ((0, 64), None, "a part of 32 x 8"),
        ((16, 16), None, "a part of 32 x 8"),
        (None, (1, 4), "even"),
        (None, (2, 5), "even"),
        (None, (4, 10), "a part of 32 x 8"),
        (None, (-2, 4), "a part of 32 x 8"),
    ],
)
def test_slices_that_cut_a_slab_or_a_byte(rows: tuple | None, cols: tuple | None, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        slice_plane(encode(random_scale(32, 8, 0.1, 1)), rows, cols)


def test_stacks_that_do_not_fit() -> None:
    narrow, wide = encode(random_scale(16, 4, 0, 1)), encode(random_scale(16, 6, 0, 1))
    with pytest.raises(
        FormatError, match=r"plane 1 of the stack: .* with 6 columns, expected .* with 4 columns"
    ):
        stack([narrow, wide])
    with pytest.raises(FormatError, match="plane 1 of the stack"):
        stack([narrow, encode(random_scale(16, 4, 0, 1, MXFP4), MXFP4)])
    with pytest.raises(FormatError, match="no planes"):
        stack([])
    half = encode(torch.zeros(2064, 4096, dtype=torch.uint8))
    with pytest.raises(FormatError, match="stack of planes: 4128 x 4096"):
        stack([half, half])


def test_padding_does_not_shrink() -> None:
    plane = encode(random_scale(32, 8, 0.1, 1))
    with pytest.raises(FormatError, match="padded plane: padding 32 x 8 to 16 x 8"):
        pad_plane(plane, 16, 8)
    with pytest.raises(FormatError, match="padded plane: 9 columns"):
        pad_plane(plane, 32, 9)


def test_unknown_codec() -> None:
    assert set(CODECS) == {NVFP4.name, MXFP4.name}
    with pytest.raises(FormatError, match="unknown codec 'byte-window5/1', expected one of"):
        codec_by_name("byte-window5/1")


# ---- speed ---------------------------------------------------------------------------------------


def test_speed_excludes_python_loops() -> None:
    """A tenth of what the benchmark demands: a loop over rows or elements is slower still."""
    scale = heavy_tailed(16, 2048, 48, NVFP4, 2.5)
    start = time.process_time()
    planes = encode_batch(scale)
    encoded = time.process_time()
    for plane in planes:
        decode(plane)
    decoded = time.process_time()
    assert scale.numel() / (encoded - start) > 10e6
    assert scale.numel() / (decoded - encoded) > 30e6
