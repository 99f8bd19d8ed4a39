"""`vllm-csf bench`: arguments, errors of one line, what needs no GPU."""

from __future__ import annotations

import argparse
import json

import pytest
from test_kernel_tables import row

from vllm_csf import cli
from vllm_csf.cli import bench

RECORD = {"machine": {"gpu": "Card"}, "commit": "c", "rows": [row("csf", 1, 20.0), row("native", 1, 30.0)]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--geometry", "None"], "has 'None', expected some of GLM-Flash-TP4"),
        (["--tokens", "1,x"], "argument --tokens"),
        (["--tokens", "0"], "argument --tokens"),
        (["--routing", "even"], "has 'even', expected some of uniform, zipf, hot"),
        (["--arms", "csf,theirs"], "has 'theirs', expected some of csf, native, marlin"),
        (["--arms", "csf,native,csf"], "has 'csf' more than once"),
        (["--exceptions", "1.5"], "is '1.5', expected a number from 0 to 1"),
    ],
)
def test_wrong_usage_is_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "kernels", *arguments])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_kernels_need_a_device(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "kernels", "--geometry", "Qwen3-30B-TP1"]) == 1
    assert capsys.readouterr().err.strip() == (
        "vllm-csf bench: the kernels are measured on a CUDA device, and there is none"
    )


def test_geometries_of_a_checkpoint(checkpoint):
    found = bench.geometries_of(
        argparse.Namespace(checkpoint=str(checkpoint("glm4-moe", "csf")), tensor_parallel_size=2, topk=None)
    )
    assert [(g.experts, g.hidden, g.width, g.topk) for g in found] == [(8, 128, 64, 2)]  # 48, padded
    assert found[0].name.endswith("-TP2")


def test_a_checkpoint_without_fp4_experts_is_refused(checkpoint, capsys):
    folder = str(checkpoint("qwen3-moe", "dequantized"))
    assert cli.main(["bench", "kernels", folder]) == 1
    assert "no experts in FP4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--overlap-starts"], "--overlap-starts needs --together"),
        (["--uniform-routing"], "--uniform-routing with a stock arm needs a CUDA device"),
        (["--synthetic-acceptance", "2.4"], "--synthetic-acceptance needs a CUDA device"),
        (["--speculation", "mtp"], "--speculation is mtp, which needs an MTP layer"),
        (["--speculation", "both"], "--speculation is both, which needs an MTP layer"),
    ],
)
def test_serve_refuses_what_it_cannot_do(checkpoint, capsys, monkeypatch, flags, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    folder = str(checkpoint("qwen3-moe" if "--speculation" in flags else "glm4-moe", "dequantized"))
    assert cli.main(["bench", "serve", folder, *flags]) == 1
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


@pytest.mark.parametrize("command", ["kernels", "serve", "quality"])
@pytest.mark.parametrize(
    ("out", "said"), [(".", "which is a folder, expected a file"), ("file/record.json", "cannot be written")]
)
def test_where_no_record_can_be_written_nothing_is_measured(
    checkpoint, tmp_path, capsys, monkeypatch, command, out, said
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "file").touch()
    folder = str(checkpoint("glm4-moe", "csf"))
    assert cli.main(["bench", command, folder, "--out", str(tmp_path / out)]) == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-tokens", "600"], "--prompt-tokens and --tokens: 632 tokens, expected at most"),
        (["--context", "513"], "--context: 513 tokens, expected at most max_position_embeddings, 512"),
    ],
)
def test_quality_asks_no_more_than_the_model_takes(checkpoint, capsys, flags, said):
    assert cli.main(["bench", "quality", str(checkpoint("glm4-moe", "csf")), *flags]) == 1
    assert said in capsys.readouterr().err


def test_records_without_a_case_in_common_are_not_compared(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"machine": {}, "commit": "c", "checkpoint": {}, "windows": []}))
    assert cli.main(["bench", "compare", str(path), str(path)]) == 1
    assert "no case in common" in capsys.readouterr().out


def test_table_prints_and_draws(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    assert cli.main(["bench", "table", str(path)]) == 0
    assert "| 1 | 20.0 | 30.0 |" in capsys.readouterr().out
    assert path.with_suffix(".svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "is no record, expected a record of kernels"),
        (
            b"{",
            "cannot be read: no JSON: expecting property name enclosed in double quotes in line 1, column 2",
        ),
        (b"\x80", "cannot be read: no text in UTF-8: byte 0x80 at 0"),
        (b"[" * 100_000, "cannot be read: nested too deeply"),
        (b'{"rows": [{}]}', "is no whole record: no 'machine'"),
        (None, "cannot be read: no such file or directory"),
    ],
)
def test_table_refuses_what_is_no_record(tmp_path, capsys, content, said):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["bench", "table", str(path)]) == 1
    assert capsys.readouterr().err == f"vllm-csf bench: {path}: {said}\n"
