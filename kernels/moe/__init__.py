"""The fused mixture-of-experts layer."""
