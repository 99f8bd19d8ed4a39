"""Charts: well-formed, with points where the numbers say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from vllm_csf.bench.plot import HEIGHT, WIDTH, Chart, Point, svg

SVG = "{http://www.w3.org/2000/svg}"


def line(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(x, y, y, y) for x, y in pairs]


def circles(text: str) -> list[tuple[float, float]]:
    return [
        (float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(text).iter(f"{SVG}circle")
    ]


def test_logarithmic_axes_space_factors_evenly():
    (x1, y1), (x2, y2), (x3, y3) = circles(
        svg([Chart("t", "x", "y", {"a": line((1, 10), (8, 100), (64, 1000))}, log_y=True)])
    )
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y1 > y3  # larger values stand higher
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in ((x1, y1), (x3, y3)))


def test_linear_axis_begins_at_zero():
    (_, y1), (_, y2) = circles(svg([Chart("t", "x", "y", {"a": line((1, 1), (2, 2))}, log_x=False)]))
    zero = 2 * y1 - y2
    assert zero == pytest.approx(HEIGHT - 46, abs=0.5)


def test_bars_show_the_spread():
    text = svg([Chart("t", "x", "y", {"a": [Point(1, 5, 4, 7), Point(2, 5, 5, 5)]})])
    bars = [x for x in ElementTree.fromstring(text).iter(f"{SVG}line") if x.get("stroke-opacity")]
    assert len(bars) == 1


@pytest.mark.parametrize(
    "series",
    [{}, {"a": []}, {"a": line((1, 0))}, {"a": line((4, 3))}, {"a": line((1, -2), (2, 5))}],
    ids=["none", "empty", "zero", "one point", "negative"],
)
@pytest.mark.parametrize("log_y", [False, True])
def test_odd_data_still_draws(series, log_y):
    ElementTree.fromstring(svg([Chart("t", "x", "y", series, log_y=log_y)]))


def test_names_are_escaped():
    text = svg([Chart("<a & b>", "x<y", "y", {"<s>": line((1, 1))})])
    texts = [t.text for t in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"<a & b>", "x<y", "<s>"} <= set(texts)


def test_charts_stand_in_rows():
    root = ElementTree.fromstring(svg([Chart(str(n), "x", "y", {"a": line((1, 1))}) for n in range(3)]))
    assert (root.get("width"), root.get("height")) == (str(2 * WIDTH), str(2 * HEIGHT))
