"""What goes wrong with a checkpoint.

Every message names the tensor or file, what was found and what was expected.
"""

from __future__ import annotations

import json


class CheckpointError(ValueError):
    """A checkpoint, or one of its files, is not what it says it is."""


class FormatError(CheckpointError):
    """A tensor breaks a rule of its format."""


class RecipeError(CheckpointError):
    """A quantization recipe is unknown, or contradicts another one or the tensors."""


def reason(error: BaseException) -> str:
    """Why something could not be read or written: one line, without the file's name."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg[0].lower()}{error.msg[1:]} in line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"no text in UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, KeyError):
        return f"no {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return " ".join(str(error).split()) or type(error).__name__


def one_line(error: BaseException) -> str:
    """`reason`, after the file that the system names."""
    named = error.filename if isinstance(error, OSError) else None
    return reason(error) if named is None else f"{named}: {reason(error)}"
