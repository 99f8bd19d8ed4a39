"""What the tables of the routing cannot hold is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm_csf.kernels.moe.route import RouteConfig

GOOD = RouteConfig(capacity=1024, tile=64, wide_ids=False, mapped=False, shared_pairs=0, align=8, step=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 1000}, "capacity is 1000, expected a multiple of 1024"),
        ({"tile": 0}, "tile is 0, expected 1 to 255"),
        ({"tile": 256}, "tile is 256, expected 1 to 255"),
        ({"step": 48}, "step is 48, expected a divisor of tile 64 and a multiple of 8"),
        ({"step": 4}, "step is 4, expected a divisor of tile 64 and a multiple of 8"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **change)


def test_parts_have_counters_of_their_own():
    """Each rank's, and those of the pairs before and behind the part, for every expert."""
    shared = replace(GOOD, parts=8)
    assert (shared.ranks, shared.rows) == (32, 34)
    assert shared.counters == 34 * 1024
    assert replace(GOOD, parts=1).rows == 16
