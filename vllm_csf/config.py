"""Claims checkpoints for ``csf_nvfp4`` and builds vLLM's own configuration for all but the experts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from .stored import checkpoint_of

ENCODING_KEY = "weight_scale_encoding"
ENCODING = "csf"


def declared_encodings(config: Any) -> set[str]:
    """Every value of ``weight_scale_encoding`` in a quantization config, however deep it is nested."""
    if isinstance(config, dict):
        own = {str(config[ENCODING_KEY])} if ENCODING_KEY in config else set()
        return own.union(*(declared_encodings(value) for value in config.values()))
    if isinstance(config, list):
        return set().union(*(declared_encodings(value) for value in config))
    return set()


class CsfNvfp4Config(QuantizationConfig):
    """What vLLM knows as ``csf_nvfp4``. Never instantiated: `from_config` returns the configuration
    that stock vLLM would have made of the checkpoint, with another method for NVFP4 experts."""

    NAME = "csf_nvfp4"

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Asked for every model that is served: claims CSF checkpoints, and what the user gives us."""
        encodings = declared_encodings(hf_quant_cfg)
        if unknown := encodings - {ENCODING}:
            raise ValueError(
                f"{ENCODING_KEY} is {', '.join(map(repr, sorted(unknown)))}, expected {ENCODING!r}"
            )
        model = str(getattr(hf_config, "name_or_path", None) or "")
        if user_quant == cls.NAME or encodings or checkpoint_of(model) != model:
            return cls.NAME
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from .stock import stock_config

        return stock_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    def get_name(self) -> str:
        return self.NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half, torch.float32]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        return None
