"""Scale planes by themselves: expanding the prepared form into whole bytes, and compressing plain bytes."""
