"""The load format ``csf``: every expert tensor is lazy, so that a rank reads its own part of it.

Also the way into a container (a folder with ``manifest.json``), which has no index that vLLM could
follow: serve its ``metadata`` folder, where the model's config and tokenizer are.

Whatever a checkpoint calls its expert tensors and however it stores their scales, the model is handed
``<module>.<expert>.<projection>.weight``, ``.weight_scale`` and ``.weight_scale_2``, a multiplier.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .config import CsfNvfp4Config
from .lazy import LazyTensor
from .loaders import names
from .loaders.checkpoint import Checkpoint, ExpertLayer, open_checkpoint
from .loaders.codec import NVFP4, Plane
from .loaders.errors import CheckpointError
from .loaders.sources import ProjectionSource
from .stored import checkpoint_of

_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_W_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}

Named = tuple[str, torch.Tensor]


class CsfModelLoader(DefaultModelLoader):
    """Yields stored tensors as they are, but for those of NVFP4 experts."""

    def __init__(self, load_config: LoadConfig) -> None:
        # The parent knows no format of this name; what it still loads itself is safetensors.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[Named]:
        self.counter_before_loading_weights = time.perf_counter()
        with self._open(model_config) as checkpoint:
            _refuse(checkpoint, model_config.quantization)
            yield from _other_tensors(checkpoint)
            for layer in tqdm(checkpoint.layers, desc="Loading compressed experts", unit="layer"):
                yield from _expert_tensors(checkpoint, layer)
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def download_model(self, model_config: ModelConfig) -> None:
        self._open(model_config).close()

    def _open(self, model_config: ModelConfig) -> Checkpoint:
        cache = self.load_config.download_dir
        return open_checkpoint(
            checkpoint_of(model_config.model), revision=model_config.revision, cache_dir=cache
        )


def _refuse(checkpoint: Checkpoint, quantization: str | None) -> None:
    for layer in checkpoint.layers:
        if layer.spec is not NVFP4:
            raise CheckpointError(f"{layer.name}: has codec {layer.spec.name}, expected {NVFP4.name}")
        if layer.extra:
            raise CheckpointError(f"{layer.extra[0]}: is no part of an NVFP4 expert, expected none such")
    if checkpoint.layers and quantization != CsfNvfp4Config.NAME:
        raise CheckpointError(
            f"{checkpoint.root}: quantization is {quantization!r}, expected --quantization "
            f"{CsfNvfp4Config.NAME} with --load-format csf"
        )


def _other_tensors(checkpoint: Checkpoint) -> Iterator[Named]:
    ours = {layer.name for layer in checkpoint.layers}
    by_shard: dict[Path, list[str]] = {}
    for name, info in checkpoint.tensors.items():
        parsed = names.parse(name)
        if parsed is None or parsed.module not in ours:
            by_shard.setdefault(info.shard, []).append(name)
    for shard, inside in by_shard.items():
        with safe_open(shard, "pt") as file:
            for name in inside:
                yield name, file.get_tensor(name)


def _expert_tensors(checkpoint: Checkpoint, layer: ExpertLayer) -> Iterator[Named]:
    for source in layer.sources():
        name = f"{layer.name}.{source.expert}.{_stored_projection(source)}"
        yield f"{name}.weight", LazyTensor.of(_Weight(source))
        yield f"{name}.weight_scale", LazyTensor.of(_Scale(source))
        yield f"{name}.weight_scale_2", LazyTensor.of(_GlobalScale(source))


def _stored_projection(source: ProjectionSource) -> str:
    """The projection in the spelling of its checkpoint, which is the one that the model expects."""
    tail = source.weight_name.removeprefix(source.layer)
    short = any(part in _W_PROJECTIONS.values() or part == "w13" for part in tail.split("."))
    return (_W_PROJECTIONS if short else _PROJECTIONS)[source.projection]


class _Source:
    dtype: torch.dtype
    per: int  # weights that one stored byte stands for

    def __init__(self, source: ProjectionSource) -> None:
        self._source = source

    @property
    def shape(self) -> tuple[int, int]:
        rows, channels = self._source.shape
        return rows, channels // self.per

    def channels(self, cols: tuple[int, int]) -> tuple[int, int]:
        return cols[0] * self.per, cols[1] * self.per


class _Weight(_Source):
    dtype, per = torch.uint8, 2

    @property
    def name(self) -> str:
        return self._source.weight_name

    def read(self, rows: slice, cols: slice) -> torch.Tensor:
        return self._source.weight((rows.start, rows.stop), self.channels((cols.start, cols.stop)))


class _Scale(_Source):
    dtype, per = torch.float8_e4m3fn, NVFP4.group_size

    @property
    def name(self) -> str:
        return self._source.scale_name

    def read(self, rows: slice, cols: slice) -> torch.Tensor:
        scale = self._source.scale((rows.start, rows.stop), self.channels((cols.start, cols.stop)))
        return scale.view(self.dtype)

    def plane(self, rows: tuple[int, int], cols: tuple[int, int]) -> Plane:
        """The compressed block; what the intake of compressed experts asks for instead of `read`."""
        return self._source.plane(rows, self.channels(cols))


class _GlobalScale(_Source):
    dtype, shape = torch.float32, (1, 1)

    @property
    def name(self) -> str:
        return f"{self._source.layer}.{self._source.expert}.{self._source.projection} global scale"

    def read(self, rows: slice, cols: slice) -> torch.Tensor:
        return self._source.global_scale.reshape(1, 1)
