"""What goes wrong with a checkpoint.

Every message names the tensor or file, what was found and what was expected.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint, or one of its files, is not what it says it is."""


class FormatError(CheckpointError):
    """A tensor breaks a rule of its format."""


class RecipeError(CheckpointError):
    """A quantization recipe is unknown, or contradicts another one or the tensors."""
