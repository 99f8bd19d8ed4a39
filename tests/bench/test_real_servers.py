"""`vllm-csf bench serve` and `bench quality` on the example, with real servers and engines on the CPU."""

from __future__ import annotations

import json

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
    arguments = ["--arms", "stock,native,csf", "--together", "--rounds", "2", "--waves", "2"]
    loads = ["--load", "24:12:1", "--load", "24:12:3"]
    models = [str(checkpoint("glm4-moe", "csf")), "--stock", str(checkpoint("glm4-moe", "dequantized"))]
    flags = ["--speculation", "mtp", "--speculative-tokens", "1", "--out", str(out)]
    assert cli.main(["bench", "serve", *models, *arguments, *loads, *flags]) == 0
    record = json.loads(out.read_text())
    assert not record["failures"]
    assert len(record["windows"]) == 3 * 2 * 2
    for start in record["starts"]:
        assert start["kv_tokens"] > 0
        assert start["host_peak_mib"] > 500
    said = {start["arm"]: start.get("plugin", []) for start in record["starts"]}
    assert not said["stock"]
    assert "execution reference, native scales" in said["native"][0]
    assert "execution reference" in said["csf"][0]
    for (_, _, output, concurrency), arms in serve_report.cells(record).items():
        for rows in arms.values():
            for row in rows:
                assert row["output_tokens"] == 2 * concurrency * output
                # A step yields at most a token and a draft for each sequence, and at least one token.
                per_step = row["output_tok_s"] / row["steps_s"]
                assert 1 <= per_step <= 2 * concurrency
                assert row["acceptance"] > 1  # the example drafts as its first layer does
        # Greedy and exact: native and compressed scales lead to the same tokens, so to the same drafts.
        accepted = {name: [row["acceptance"] for row in rows] for name, rows in arms.items()}
        assert accepted["csf"] == accepted["native"]
    assert "csf / native" in capfd.readouterr().out
    assert "<svg" in out.with_suffix(".html").read_text()
    assert cli.main(["bench", "compare", str(out), str(out)]) == 0
    assert "1.000" in capfd.readouterr().out


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
