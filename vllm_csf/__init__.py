"""vLLM plugin: NVFP4 mixture-of-experts models with losslessly compressed block scales."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes."""
    from . import plugin

    plugin.register()
