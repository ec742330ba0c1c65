"""Errors that a user can act on.

Every message is one line that states what was wrong, with which value, and what to do. The command line prints that
line and exits with code 2; no other type of exception should reach a user.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class WherewhatError(Exception):
    """Base class of all errors caused by the user's input or machine rather than by a bug."""

    def __str__(self) -> str:
        """Return the message on one line, with control characters of names and values shown by their code."""
        return printable(super().__str__())


class ConfigError(WherewhatError):
    """An option or configuration value is unknown or out of range."""


class TextError(WherewhatError):
    """A text cannot be read, or is too short."""


class LoadError(WherewhatError):
    """A model cannot be found, read or used."""


class TooLargeError(LoadError):
    """A model does not fit into the memory that is free now: the next attempt may succeed."""


class CaptureError(WherewhatError):
    """A model's attention cannot be captured exactly."""


class MeasureError(WherewhatError, ValueError):
    """Tensors given to a measurement have incompatible shapes, are not finite, or are too few."""


class StoreError(WherewhatError):
    """A run directory cannot be read or written."""


class PluginWarning(UserWarning):
    """An entry point of another package cannot be used and is left out."""


def printable(text: str) -> str:
    """Return a text with every character that a terminal or a browser would act on shown by its code.

    No-break spaces become spaces.
    """
    text = text.replace("\xa0", " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Return a text of one or several lines, each of them :func:`printable`."""
    return "\n".join(map(printable, text.split("\n")))


def one_line(error: BaseException, *, most: int = 200) -> str:
    """Return the message of an error on one line of at most `most` characters; with its class if it is one word."""
    words = str(error).split()
    line = " ".join(words)[:most]
    return line if len(words) > 1 else f"{type(error).__name__} {line}".strip()


@contextmanager
def as_one_line(kind: type[WherewhatError], message: str) -> Iterator[None]:
    """Turn whatever a library raises inside the context into an error of one line: the message and the reason.

    Errors of this package and interrupts pass. A panic of a library in Rust is a BaseException, but no Exception.
    """
    try:
        yield
    except (WherewhatError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{message}: {one_line(error, most=300)}") from error
