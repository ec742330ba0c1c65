"""Errors a user can act on.

Every message is one line that says what was wrong, with which value, and what to do. The command line
prints that line and exits with code 2; no other exception type is expected to reach a user.
"""


class WherewhatError(Exception):
    """Base of all errors that are about the user's input or machine, not about a bug."""


class ConfigError(WherewhatError):
    """An option or configuration value is unknown or out of range."""


class TextError(WherewhatError):
    """A text cannot be read or is not long enough."""


class LoadError(WherewhatError):
    """A model cannot be found, read or used."""


class CaptureError(WherewhatError):
    """A model's attention cannot be captured faithfully."""


class MeasureError(WherewhatError, ValueError):
    """Tensors given to a measurement do not fit together, are not finite, or are too few to measure anything."""


class StoreError(WherewhatError):
    """A run directory cannot be read or written."""


def one_line(error: BaseException, *, most: int = 200) -> str:
    """What another library's error says, on one line of at most so many characters; its class if it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
