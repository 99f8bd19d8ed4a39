"""The command: what it prints, its exit statuses, and errors of one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from dataclasses import fields

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

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


def commands(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def test_every_argument_of_every_command_has_a_help_text():
    found = list(commands(cli.parser()))
    assert len(found) > len(cli.COMMANDS) + 1  # those of bench as well
    for parser in found:
        parser.format_help()
        for action in parser._actions:
            assert action.help or isinstance(action, _SubParsersAction), f"{parser.prog} {action.dest}"


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
    assert out.strip().endswith(": 1 finding")
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hidden", "120"], "hidden is 120, expected a multiple of 32"),
        (["--head-dim", "7"], "head_dim is 7, expected a multiple of 8 up to 512"),
        (["--head-dim", "520"], "head_dim is 520, expected a multiple of 8 up to 512"),
        (["--heads", "5"], "heads is 5, expected a multiple of kv_heads, 2"),
        (["--topk", "9"], "topk is 9, expected 1 to 8, the number of experts"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line_and_exit_with_two(tmp_path, capsys, flags, said):
    assert cli.main(["make-example", str(tmp_path / "a"), *flags]) == 2
    assert capsys.readouterr().err == f"vllm-csf make-example: {said}\n"
    assert not (tmp_path / "a").exists()


def test_an_example_is_not_made_over_files(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("x")
    assert cli.main(["make-example", str(tmp_path / "a")]) == 1
    assert "is not empty" in capsys.readouterr().err


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


@pytest.mark.parametrize("command", ["inspect", "precompile"])
def test_neither_folder_nor_repository_is_one_line_without_words_of_the_network(
    command, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def nobody(*_, **__):
        raise LocalEntryNotFoundError("Got: ConnectError: [Errno 111]\nAn error happened") from OSError()

    monkeypatch.setattr("huggingface_hub.snapshot_download", nobody)
    assert cli.main([command, "org/model"]) == 1
    assert capsys.readouterr().err == (
        f"vllm-csf {command}: org/model: no such folder, and not in the Hugging Face cache "
        "(the hub cannot be asked)\n"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": [1]}, "config.json: text_config: list, expected an object"),
        ({"text_config": None, "hidden_act": "magic"}, "activation is 'magic'"),
        ({"num_experts_per_tok": "2"}, "has '2' experts a token, expected a whole number"),
        ({"swiglu_limit": [1]}, "has swiglu_limit [1], expected a number"),
    ],
)
def test_precompile_names_strange_settings(folders, tmp_path, capsys, change, said):
    shutil.copytree(folders / "csf", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | change))
    for command in (["precompile"], ["bench", "kernels"]):
        assert cli.main([*command, str(tmp_path / "a")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_names_that_the_terminal_cannot_show(folders, tmp_path):
    shutil.copytree(folders / "csf", tmp_path / "日本")
    command = [sys.executable, "-m", "vllm_csf.cli", "inspect", str(tmp_path / "日本")]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    out = subprocess.run(command, capture_output=True, env=environment)
    assert out.returncode == 0, out.stderr
    assert rb"\u65e5\u672c: layout A" in out.stdout


def test_errors_of_the_system_are_words(folders, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert cli.main(["convert", str(folders / "native"), str(tmp_path / "file" / "below")]) == 1
    assert capsys.readouterr().err.strip().endswith(f"{tmp_path}/file/below/csf_source: not a directory")
    assert cli.main(["make-example", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == (
        f"vllm-csf make-example: {tmp_path}/file: is a file, expected a new folder\n"
    )


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
        ["make-example", "x", "--layers", "9" * 5000],
        ["make-example", "x", "--seed", "-1"],
        ["bench"],
        ["bench", "table"],
        ["bench", "serve", "x", "--temperature", "nan"],
        ["bench", "serve", "x", "--duration", "0"],
        ["bench", "serve", "x", "--synthetic-acceptance", "0.5"],
    ],
)
def test_wrong_usage_is_one_line_and_exits_with_two(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-csf")
