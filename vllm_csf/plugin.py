"""Makes the quantization method ``csf_nvfp4``, two load formats and a field of a flag known to vLLM."""

from __future__ import annotations

import sys


def register() -> None:
    """May be called any number of times."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from .config import CsfNvfp4Config
    from .loading import CsfModelLoader
    from .made_up import MadeUpLoader

    register_quantization_config(CsfNvfp4Config.NAME)(CsfNvfp4Config)
    register_model_loader("csf")(CsfModelLoader)
    register_model_loader(MadeUpLoader.NAME)(MadeUpLoader)
    if "vllm.engine.arg_utils" in sys.modules:  # not in a process that parses no arguments
        from .flag import accept_tuning

        accept_tuning()
