"""The NVFP4 quantiser against a brute-force search."""

import pytest
import torch
from vllm_csf.loaders import quantize as q

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(value: float) -> set[int]:
    """Codes of the nearest FP4 magnitudes; of two, the one with an even code."""
    distance = [abs(abs(value) - m) for m in MAGNITUDES]
    best = [c for c, d in enumerate(distance) if d == min(distance)]
    return {best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)}


def e4m3_values() -> list[float]:
    """The value of each byte 0..126, from its bits: 4 of exponent (bias 7), 3 of fraction."""
    values = []
    for byte in range(127):
        exponent, fraction = byte >> 3, byte & 7
        values.append(2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8))
    return values


def test_block_scales_are_the_nearest_e4m3_bytes():
    weight = (
        torch.randn(64, 128, generator=torch.Generator().manual_seed(5)) * torch.logspace(-4, 0, 64)[:, None]
    )
    found = q.quantize(weight)
    table = e4m3_values()
    largest = weight.abs().reshape(64, 8, 16).amax(-1).double() / (6 * found.global_scale.double())
    for byte, wanted in zip(found.scale.flatten().tolist(), largest.flatten().tolist(), strict=True):
        distance = abs(table[byte] - wanted)
        # The quantiser divides in FP32, this test in FP64: a hair's breadth at a halfway point is allowed.
        assert distance <= min(abs(v - wanted) for v in table) + 1e-6 * wanted


def test_low_nibble_is_the_even_column():
    weight = torch.zeros(16, 16)
    weight[:, 4], weight[:, 7] = 6.0, -3.0
    packed = q.quantize(weight).packed
    assert packed[0].tolist() == [0, 0, 7, 13 << 4, 0, 0, 0, 0]


def test_codes_are_nearest_and_ties_go_to_even():
    values = torch.cat((torch.linspace(-7, 7, 4001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    codes = q.fp4_codes(values)
    for value, code in zip(values.tolist(), codes.tolist(), strict=True):
        assert code & 7 in nearest(value)
        assert bool(code & 8) == (value < 0)


@pytest.mark.parametrize("seed", range(3))
def test_scales_follow_the_largest_of_a_block_and_no_other_code_is_nearer(seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 64, generator=g) * torch.rand(32, 1, generator=g)
    found = q.quantize(weight)
    assert found.global_scale == pytest.approx(weight.abs().max().item() / (6 * 448), rel=1e-6)
    scale = found.scale.view(torch.float8_e4m3fn).float()
    wanted = weight.unflatten(-1, (-1, 16)).abs().amax(-1) / 6 / found.global_scale
    assert torch.equal(scale, wanted.to(torch.float8_e4m3fn).float())
    step = (scale * found.global_scale).repeat_interleave(16, -1)
    best = torch.stack([(weight.abs() - m * step).abs() for m in MAGNITUDES]).amin(0)
    assert torch.allclose((weight - found.dequantize()).abs(), best, rtol=1e-5, atol=1e-6)


def test_zero_blocks_stay_zero():
    weight = torch.randn(16, 32)
    weight[3] = 0
    assert not q.quantize(weight).dequantize()[3].any()
    assert not q.quantize(torch.zeros(16, 32)).dequantize().any()


def test_global_scale_survives_being_stored_as_a_divisor():
    for seed in range(200):
        scale = q.global_scale(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)))
        assert 1 / (1 / scale) == scale


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        q.quantize(torch.zeros(16, 24))
