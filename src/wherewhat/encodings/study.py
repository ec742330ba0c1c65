"""The whole study: every encoding and seed, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wherewhat.encodings.recipe import Recipe, parse_only
from wherewhat.encodings.runs import EncodingRun, run_one
from wherewhat.encodings.text import read_corpus
from wherewhat.pipeline.progress import Progress, Silent


def run_study(
    recipe: Recipe,
    *,
    out: Path,
    text: Path | None = None,
    device: str = "cpu",
    only: tuple[str, ...] = (),
    keep: bool = False,
    progress: Progress | None = None,
    finished: Callable[[str], None] = lambda line: None,
) -> list[EncodingRun]:
    """Train, watch and measure all models that are not there yet.

    Args:
        recipe: The study.
        out: Folder that holds the directories of all models.
        text: Text in place of the recipe's.
        device: auto, cpu, cuda or cuda:N.
        only: Some of the models, as ``encoding:seed`` or ``encoding``.
        keep: Keep the trained models too.
        progress: Who is told how far it is.
        finished: Told one line for each model that is done, with its seconds.

    Raises:
        WherewhatError: If anything about the recipe, the text, the device or the disk is wrong.
    """
    progress = progress or Silent()
    wanted = parse_only(recipe, only)
    recipe = recipe if text is None else replace(recipe, text=text)
    corpus = read_corpus(recipe.text, held_out=recipe.held_out, most=recipe.text_bytes)
    runs = []
    for index, (encoding, seed) in enumerate(wanted):
        progress.say(f"{encoding}, seed {seed} ({index + 1} of {len(wanted)}): {recipe.training.steps:,} steps")
        started = time.perf_counter()
        run = run_one(recipe, corpus, encoding, seed, out=out, device=device, keep=keep, progress=progress)
        finished(_line(run, time.perf_counter() - started))
        runs.append(run)
    return runs


def _line(run: EncodingRun, seconds: float) -> str:
    spent = {name: float(run.provenance[f"seconds_{name}"]) for name in ("training", "recording", "after")}
    share = spent["recording"] / max(1e-9, spent["training"])
    loss = float(run.records().values["loss"][-1].mean())
    return (
        f"{run.encoding} seed {run.seed}: loss {loss:.3f}, training {spent['training']:.1f} s, recording "
        f"{spent['recording']:.1f} s ({share:.0%}), afterwards {spent['after']:.1f} s; this time {seconds:.1f} s"
    )
