"""Checkpoints of compressed expert weights: bytes in, projections out; no GPU, no vLLM."""
