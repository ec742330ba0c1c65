"""Code blocks of the documentation: found, executed, and compared with the output that a page shows."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "llms.txt")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCED = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*?) -->\n\n?)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.M
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: What stands after the backticks.
        code: Its content.
        line: Number of lines before the content, on its page.
        not_run: Why it is not executed, from the comment ``not run: REASON`` directly before it; None if it is.
        shown: The ``text`` block directly after it, which is what the code prints.
    """

    language: str
    code: str
    line: int
    not_run: str | None
    shown: str | None


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return list(_blocks(page.read_text("utf-8")))


def _blocks(text: str) -> Iterator[Block]:
    found = list(_FENCED.finditer(text))
    for one, following in zip_longest(found, found[1:]):
        shown = None
        if following is not None and following["language"] == "text":
            between = text[one.end() : following.start()]
            shown = following["code"] if not between.strip() else None
        yield Block(one["language"], one["code"], text.count("\n", 0, one.start("code")), one["reason"], shown)


def run_page(page: Path) -> ModuleType:
    """Execute the Python blocks of a page as one module in the working directory, and compare what they print."""
    module = ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    for block in blocks(page):
        if block.language == "python" and block.not_run is None:
            printed = io.StringIO()
            code = compile("\n" * block.line + block.code, str(page), "exec")  # errors name the line of the page
            with redirect_stdout(printed):
                exec(code, module.__dict__)
            if block.shown is not None:
                place = f"{page.name}, line {block.line}"
                assert same_output(block.shown, printed.getvalue()), f"{place} prints:\n{printed.getvalue()}"
    return module


def same_output(shown: str, printed: str) -> bool:
    """Whether two outputs have the same words, and numbers that differ by at most 2 in their last shown digit."""
    if _NUMBER.sub("#", shown).split() != _NUMBER.sub("#", printed).split():
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    return all(abs(float(a) - float(b)) <= 2.001 * _last_digit(a) for a, b in pairs)


def _last_digit(number: str) -> float:
    """Return the value of one unit of the last digit; 0 for whole numbers, which must be equal."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0
