"""Measurements: how fast the kernels are beside native scales and beside vLLM's own backend."""
