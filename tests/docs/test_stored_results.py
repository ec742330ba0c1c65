"""Identity: tables of the pages are those of the stored results."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from helpers.pages import ROOT
from wherewhat.measures.measurement import BUILT_IN, measurements
from wherewhat.measures.statistics import interval


def summary_of(study: str) -> ModuleType:
    """The script that writes the tables of a study."""
    spec = importlib.util.spec_from_file_location(f"{study}_summary", ROOT / "studies" / study / "summary.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_page_of_claims_has_the_stored_verdicts():
    summary = summary_of("claims")
    page = (ROOT / "docs" / "claims.md").read_text("utf-8")
    table = page.split("<!-- results -->\n")[1].split("\n<!-- end of results -->")[0]
    assert table.strip().splitlines() == list(summary.table(summary.results()))
    assert sum(file.stat().st_size for file in summary.FOLDER.iterdir() if file.is_file()) < 10e6


def test_the_page_of_scaling_has_the_stored_costs():
    summary = summary_of("ledger")
    page, found = summary.PAGE.read_text("utf-8"), summary.results()
    assert summary.filled(page, found) == page, "run python studies/ledger/summary.py --write"
    smollm2 = [one["measurements"] for one in found if one["model"] == "SmolLM2-135M-Instruct"]
    names = [name for name, one in measurements().items() if type(one).__module__.startswith("wherewhat.")]
    assert len(names) == len(BUILT_IN)
    assert sorted(name for rows in smollm2 for name in rows) == sorted(names)  # each once, of the length in its table
    reasons = page.split("**Above 60 passes.**")[1].split("\n\n")[0]
    large = {name for one in found for name, row in one["measurements"].items() if row["passes"] > 60}
    assert [name for name in large if f"`{name}`" not in reasons] == []


def test_computed_costs_are_marked():
    summary = summary_of("ledger")
    row = {"seconds": 8.0, "documents": 4, "peak_mib": 100.0}
    one = {"tokens": 512, "parameters": 1000, "hidden": 1, "layers": 1, "measurements": {"axes": row, "prompts": row}}
    assert summary.cell([one], "axes", 512) == "2.0 s, 100 MiB"
    growth = (2 * 1000 * 1024 + 2 * 1024**2) / (2 * 1000 * 512 + 2 * 512**2)
    assert summary.cell([one], "axes", 1024) == f"*{2 * growth:.1f} s, 200 MiB*"
    assert summary.cell([one], "planes", 512) == summary.cell([one], "prompts", 1024) == ""


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown table by its first cell, without marks."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_page_that_chooses_a_method_has_the_numbers_of_the_comparison_and_is_short():
    page, evidence = ((ROOT / "docs" / name).read_text("utf-8") for name in ("which-method.md", "lengths.md"))
    assert len([word for word in page.split() if any(map(str.isalnum, word))]) <= 800
    smollm2 = evidence.split("### SmolLM2-135M")[1].split("### TinyLlama-1.1B")[0]
    losses, answers = (smollm2.split(head)[1].split("\n\n")[0] for head in ("| method | rise", "| method | pass key"))
    chosen = rows_of(page)
    for name, cells in rows_of(losses).items():
        row = chosen.get("near-far`, half of the heads look far" if name == "near-far-plan" else name)
        if row is not None and "±" in cells[-1]:
            assert row[:2] == cells[-2:], name
            assert row[2] == rows_of(answers)[name][-1].split()[0], name
    assert len(chosen.keys() & rows_of(losses).keys()) >= 10


@pytest.mark.parametrize(("name", "quarter", "lengths"), [("smollm2", 2048, "24"), ("tinyllama", 512, "248")])
def test_the_distance_of_far_keys_has_the_numbers_of_the_variants(name, quarter, lengths):
    page = (ROOT / "docs" / "lengths.md").read_text("utf-8").split("### Distance of far keys")[1].split("\n### ")[0]
    folder = ROOT / "studies" / "lengths"
    files = (folder / f"{name}.json", folder / "variants" / f"{name}.json")
    usual, varied = (json.loads(file.read_text("utf-8"))["lengths"] for file in files)
    for length in lengths:
        for results, method in ((usual, "near-far"), (usual, "self-extend"), (varied, f"near-far:distance={quarter}")):
            measured = [document["methods"][method] for document in results[length].values()]
            metrics = ("loss_rise", "found_beyond", "answered")
            each = [interval([numbers[metric] for numbers in measured]) for metric in metrics]
            cells = " | ".join(f"{x.mean:.3f} ± {x.reach:.3f}" for x in each)
            assert f"| {cells} |" in page, (length, method)


CHOICES = {
    "near-far, defaults": "near-far",
    "near-far, far keys at T / 4": "near-far:distance={quarter}",
    "near-far, window T / 4, far keys at 3 T / 8, first keys in place": (
        "near-far:window={quarter},distance={three_eighths},sink_distance={last}"
    ),
    "near-far, window T / 4, far keys at T / 2, first keys in place": (
        "near-far:window={quarter},distance={half},sink_distance={last}"
    ),
    "self-extend": "self-extend",
    "yarn": "yarn",
    "rerope": "rerope",
}


def test_rises_beside_scores_of_ruler_are_those_measured():
    page = (ROOT / "docs" / "lengths.md").read_text("utf-8").split("### No choice is the best everywhere")[1]
    rows = rows_of(page.split("\n\n")[2])
    rows = {title: rows[title] for title in CHOICES}
    found: dict[str, list[str]] = {title: [] for title in CHOICES}
    able = {"smollm2-135m": "single_1 single_2", "tinyllama-1.1b": "single_1 single_2 single_3 multikey_1 multiquery"}
    for name, tasks in able.items():
        ruler = json.loads((ROOT / "studies" / "ruler" / f"{name}.json").read_text("utf-8"))
        trained, folder = ruler["trained"], ROOT / "studies" / "lengths"
        sizes = {"quarter": trained // 4, "three_eighths": 3 * trained // 8, "half": trained // 2, "last": trained - 1}
        file = f"{name.split('-')[0]}.json"
        usual, varied = (
            json.loads((path / file).read_text("utf-8"))["lengths"] for path in (folder, folder / "variants")
        )
        for multiple in (2, 4):
            answered = ruler["lengths"][str(multiple * trained)]["methods"]
            for title, method in CHOICES.items():
                documents = (varied if ":" in method else usual)[str(multiple)].values()
                chosen = method.format(**sizes)
                rises = [document["methods"][chosen]["loss_rise"] for document in documents]
                scores = answered.get(chosen, {"scores": {}})["scores"]
                means = [sum(scores[f"niah_{task}"]) / len(scores[f"niah_{task}"]) for task in tasks.split() if scores]
                shown = f"{sum(rises) / len(rises):.3f}"
                found[title].append(f"{shown}, {sum(means) / len(means):.0f}" if means else shown)
    assert rows == found
