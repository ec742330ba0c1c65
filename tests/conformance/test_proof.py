"""Parity: every causal language model type of the installed transformers against its own attention."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock

from conformance.hard import KINDS, NORMS, WITHOUT
from conformance.page import CATALOG, NOT_APPLICABLE, PAGE, PROVED, Row, catalog, examine, render
from conformance.tiny_models import causal_lm_types, variants
from wherewhat.captures.proof import TOLERANCE

pytestmark = pytest.mark.slow

MUST_BE_PROVED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt_neox",
    "gptj",
    "codegen",
    "cohere",
    "cohere2",
    "glm4",
    "olmo2",
    "olmo3",
    "granite",
    "stablelm",
    "starcoder2",
    "smollm3",
    "gpt_oss",
    "deepseek_v3",
    "bloom",
    "falcon",
    "mpt",
    "gpt2",
    "opt",
    "gpt_neo",
    "gemma3",
]


@pytest.fixture(scope="session")
def rows(tmp_path_factory, worker_id) -> dict[str, Row]:
    """The result of every type and variant, each computed by one of the test processes."""
    folder = tmp_path_factory.getbasetemp() / "conformance"
    if worker_id != "master":
        folder = tmp_path_factory.getbasetemp().parent / "conformance"
    folder.mkdir(exist_ok=True)
    names = [*causal_lm_types(), *variants()]
    # From both ends, so that two processes that want them share the work.
    found = {name: _examined(name, folder) for name in (names if worker_id in ("master", "gw0") else reversed(names))}
    return {name: found[name] for name in names}


def _examined(name: str, folder: Path) -> Row:
    file = folder / f"{name.replace(':', '=')}.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            row = examine(name)
            file.write_text(json.dumps(asdict(row) | {"without": sorted(row.without)}))
        stored = json.loads(file.read_text())
    series = {name: tuple(stored[name]) for name in ("position", "features", "hard")}
    return Row(**stored | series | {"without": frozenset(stored["without"])})


class TestConformance:
    def test_families_that_must_be_proved(self, rows):
        assert {name: rows[name].status for name in MUST_BE_PROVED} == dict.fromkeys(MUST_BE_PROVED, PROVED)

    def test_at_least_95_percent_of_softmax_types(self, rows):
        softmax = [row for name, row in rows.items() if ":" not in name and row.status != NOT_APPLICABLE]
        assert sum(row.status == PROVED for row in softmax) >= 0.95 * len(softmax)

    def test_errors_are_within_float32_tolerance(self, rows):
        worst = max(rows.values(), key=lambda row: row.error)
        assert worst.error <= TOLERANCE[torch.float32], worst

    def test_hard_weights_are_proved_wherever_random_ones_are(self, rows):
        proved = [row for row in rows.values() if row.status == PROVED]
        assert {row.name: row.hard_reason for row in proved if row.hard != ("float32", "bfloat16")} == {}
        assert len(proved) == sum(row.status == PROVED for row in rows.values()) > 0.9 * len(rows)

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != NORMS])
    def test_hard_weights_have_every_kind_or_a_named_reason(self, rows, kind):
        proved = [row for row in rows.values() if row.status == PROVED]
        without = {row.name for row in proved if kind in row.without}
        assert without == WITHOUT.get(kind, {}).keys() & {row.name for row in proved}

    def test_page_is_true(self, rows):
        page = PAGE.read_text("utf-8")
        written = re.search(r"of transformers (\S+),", page)
        assert written is not None
        if written.group(1) == transformers.__version__:
            assert page == render(rows.values(), version=transformers.__version__), "run `make models`"
            listed = catalog(rows.values(), version=transformers.__version__)
            assert CATALOG.read_text("utf-8") == listed, "run `make models`"
            return
        # Other versions have other types and other bugs (sdpa without soft-cap before 5.21): refused, not wrong.
        stated = dict(re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", page, re.MULTILINE))
        common = [name for name in stated.keys() & rows.keys() if stated[name] == PROVED]
        assert sum(rows[name].status == PROVED for name in common) >= 0.95 * len(common)
