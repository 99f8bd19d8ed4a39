"""The field `tuning` of ``--quantization-config``, which takes none but vLLM's own."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

from vllm.config.quantization import QuantizationConfigArgs
from vllm.config.utils import config
from vllm.engine.arg_utils import EngineArgs

from .tuning import FIELD, parse_budget

FLAG = "--quantization-config"


@config
class QuantizationArguments(QuantizationConfigArgs):
    """vLLM's fields and `tuning`; see `tuning.parse_budget`."""

    tuning: Any = None


def arguments(fields: dict[str, Any]) -> QuantizationArguments:
    """Of the flag's JSON object. Raises ValueError, of vLLM's fields too."""
    parse_budget(fields.get(FIELD))
    if not {"linear", "moe", "targets"} & set(fields):
        fields = {**fields, "targets": {}}  # vLLM expects one of them; this one stands for no layer
    return QuantizationArguments(**fields)


def accept_tuning() -> None:
    """`vllm serve` parses the flag by a closed class; a value with our field is parsed here, any other one as
    before. May be called any number of times."""
    stock = EngineArgs.add_cli_args
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def add_cli_args(parser: Any) -> Any:
        parser = stock(parser)
        for action in parser._actions:
            if FLAG in action.option_strings:
                action.type = functools.partial(_parse, action.type)
        return parser

    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _parse(stock: Any, text: str) -> Any:
    try:
        fields = json.loads(text)
    except ValueError:
        return stock(text)
    if not isinstance(fields, dict) or FIELD not in fields:
        return stock(text)
    try:
        return arguments(fields)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
