"""What a compiled program is: its kind, its configuration and the architecture that it runs on.

A kind names the module that can compile it, by strings, so that programs can be planned, looked up and
sent to another process without importing device code.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class CompileError(RuntimeError):
    """A program could not be compiled."""


@dataclass(frozen=True)
class Kind:
    """`config`: name of a frozen dataclass in `module`; `compile`: of its function of (config, arch)."""

    name: str
    module: str
    config: str
    compile: str

    def config_class(self) -> type:
        return getattr(importlib.import_module(self.module), self.config)

    def compile_function(self) -> Callable[[Any, str], Any]:
        return getattr(importlib.import_module(self.module), self.compile)


@dataclass(frozen=True)
class Program:
    """`config`: of the kind's dataclass, whose fields are numbers, strings or such dataclasses."""

    kind: Kind
    config: Any
    arch: str

    @property
    def name(self) -> str:
        """The kind, the fields that are not at their defaults, and the architecture."""
        told = [
            f"{f.name}={getattr(self.config, f.name)!r}"
            for f in dataclasses.fields(self.config)
            if f.default is dataclasses.MISSING or getattr(self.config, f.name) != f.default
        ]
        return f"{self.kind.name}({', '.join(told)}) for {self.arch}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Program:
        fields = json.loads(text)
        kind = Kind(**fields["kind"])
        return cls(kind, _rebuild(kind.config_class(), fields["config"]), fields["arch"])

    def compile(self) -> Any:
        """Compiles in this process; needs no GPU. Raises CompileError naming the program."""
        try:
            return self.kind.compile_function()(self.config, self.arch)
        except Exception as error:
            raise CompileError(f"{self.name}: {type(error).__name__}: {error}") from error


def _rebuild(cls: Any, fields: dict[str, Any]) -> Any:
    types = typing.get_type_hints(cls)
    return cls(**{name: _value(types[name], value) for name, value in fields.items()})


def _value(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _rebuild(kind, value)
    return tuple(value) if isinstance(value, list) else value
