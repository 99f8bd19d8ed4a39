"""Which arms a checkpoint and a machine allow, and how they are served."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import entry_points

import pytest
from vllm_csf.loaders.errors import CheckpointError

from vllm_csf.bench import subjects
from vllm_csf.bench.geometries import SERVED_ARMS
from vllm_csf.bench.records import BenchError
from vllm_csf.bench.subjects import Flags


def arms(path, stock=None, cpu=False, flags=None, names=SERVED_ARMS):
    return subjects.subjects(names, str(path), stock, flags or Flags(), cpu)


def setting(subject, name="--additional-config"):
    flags = list(subject.flags)
    return json.loads(flags[flags.index(name) + 1]) if name in flags else None


def test_three_arms_of_a_plain_checkpoint_on_a_gpu(checkpoint):
    found, skipped = arms(checkpoint("glm4-moe", "modelopt"))
    stock, native, csf = found
    assert [s.name for s in found] == list(SERVED_ARMS)
    assert not skipped
    assert stock.environment == {"VLLM_PLUGINS": ""}
    assert "--quantization" not in stock.flags
    assert setting(native) == {"csf_scales": "native"}
    assert setting(csf) is None
    assert csf.flags == ("--quantization", "csf_nvfp4")


@pytest.mark.parametrize(
    ("layout", "cpu", "reason"),
    [
        ("modelopt", True, "CPU build has no NVFP4 experts"),
        ("csf", False, "cannot read compressed scales"),
        ("container", False, "cannot read compressed scales"),
    ],
)
def test_stock_is_left_out_with_its_reason(checkpoint, layout, cpu, reason):
    found, skipped = arms(checkpoint("glm4-moe", layout), cpu=cpu)
    assert [s.name for s in found] == ["native", "csf"]
    assert reason in skipped["stock"]
    with pytest.raises(BenchError, match="no arm is left: stock"):
        arms(checkpoint("glm4-moe", layout), cpu=cpu, names=["stock"])


def test_stock_can_be_given_another_checkpoint(checkpoint):
    found, skipped = arms(checkpoint("glm4-moe", "csf"), stock="plain", cpu=True)
    assert not skipped
    assert found[0].model == "plain"


def test_flags_reach_the_arms_they_are_meant_for(checkpoint):
    flags = Flags(["--a"], ["--b", "--additional-config", '{"csf_execution": "cute"}'], ["--c"])
    stock, native, csf = arms(checkpoint("glm4-moe", "modelopt"), flags=flags)[0]
    assert stock.flags == ("--a", "--c")
    assert csf.flags[:4] == ("--quantization", "csf_nvfp4", "--a", "--b")
    assert setting(csf) == {"csf_execution": "cute"}
    assert setting(native) == {"csf_execution": "cute", "csf_scales": "native"}


def test_flags_may_be_written_with_underscores():
    flags = ["--max_model_len=8", "--additional_config", '{"a_b": 1}']
    assert subjects.unless_given(flags, "--max-model-len", 9) == []
    assert subjects.with_settings(flags, {"c_d": 2})[1:] == ("--additional-config", '{"a_b": 1, "c_d": 2}')


def test_made_up_weights_are_those_of_all_arms(checkpoint):
    found, _ = arms(checkpoint("glm4-moe", "modelopt"), flags=Flags(["--a"], stock=["--c"], made_up=True))
    for subject in found:
        assert list(subject.flags)[list(subject.flags).index("--load-format") + 1] == "csf_made_up"
    stock = found[0]
    assert stock.flags[-1] == "--c"
    assert "--quantization" not in stock.flags
    # The plugin's entry point, by its name.
    (entry,) = entry_points(group="vllm.general_plugins", name=stock.environment["VLLM_PLUGINS"])
    assert entry.value == "vllm_csf:register"


@pytest.mark.parametrize(
    "flags", [["--additional-config"], ["--additional-config={"], ["--additional-config=3"]]
)
def test_settings_that_are_no_object_are_refused(flags):
    with pytest.raises(BenchError, match="expected a JSON object"):
        subjects.with_settings(flags, {})


def test_mtp_is_told_by_the_configuration(checkpoint):
    assert subjects.has_mtp(subjects.read_config(str(checkpoint("glm4-moe", "csf"))))
    assert not subjects.has_mtp(subjects.read_config(str(checkpoint("qwen3-moe", "csf"))))


def test_the_fingerprint_is_of_what_is_stored(checkpoint, tmp_path):
    source = checkpoint("glm4-moe", "modelopt")
    copy = shutil.copytree(source, tmp_path / "copy")
    assert subjects.fingerprint(str(copy)) == subjects.fingerprint(str(source))
    path = copy / "config.json"
    path.write_text(path.read_text().replace("silu", "gelu"))
    assert subjects.fingerprint(str(copy)) != subjects.fingerprint(str(source))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        subjects.read_config(str(tmp_path))
