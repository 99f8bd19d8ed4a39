"""The prepared form: unpack(pack(x)) returns every byte, and what stays resident is as small as promised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_csf.kernels import layout


def random_stack(shape, share, seed, extremes=False):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (shape.experts, shape.rows, shape.k // 2), generator=g, dtype=torch.uint8)
    size = (shape.experts, shape.rows, shape.k // 16)
    scale = (torch.randint(90, 106, size, generator=g)).to(torch.uint8)
    wild = torch.rand(size, generator=g) < share
    scale = torch.where(wild, torch.randint(0, 256, size, generator=g).to(torch.uint8), scale)
    if extremes:
        scale[0, 0] = 0
        scale[0, 1] = 255
        scale[0, 2] = 127
        scale[0, 3] = torch.arange(size[2]) % 9
    return weight, scale


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.08, 1.0])
def test_unpack_returns_what_was_packed(gated, native, share):
    for rows, k in ((32, 64), (64, 320), (96, 1408), (128, 2560)):
        shape = layout.Shape(3, rows, k, gated, native)
        weight, scale = random_stack(shape, share, rows + k, extremes=True)
        back = layout.unpack(layout.pack(weight, scale, shape))
        assert torch.equal(back[0], weight)
        assert torch.equal(back[1], scale)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
    st.sampled_from([0, 0.02, 0.06, 0.3, 1]),
)
def test_any_plane_survives(experts, row_blocks, k_tiles, gated, native, seed, share):
    shape = layout.Shape(experts, 32 * row_blocks, 64 * k_tiles, gated, native)
    weight, scale = random_stack(shape, share, seed)
    g = torch.Generator().manual_seed(seed)
    bases = torch.randint(0, 256, scale.shape[:2], generator=g, dtype=torch.uint8)
    bases = torch.where((bases >= 8) & (bases <= 111), bases, torch.zeros_like(bases))
    for given_bases in (None, bases):
        back = layout.unpack(layout.pack(weight, scale, shape, given_bases))
        assert torch.equal(back[0], weight)
        assert torch.equal(back[1], scale)
