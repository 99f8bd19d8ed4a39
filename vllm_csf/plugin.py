"""Makes the quantization method ``csf_nvfp4`` and the load format ``csf`` known to vLLM."""

from __future__ import annotations


def register() -> None:
    """May be called any number of times."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from .config import CsfNvfp4Config
    from .loading import CsfModelLoader

    register_quantization_config(CsfNvfp4Config.NAME)(CsfNvfp4Config)
    register_model_loader("csf")(CsfModelLoader)
