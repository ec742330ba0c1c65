"""Identity: the page of length methods states each rule as its docstring does."""

from __future__ import annotations

from pathlib import Path

import pytest

from wherewhat.extend import METHODS, find_method

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.mark.parametrize("method", [*map(find_method, METHODS)], ids=lambda m: m.name)
def test_rules_on_the_page(method):
    assert f"| `{method.name}` | {method.rule()} |" in PAGE.read_text(encoding="utf-8")
    assert method.rule().endswith(".")
    assert find_method(method.name) is method
