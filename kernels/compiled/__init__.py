"""Programs as compiled code: what one is, the disk cache, the workers that compile, the loaded functions."""
