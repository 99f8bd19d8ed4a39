"""Makes the quantization method ``csf_nvfp4``, the load format ``csf`` and a field of a flag known."""

from __future__ import annotations

import sys


def register() -> None:
    """May be called any number of times."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from .config import CsfNvfp4Config
    from .loading import CsfModelLoader

    register_quantization_config(CsfNvfp4Config.NAME)(CsfNvfp4Config)
    register_model_loader("csf")(CsfModelLoader)
    if "vllm.engine.arg_utils" in sys.modules:  # not in a process that parses no arguments
        from .flag import accept_tuning

        accept_tuning()
