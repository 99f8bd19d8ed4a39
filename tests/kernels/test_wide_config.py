"""How the prefill kernel divides rows, tokens and shared memory, in both of its forms."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cutlass")

from vllm_csf.kernels import ptx
from vllm_csf.kernels.moe.wide_gemm import SHARED_BYTES, WideConfig

SIZES = [  # tokens of a work tile, stages, CTAs a multiprocessor, fragments a warp
    (32, 3, 2, 2), (64, 5, 1, 2), (64, 6, 1, 2), (96, 4, 1, 2), (128, 4, 1, 2), (96, 5, 1, 1),
    (128, 5, 1, 1), (160, 3, 1, 1), (160, 4, 1, 1), (192, 3, 1, 1), (224, 2, 1, 1), (224, 3, 1, 1),
]  # fmt: skip


def configs():
    for (tokens, stages, per_sm, fragments), gated, native in itertools.product(
        SIZES, (True, False), (True, False)
    ):
        yield WideConfig(gated, native, 8, tokens=tokens, stages=stages, per_sm=per_sm, fragments=fragments)


@pytest.mark.parametrize("config", list(configs()), ids=str)
def test_every_token_is_staged_once(config):
    """In parts that a warpgroup's threads store in whole rounds."""
    e = config.epilogue
    parts = [e.steps(part) for part in range(e.parts)]
    assert [step for part in parts for step in part] == list(range(config.tokens // 16))
    assert all(parts)
    assert all(16 * len(part) <= e.staged and 16 * len(part) % e.tokens_at_once == 0 for part in parts)
    assert config.shared_bytes <= SHARED_BYTES[config.per_sm]


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_every_fragment_has_a_warp(gated, fragments):
    """Each fragment of the CTA's row blocks is taken once, and its channels are stored by a warpgroup."""
    config = WideConfig(gated, False, 8, tokens=128, fragments=fragments)
    blocks, channels = config.feed.blocks, config.epilogue.channels
    assert blocks * 2 * fragment_channels(gated) == 2 * channels
    taken = [config.feed.part(warp) for warp in range(8)]
    each = [(block, m + i) for block, m in taken for i in range(fragments)]
    assert sorted(each) == [(block, m) for block in range(blocks) for m in range(2)]


def fragment_channels(gated: bool) -> int:
    """Of 16 rows."""
    return 8 if gated else 16


@pytest.mark.parametrize("width", range(1, 15))
def test_widths_are_shared_as_tokens_are(width):
    """The first accumulator has the odd step, and none is wider than half of the tokens."""
    assert ptx.shares(width, 1) == [width]
    first, second = ptx.shares(width, 2)
    assert first + second == width
    assert 0 <= first - second <= 1


@pytest.mark.parametrize(("tokens", "fragments", "step"), [(40, 2, 16), (144, 1, 32), (240, 1, 32)])
def test_tokens_that_cannot_be_divided_are_refused(tokens, fragments, step):
    message = f"tokens is {tokens}, expected a multiple of {step} for fragments {fragments}"
    with pytest.raises(ValueError, match=message):
        WideConfig(True, False, 8, tokens=tokens, fragments=fragments)
