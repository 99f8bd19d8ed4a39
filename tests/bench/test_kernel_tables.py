"""Tables and figures of a record of the kernels, against numbers worked out by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from vllm_csf.bench import kernel_tables


def row(arm: str, tokens: int, us: float, gb_s: float = 1000.0, routing: str = "uniform") -> dict:
    return {
        "geometry": "G",
        "E": 8,
        "H": 64,
        "I": 32,
        "topk": 2,
        "tokens": tokens,
        "routing": routing,
        "arm": arm,
        "us": us,
        "us_min": us - 1,
        "us_max": us + 1,
        "gb_s": gb_s,
        "tflop_s": 1.5,
    }


@pytest.fixture
def record() -> dict:
    return {
        "machine": {"gpu": "Card", "copy_gb_s": 4000.0, "gpus": [{"driver": 5.0}], "versions": {"vllm": "1"}},
        "commit": "abc",
        "skipped": {},
        "checks": [{"geometry": "G", "arm": "csf", "equals_native": True}],
        "failures": [],
        "rows": [
            *(row(arm, 8, us) for arm, us in (("csf", 50.0), ("native", 100.0), ("marlin", 75.0))),
            row("csf", 1, 20.0),
            row("csf", 256, 400.0),
            row("csf", 8, 60.0, routing="zipf"),
        ],
    }


def cells(record: dict, tokens: int) -> list[str]:
    line = next(x for x in kernel_tables.markdown(record).splitlines() if x.startswith(f"| {tokens} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_of_all_arms(record):
    # 1000 GB/s over 50 us are 50 MB: at 85 % of 4000 GB/s, 14.7 us, and 8.
    assert cells(record, 8) == ["8", "50.0", "100.0", "75.0", "0.500", "1.500", "22.7", "1000", "1.5"]


def test_what_is_missing_stays_empty(record):
    assert cells(record, 1)[2:6] == ["", "", "", ""]


def test_the_target_ends_at_128_tokens_and_needs_a_copy_rate(record):
    assert cells(record, 256)[6] == ""
    assert kernel_tables.target_us(row("csf", 8, 50.0), None) is None


def test_routings_get_tables_of_their_own(record):
    text = kernel_tables.markdown(record)
    assert text.index("### G, uniform") < text.index("### G, zipf")


def test_losses_and_gaps_are_said(record):
    record["checks"][0]["equals_native"] = False
    record["skipped"] = {"marlin": "vLLM is not installed"}
    record["failures"] = [{"geometry": "G", "error": "out of memory"}]
    text = kernel_tables.markdown(record)
    assert "**G: csf and native differ.**" in text
    assert "No marlin arm: vLLM is not installed." in text
    assert "out of memory" in text


def test_the_figure_draws_every_arm(record):
    root = ElementTree.fromstring(kernel_tables.figure(record))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(titles)[:2] == ["1: 20", "256: 400"]
    assert "8: 2" in titles  # native / csf
    assert "8: 1.5" in titles  # marlin / csf
