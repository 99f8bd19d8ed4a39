"""`vllm-csf bench serve` and `bench quality` on the example, with real servers and engines on the CPU."""

from __future__ import annotations

import json
import re

import pytest
import torch

from vllm_csf import cli
from vllm_csf.bench import serve_report

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU build"),
]


def test_serve_measures_with_and_without_mtp(checkpoint, tmp_path, capfd):
    out = tmp_path / "record.json"
    models = [str(checkpoint("glm4-moe", "csf")), "--stock", str(checkpoint("glm4-moe", "dequantized"))]
    short = ["--arms", "stock,csf", "--together", "--rounds", "2", "--waves", "2", "--load", "24:12:1,3"]
    mtp = ["--speculation", "both", "--speculative-tokens", "1"]
    assert cli.main(["bench", "serve", *models, *short, *mtp, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert not record["failures"]
    check_starts(record)
    for (speculation, _, output, concurrency), arms in serve_report.cells(record).items():
        assert set(arms) == {"stock", "csf"}
        for row in (*arms["stock"], *arms["csf"]):
            assert row["output_tokens"] == 2 * concurrency * output
            check_steps(row, concurrency, drafts=speculation == "mtp")
        # Greedy and exact: both arms come to the same tokens, and so to the same drafts.
        accepted = {name: [row["acceptance"] for row in rows] for name, rows in arms.items()}
        assert accepted["stock"] == accepted["csf"]
    assert any((row["acceptance"] or 0) > 1 for row in record["windows"])
    assert "csf / stock" in capfd.readouterr().out
    assert "<svg" in out.with_suffix(".html").read_text()
    assert cli.main(["bench", "compare", str(out), str(out)]) == 0
    assert "1.000" in capfd.readouterr().out


def check_starts(record: dict) -> None:
    assert [(start["arm"], start["others_up"]) for start in record["starts"]] == [
        ("stock", 0),
        ("csf", 1),
    ] * 2
    for start in record["starts"]:
        assert start["kv_tokens"] > 0
        assert start["host_peak_mib"] > 500
        assert start["load_seconds"] > 0
        # A draft reports its layers itself.
        lines = 0 if start["arm"] == "stock" else 2 if start["speculation"] == "mtp" else 1
        assert len(start.get("plugin", [])) == lines


def check_steps(row: dict, concurrency: int, drafts: bool) -> None:
    """A step yields a token of each sequence at most, and a draft where there are drafts."""
    assert (row["acceptance"] is None) != drafts
    most = concurrency * (2 if drafts else 1)
    assert 0.99 <= row["output_tok_s"] / row["steps_s"] <= 1.01 * most


def test_quality_finds_csf_and_native_identical_and_stock_close(checkpoint, tmp_path, capfd):
    out, text = tmp_path / "record.json", tmp_path / "text"
    text.write_text("A text whose perplexity says nothing, for the model is random. " * 6)
    models = [str(checkpoint("glm4-moe", "csf")), "--stock", str(checkpoint("glm4-moe", "dequantized"))]
    few = ["--prompts", "4", "--tokens", "8", "--context", "64", "--pieces", "3", "--text", str(text)]
    assert cli.main(["bench", "quality", *models, *few, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [arm["arm"] for arm in record["arms"]] == ["stock", "native", "csf"]
    found = {(row["a"], row["b"]): row for row in record["agreement"]}
    assert found["csf", "native"]["identical"]
    assert found["csf", "native"]["max_kl"] == 0
    stock = found["csf", "stock"]
    assert stock["answers_equal"] == 4
    assert 0 < stock["max_logprob_difference"] < 1e-3
    assert stock["max_kl"] < 1e-5
    assert "identical, bit for bit" in capfd.readouterr().out


def test_native_scales_are_served(checkpoint, tmp_path):
    """With made-up weights, as a measurement without a checkpoint has them."""
    out = tmp_path / "record.json"
    short = ["--arms", "native", "--rounds", "1", "--waves", "1", "--load", "24:4:1", "--speculation", "off"]
    flags = ["--server-args=--load-format dummy", "--temperature", "1", "--out", str(out)]
    model = tmp_path / "model"
    assert cli.main(["make-example", str(model), "--family", "glm4-moe", "--no-weights"]) == 0
    assert cli.main(["bench", "serve", str(model), *short, *flags]) == 0
    (start,) = json.loads(out.read_text())["starts"]
    assert re.search(r"resident \(10[0-2]\.\d %\)", start["plugin"][0])  # with the offsets of small planes
    assert "execution reference, native scales" in start["plugin"][0]


def test_starts_with_empty_and_with_filled_caches(checkpoint, tmp_path, capfd):
    out = tmp_path / "starts.json"
    flags = ["--server-args=--max-model-len 128", "--out", str(out)]
    model = str(checkpoint("qwen3-moe", "csf"))
    assert cli.main(["bench", "starts", model, "--arms", "csf", "--rounds", "1", *flags]) == 0
    cold, warm = json.loads(out.read_text())["starts"]
    assert (cold["caches"], warm["caches"]) == ("empty", "filled")
    assert cold["answer"] == warm["answer"]
    assert cold["start_seconds"] > cold["load_seconds"] > 0
    assert "| csf | empty" in " ".join(capfd.readouterr().out.split())
