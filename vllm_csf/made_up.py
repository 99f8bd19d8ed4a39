"""The load format ``csf_made_up``: weights that are made where they are loaded, the same for all who serve.

Unlike vLLM's ``dummy`` they go the way that stored ones go (read, sliced, compressed while loading), and
stock vLLM is handed the very same ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from .loaders import hub, made_up
from .loaders.files import read_object
from .loaders.recipes import CONFIG_FILE


class MadeUpLoader(DefaultModelLoader):
    """For the families of `make-example`."""

    NAME = "csf_made_up"

    def __init__(self, load_config: LoadConfig) -> None:
        # The parent knows no format of this name.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.counter_before_loading_weights = time.perf_counter()
        config = read_object(hub.locate(model_config.model) / CONFIG_FILE)
        # Not where the model's parameters are: in a reload they are nowhere yet.
        yield from made_up.tensors(config, current_platform.device_type)

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to download but what the server has read before."""
