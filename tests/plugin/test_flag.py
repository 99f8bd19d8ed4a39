"""The field `tuning` of ``--quantization-config``, through vLLM's own parser."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_csf
from vllm_csf.flag import FLAG, QuantizationArguments


@pytest.fixture(scope="module")
def parser() -> Any:
    for _ in range(2):
        vllm_csf.register()
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def parsed(parser: Any, *arguments: str) -> Any:
    return parser.parse_args(["--quantization", "csf_nvfp4", *arguments]).quantization_config


@pytest.mark.parametrize(
    ("arguments", "tuning"),
    [
        ((FLAG, '{"tuning": true}'), True),
        ((FLAG, '{"tuning": {"seconds": 5, "memory_mib": 100}}'), {"seconds": 5, "memory_mib": 100}),
        ((f"{FLAG}.tuning.seconds", "5"), {"seconds": 5}),
    ],
)
def test_the_field_is_taken_and_travels(parser, arguments, tuning):
    found = parsed(parser, *arguments)
    assert found.tuning == tuning
    assert (found.linear, found.moe, found.targets) == (None, None, {})
    there = pickle.loads(pickle.dumps(found))
    assert isinstance(there, QuantizationArguments)
    assert there == found


def test_it_goes_along_with_the_fields_of_vllm(parser):
    found = parsed(parser, FLAG, '{"tuning": true, "linear": "mxfp8"}')
    assert found.tuning is True
    assert found.linear == parsed(parser, FLAG, '{"linear": "mxfp8"}').linear
    assert found.targets is None


def test_without_it_the_flag_is_as_it_was(parser):
    found = parsed(parser, FLAG, '{"linear": "mxfp8"}')
    assert type(found) is QuantizationConfigArgs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"tuning": {"second": 5}}',
            "quantization_config.tuning has 'second', expected seconds and memory_mib",
        ),
        ('{"tuning": 5}', "quantization_config.tuning is 5"),
        ('{"tune": true}', "Unexpected keyword argument"),
        ('{"tuning": true, "lin": 1}', "Unexpected keyword argument"),
        ("tuning", "quantization-config"),
    ],
)
def test_other_values_are_refused(parser, capsys, text, message):
    with pytest.raises(SystemExit):
        parsed(parser, FLAG, text)
    assert message in capsys.readouterr().err
