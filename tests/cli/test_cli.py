"""The command: what it prints, its exit statuses, and errors of one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import fields

import pytest

from vllm_csf import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    assert cli.main(["make-example", str(root / "native"), "--family", "glm4-moe"]) == 0
    assert cli.main(["convert", str(root / "native"), str(root / "csf"), "--jobs", "2", "--quiet"]) == 0
    return root


def test_help_is_quick():
    began = time.perf_counter()
    out = subprocess.run([sys.executable, "-m", "vllm_csf.cli", "--help"], capture_output=True, text=True)
    assert time.perf_counter() - began < 1.0
    assert out.returncode == 0
    assert all(name in out.stdout for name, *_ in cli.COMMANDS)


def test_help_imports_nothing_heavy():
    code = "import sys; from vllm_csf import cli; cli.parser(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "tqdm", "vllm"} & set(found.stdout.split())


@pytest.mark.parametrize("folder", ["native", "csf"])
def test_inspect_as_table_and_json(folders, capsys, folder):
    assert cli.main(["inspect", str(folders / folder)]) == 0
    table = capsys.readouterr().out
    assert "model.layers.2.mlp.experts" in table
    assert "worst planes" in table
    assert cli.main(["inspect", str(folders / folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == ("C" if folder == "native" else "A")
    assert len(found["layers"]) == 3
    assert found["native_bytes"] == 3 * 8 * 3 * 128 * 96 // 16
    assert 0.5 < found["compressed_bytes"] / found["native_bytes"] < 1
    assert found["exceptions"] > 0


def test_inspect_agrees_before_and_after_conversion(folders, capsys):
    sizes = []
    for folder in ("native", "csf"):
        cli.main(["inspect", str(folders / folder), "--json"])
        found = json.loads(capsys.readouterr().out)
        sizes.append([(row["compressed_bytes"], row["exceptions"]) for row in found["layers"]])
    assert sizes[0] == sizes[1]


def test_verify_and_restore(folders, capsys, tmp_path):
    assert cli.main(["verify", str(folders / "csf"), "--source", str(folders / "native")]) == 0
    assert "sound" in capsys.readouterr().out
    assert cli.main(["verify", str(folders / "csf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert cli.main(["restore", str(folders / "csf"), str(tmp_path / "back")]) == 0
    for path in (folders / "native").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_verify_reads_all_or_the_planes_only(folders, capsys, tmp_path):
    shutil.copytree(folders / "csf", tmp_path / "csf")
    files = len(list((folders / "native").iterdir()))
    assert cli.main(["verify", str(tmp_path / "csf")]) == 0
    assert f"{files} files of the source reproduced: sound" in capsys.readouterr().out
    (tmp_path / "csf" / "tokenizer.json").write_text("{}")
    assert cli.main(["verify", str(tmp_path / "csf")]) == 1
    out = capsys.readouterr().out
    assert "tokenizer.json: SHA-256" in out
    assert out.strip().endswith("1 findings")
    assert cli.main(["verify", str(tmp_path / "csf"), "--planes-only"]) == 0


def test_interrupted_conversion_is_inspected_by_nobody(folders, capsys, tmp_path):
    shutil.copytree(folders / "csf", tmp_path / "csf")
    (tmp_path / "csf" / "csf_source" / "INCOMPLETE").write_text("{}")
    assert cli.main(["inspect", str(tmp_path / "csf")]) == 1
    assert "its conversion was interrupted" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "csf")]) == 1


def test_choices_of_make_example_are_those_of_the_loaders():
    from vllm_csf.loaders import example

    from vllm_csf.cli import example as command

    assert command.FAMILIES == example.FAMILIES
    assert command.LAYOUTS == example.LAYOUTS
    assert [name.replace("-", "_") for name in command.SIZES] == [f.name for f in fields(example.Sizes)]


def test_make_example_takes_sizes(tmp_path, capsys):
    sizes = {"layers": 1, "hidden": 64, "width": 32, "experts": 3, "topk": 1}
    sizes |= {"heads": 2, "kv-heads": 1, "head-dim": 16, "vocabulary": 270}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    assert cli.main(["make-example", str(tmp_path / "a"), "--unequal-gate-up", *flags]) == 0
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["moe_intermediate_size"]) == (
        1,
        64,
        32,
    )
    assert (config["num_experts"], config["num_experts_per_tok"], config["vocab_size"]) == (3, 1, 270)
    found = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    assert found == (2, 1, 16)
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "a")]) == 0
    assert "gate and up of 3 experts have different global scales" in capsys.readouterr().out


def test_sizes_that_do_not_fit_are_one_line_and_exit_with_two(tmp_path, capsys):
    assert cli.main(["make-example", str(tmp_path / "a"), "--hidden", "120"]) == 2
    assert capsys.readouterr().err == "vllm-csf make-example: hidden is 120, expected a multiple of 32\n"
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("x")
    assert cli.main(["make-example", str(tmp_path / "a")]) == 1


def test_findings_exit_with_one(folders, capsys):
    assert cli.main(["verify", str(folders / "native")]) == 1
    assert "no compressed experts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "/nowhere/at/all"],
        ["convert", "/nowhere/at/all", "/nowhere/else"],
        ["restore", "/nowhere/at/all", "/nowhere/else"],
    ],
)
def test_failures_are_one_line_and_exit_with_one(arguments, capsys):
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"vllm-csf {arguments[0]}: ")
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["convert", "one"],
        ["make-example", "x", "--family", "none"],
        ["make-example", "x", "--layout", "none"],
        ["make-example", "x", "--layers", "0"],
        ["make-example", "x", "--experts", "some"],
        ["convert", "a", "b", "--jobs", "-1"],
        ["convert", "a", "b", "--jobs", "0"],
    ],
)
def test_wrong_usage_exits_with_two(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
