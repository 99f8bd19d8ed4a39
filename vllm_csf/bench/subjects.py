"""The arms of the serving measurements, and which of them a checkpoint and a machine allow.

stock   vLLM without the plugin
native  the plugin, scales kept as they are: the same kernels, nothing compressed
csf     the plugin as it is used
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..loaders import container, hub
from ..loaders.files import read_object
from ..loaders.recipes import CONFIG_FILE
from .records import BenchError

ENCODING_KEY = "weight_scale_encoding"
HASHED_WHOLE = 16 << 20  # larger files, shards that is, by their size and first MiB: headers and some weights
WITHOUT_PLUGIN = {"VLLM_PLUGINS": ""}
# Loaded for its load format; stock's quantization stays stock's.
MADE_UP_ENVIRONMENT = {"VLLM_PLUGINS": "csf_nvfp4"}
MADE_UP_FLAGS = ("--load-format", "csf_made_up")
ADDITIONAL = "--additional-config"


@dataclass(frozen=True)
class Subject:
    """An arm: what is served, how."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Flags:
    """Passed to `vllm serve`: of every arm, of the arms with the plugin, of stock vLLM.

    made_up: the checkpoint is a configuration, and all arms are given the same weights.
    """

    every: Sequence[str] = ()
    plugin: Sequence[str] = ()
    stock: Sequence[str] = ()
    made_up: bool = False


def subjects(
    names: Sequence[str], checkpoint: str, stock: str | None, flags: Flags, cpu: bool
) -> tuple[list[Subject], dict[str, str]]:
    """Those arms that can run, and of the others why not. stock: what that arm is to serve, if another one.

    Raises BenchError where no arm is left, CheckpointError where there is no checkpoint.
    """
    found, skipped = [], {}
    every = (*flags.every, *(MADE_UP_FLAGS if flags.made_up else ()))
    for name in names:
        if name == "stock":
            reason = None if stock else _no_stock(read_config(checkpoint), checkpoint, cpu)
            if reason:
                skipped[name] = reason
                continue
            environment = MADE_UP_ENVIRONMENT if flags.made_up else WITHOUT_PLUGIN
            found.append(Subject(name, stock or checkpoint, (*every, *flags.stock), environment))
            continue
        settings = {"csf_scales": "native"} if name == "native" else {}
        ours = with_settings(("--quantization", "csf_nvfp4", *every, *flags.plugin), settings)
        found.append(Subject(name, checkpoint, ours))
    if not found:
        raise BenchError("no arm is left: " + "; ".join(f"{n}: {why}" for n, why in skipped.items()))
    return found, skipped


def unless_given(flags: Sequence[str], flag: str, value: object) -> list[str]:
    """The flag with its value, nothing where the flags have it already."""
    return [] if given(flags, flag) else [flag, str(value)]


def given(flags: Sequence[str], flag: str) -> bool:
    """Whether the flags have it, in either form that vLLM takes: `--a-flag` or `--a_flag`."""
    return any(_name(part) == flag for part in flags)


def _name(part: str) -> str:
    name = part.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def with_settings(flags: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """The flags with some more of `--additional-config`. Raises BenchError where that is no JSON object."""
    rest: list[str] = []
    merged: dict[str, Any] = {}
    parts = iter(flags)
    for part in parts:
        if _name(part) != ADDITIONAL:
            rest.append(part)
            continue
        text = part.partition("=")[2] or next(parts, "")
        try:
            merged |= json.loads(text)
        except (TypeError, ValueError) as error:
            raise BenchError(f"{ADDITIONAL} is {text!r}, expected a JSON object") from error
    merged |= settings
    return (*rest, ADDITIONAL, json.dumps(merged)) if merged else tuple(rest)


def _no_stock(config: dict[str, Any], checkpoint: str, cpu: bool) -> str | None:
    if _declares(config, ENCODING_KEY) or _boxed(checkpoint):
        return "stock vLLM cannot read compressed scales; give the plain checkpoint as --stock"
    if cpu and "quantization_config" in config:
        return "vLLM's CPU build has no NVFP4 experts; give the dequantised checkpoint as --stock"
    return None


def _boxed(checkpoint: str) -> bool:
    folder = Path(checkpoint)
    return folder.is_dir() and (container.is_container(folder) or container.is_container(folder.parent))


def _declares(config: Any, key: str) -> bool:
    if isinstance(config, dict):
        return key in config or any(_declares(value, key) for value in config.values())
    return isinstance(config, list) and any(_declares(value, key) for value in config)


def read_config(checkpoint: str) -> dict[str, Any]:
    """Its config.json. Raises CheckpointError where there is none."""
    return read_object(hub.locate(checkpoint) / CONFIG_FILE)


def has_mtp(config: dict[str, Any]) -> bool:
    """Whether the checkpoint has a layer that drafts."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    nested = config.get("text_config")
    counts = [c.get(key) for c in (config, nested) if isinstance(c, dict) for key in keys]
    return any(isinstance(count, int) and count > 0 for count in counts)


def fingerprint(checkpoint: str) -> str:
    """SHA-256 over names and sizes of its files and what small ones hold; of large ones the first MiB."""
    root = hub.locate(checkpoint)
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and ".cache" not in p.parts):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(HASHED_WHOLE if size <= HASHED_WHOLE else 1 << 20))
    return digest.hexdigest()
