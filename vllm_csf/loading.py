"""The load format ``csf``: rank-local, lazy reads."""

from __future__ import annotations

import dataclasses

from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


class CsfModelLoader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))
