"""Cuts of an expert's width: the cases of shapes that no tile likes."""

from __future__ import annotations

import pytest

from vllm_csf.partition import extent, padded_width

WIDTHS = [(640, 4), (640, 8), (704, 2), (1856, 4), (1408, 8), (2048, 6), (768, 1), (1536, 2), (96, 4)]


@pytest.mark.parametrize(("width", "ranks"), WIDTHS)
def test_ranks_cover_the_width_once(width: int, ranks: int) -> None:
    parts = [extent(width, rank, ranks, "layer") for rank in range(ranks)]
    channels = [c for part in parts for c in range(part.start, part.stop)]
    assert channels == list(range(width))
    for part in parts:
        assert part.size == padded_width(width, ranks)
        assert part.size % 32 == 0
        assert 0 <= part.count <= part.size
        assert part.start % 16 == 0
        assert part.stop % 16 == 0


@pytest.mark.parametrize(("width", "ranks"), [(768, 4), (1536, 8), (512, 4)])
def test_widths_that_divide_are_cut_as_vllm_cuts_them(width: int, ranks: int) -> None:
    for rank in range(ranks):
        part = extent(width, rank, ranks, "layer")
        assert (part.start, part.stop, part.size) == (
            rank * width // ranks,
            (rank + 1) * width // ranks,
            width // ranks,
        )


def test_padding_is_less_than_a_unit_a_rank_where_widths_divide_by_16() -> None:
    for width, ranks in WIDTHS:
        if width % (16 * ranks) == 0:
            assert padded_width(width, ranks) - width // ranks < 32


def test_odd_widths_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.3.*200 channels wide, expected a multiple of 32"):
        extent(200, 0, 2, "model.layers.3.mlp.experts")
