"""Train, record and measure every encoding and seed of a study."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wherewhat.errors import StoreError
from wherewhat.models.loaded import resolve_device
from wherewhat.numerics import new_process_settings
from wherewhat.progress import Progress, Silent
from wherewhat.runs.directory import COMPLETE, RunDirectory
from wherewhat.runs.identity import versions
from wherewhat.runs.records import RECORDS_FILE, Recorder, StudyRun, TensorTable, open_study_run, study_config
from wherewhat_lab.encoding_study.corpus import Corpus, read_corpus
from wherewhat_lab.encoding_study.recipe import ENCODINGS, EncodingRecipe, RecordConfig, parse_only
from wherewhat_lab.encoding_study.scores import AXES, HeldOutText, measure_after, score
from wherewhat_lab.language import recording_steps, train_language
from wherewhat_lab.model import LabModel
from wherewhat_lab.steps import products
from wherewhat_lab.study import complete_once, complete_run
from wherewhat_lab.subject import LabSubject
from wherewhat_lab.training import MODEL_FILE

STUDY = "encodings"
AFTER = "after"
"""Part of a run directory that holds the measurements after training."""


class EncodingRun(StudyRun):
    """A finished model of the study, with its records and measurements."""

    @property
    def encoding(self) -> str:
        """Encoding of the model."""
        return str(self.config["encoding"])

    @property
    def seed(self) -> int:
        """Seed of the weights."""
        return int(self.config["seed"])

    @property
    def context(self) -> int:
        """Number of bytes of the training sequences."""
        return int(self.config["training"]["context"])

    def after(self) -> TensorTable:
        """Return the measurements after training."""
        return self.table(AFTER)


def encoding_recorder(held_out: HeldOutText, config: RecordConfig, *, path: Path | None = None) -> Recorder:
    """Return a recorder of the scores of :func:`~wherewhat_lab.encoding_study.scores.score`, in float32.

    Args:
        held_out: Bytes to score the model on.
        config: What to record.
        path: File of the records, which is continued if it exists; None keeps them in memory only.
    """

    def score_model(model: LabModel) -> dict[str, torch.Tensor]:
        with products("highest"):  # whatever the precision of the training
            return score(LabSubject(model, trained_length=held_out.windows.shape[1]), held_out, config)

    return Recorder(score_model, AXES, path=path)


@new_process_settings()
def run_one(
    recipe: EncodingRecipe,
    corpus: Corpus,
    encoding: str,
    seed: int,
    *,
    out: Path,
    device: str = "cpu",
    keep: bool = False,
    progress: Progress | None = None,
) -> EncodingRun:
    """Train, record and measure one model.

    A finished run is read; an interrupted one is resumed and ends with the same records.
    """
    progress, on = progress or Silent(), resolve_device(device)
    settings = {"encoding": encoding, "seed": seed, "text": corpus.sha256, "device": on.type, **recipe.values()}
    config = study_config(STUDY, **settings, versions=versions())
    run = RunDirectory.open(out, name=f"{encoding}-seed{seed}", config=config)
    # Texts that are too short are refused before anything is written.
    held_out = HeldOutText.of(corpus, recipe.training.context, recipe.watch)
    corpus.windows(1, recipe.after.times * recipe.training.context, seed=recipe.after.seed)
    complete_once(
        run,
        lambda: complete_run(
            run,
            encoding_recorder(held_out, recipe.watch, path=run.path / RECORDS_FILE),
            train=lambda record: train_language(
                recipe.model_for(encoding, seed),
                recipe.training_for(seed),
                corpus.training,
                record=record,
                record_at=recording_steps(recipe.training.steps, recipe.watch.records),
                directory=run.path,
                progress=progress,
                device=str(on),
            ),
            part=AFTER,
            measure=lambda model: measure_after(model, corpus, recipe.after, context=recipe.training.context),
            device=str(on),
            dtype=recipe.training.precision,
            text_hash=corpus.sha256,
            details={"text": corpus.source},
        ),
        progress=progress,
        keep=MODEL_FILE if keep else "",
        temporary=() if keep else (MODEL_FILE, "tensorboard"),
    )
    return EncodingRun(run)


def open_runs(folder: Path) -> list[EncodingRun]:
    """Return all finished runs in a folder, by encoding and seed; they must share recipe and text."""
    try:
        paths = sorted(path.parent for path in folder.glob(f"*/{COMPLETE}"))
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from error
    opened = (EncodingRun(open_study_run(path, STUDY)) for path in paths)
    runs = sorted(opened, key=lambda run: ((*ENCODINGS, run.encoding).index(run.encoding), run.seed))
    if not runs:
        raise StoreError(f"{folder} holds no finished run: make some with 'wherewhat encodings run --out {folder}'")
    first = _shared(runs[0])
    for run in runs[1:]:
        for name, value in _shared(run).items():
            if value != first.get(name):
                raise StoreError(
                    f"{run.path.name} and {runs[0].path.name} differ in {name}: keep each study in its own folder"
                )
    return runs


def _shared(run: EncodingRun) -> dict[str, Any]:
    return {name: value for name, value in run.config.items() if name not in ("encoding", "seed")}


def run_study(
    recipe: EncodingRecipe,
    *,
    out: Path,
    text: Path | None = None,
    device: str = "cpu",
    only: tuple[str, ...] = (),
    keep: bool = False,
    progress: Progress | None = None,
    finished: Callable[[str], None] = lambda line: None,
) -> list[EncodingRun]:
    """Train, record and measure all models of a study that are not finished.

    Args:
        recipe: The study.
        out: Folder of run directories.
        text: Text that replaces the recipe's.
        device: auto, cpu, cuda or cuda:N.
        only: Some of the models, as ``encoding:seed`` or ``encoding``.
        keep: Keep the trained models.
        progress: Progress callback.
        finished: Called with one line for each finished model.
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
    spent = {name: float(run.details[f"seconds_{name}"]) for name in ("training", "recording", "after")}
    share = spent["recording"] / max(1e-9, spent["training"])
    loss = float(run.records()["loss"][-1].mean())
    return (
        f"{run.encoding} seed {run.seed}: loss {loss:.3f}, training {spent['training']:.1f} s, recording "
        f"{spent['recording']:.1f} s ({share:.0%}), afterwards {spent['after']:.1f} s; this time {seconds:.1f} s"
    )
