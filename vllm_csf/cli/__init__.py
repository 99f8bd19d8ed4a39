"""The ``vllm-csf`` command."""
