"""Parity: causal language model types of the installed transformers against their own attention.

One type of every way in which attention is read is proved in the default tests, all others in the slow ones.
"""

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
from conformance.soundness import faults
from conformance.tiny_models import causal_lm_types, variants
from wherewhat.captures.proof import TOLERANCE

# Attention through the interface of transformers, and in the models' own code.
ROUTES = {
    "llama": "rotation by halves, grouped keys",
    "cohere:default": "interleaved rotation",
    "gpt_neox:partial": "rotation of a part of the head, fused projection",
    "llama4_text": "complex rotation, attention within chunks, layers without rotation",
    "qwen3": "norms of queries and keys",
    "gpt2": "learned positions",
    "gemma2": "soft-cap, sliding windows and full layers",
    "gpt_oss": "sinks",
    "mistral": "sliding windows",
    "deepseek_v3": "latent keys",
    "gemma4_text:shared_key_value": "layers that share keys, keys that are values",
    "falcon:alibi": "ALiBi in the mask",
    "jamba": "recurrent layers beside attention",
    "gptj": "own code, interleaved rotation",
    "bloom": "own code, ALiBi",
    "gpt_neo": "own code, local windows",
}
MUST_BE_PROVED = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi", "phi3", "gpt_neox"),
    *("gptj", "codegen", "cohere", "cohere2", "glm4", "olmo2", "olmo3", "granite", "stablelm", "starcoder2"),
    *("smollm3", "gpt_oss", "deepseek_v3", "bloom", "falcon", "mpt", "gpt2", "opt", "gpt_neo"),
]


def stated() -> dict[str, dict]:
    """The lines of the catalog by name; none where it was written for other versions of transformers."""
    found = json.loads(CATALOG.read_text("utf-8"))
    if found["transformers"] != transformers.__version__:
        return {}
    return {":".join(filter(None, (line["model_type"], line["variant"]))): line for line in found["models"]}


@pytest.mark.parametrize("name", ROUTES)
def test_one_type_of_every_route(name):
    assert faults(name) == []
    row = examine(name)
    assert (row.status, row.reason, row.hard_reason) == (PROVED, "", "")
    assert row.hard == ("float32", "bfloat16")
    assert row.error <= TOLERANCE[torch.float32]
    assert row.without - {NORMS} == {kind for kind in WITHOUT if name in WITHOUT[kind]}
    found = json.loads(json.dumps(asdict(row.supported())))
    assert found == stated().get(name, found)


@pytest.fixture(scope="session")
def examined(tmp_path_factory, worker_id) -> dict[str, tuple[Row, list[str]]]:
    """The result of every type and variant and the faults of its model, each found by one of the test processes."""
    folder = tmp_path_factory.getbasetemp() / "conformance"
    if worker_id != "master":
        folder = tmp_path_factory.getbasetemp().parent / "conformance"
    folder.mkdir(exist_ok=True)
    names = [*causal_lm_types(), *variants()]
    # From both ends, so that two processes that want them share the work.
    found = {name: _examined(name, folder) for name in (names if worker_id in ("master", "gw0") else reversed(names))}
    return {name: found[name] for name in names}


def _examined(name: str, folder: Path) -> tuple[Row, list[str]]:
    file = folder / f"{name.replace(':', '=')}.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            row = examine(name)
            values = asdict(row) | {"without": sorted(row.without)}
            file.write_text(json.dumps({"row": values, "faults": faults(name)}))
        stored = json.loads(file.read_text())
    row = stored["row"]
    series = {name: tuple(row[name]) for name in ("position", "features", "hard")}
    return Row(**row | series | {"without": frozenset(row["without"])}), stored["faults"]


@pytest.fixture(scope="session")
def rows(examined) -> dict[str, Row]:
    return {name: row for name, (row, _) in examined.items()}


@pytest.mark.slow
class TestConformance:
    def test_tiny_models_are_sound(self, examined):
        assert {name: found for name, (_, found) in examined.items() if found} == {}

    def test_softmax_types_are_proved(self, rows):
        assert {name: rows[name].status for name in MUST_BE_PROVED} == dict.fromkeys(MUST_BE_PROVED, PROVED)
        softmax = [row for name, row in rows.items() if ":" not in name and row.status != NOT_APPLICABLE]
        assert sum(row.status == PROVED for row in softmax) >= 0.95 * len(softmax)
        worst = max(rows.values(), key=lambda row: row.error)
        assert worst.error <= TOLERANCE[torch.float32], worst

    def test_hard_weights_are_proved_wherever_random_ones_are(self, rows):
        proved = [row for row in rows.values() if row.status == PROVED]
        assert {row.name: row.hard_reason for row in proved if row.hard != ("float32", "bfloat16")} == {}
        assert len(proved) > 0.9 * len(rows)

    def test_hard_weights_have_every_kind_or_a_named_reason(self, rows):
        proved = [row for row in rows.values() if row.status == PROVED]
        for kind in KINDS.keys() - {NORMS}:
            without = {row.name for row in proved if kind in row.without}
            assert without == WITHOUT.get(kind, {}).keys() & {row.name for row in proved}, kind

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
