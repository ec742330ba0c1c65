"""Train, record and measure every encoding and seed of a study."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wherewhat.errors import StoreError
from wherewhat.files import make_folder, remove, write_file
from wherewhat.hashes import config_hash, parse_object, readable_json
from wherewhat.lab.encoding_study.after import measure_after
from wherewhat.lab.encoding_study.corpus import Corpus, read_corpus
from wherewhat.lab.encoding_study.recipe import ENCODINGS, Recipe, parse_only
from wherewhat.lab.encoding_study.records import Recorder, Records, Table, read_table, wait_for, write_table
from wherewhat.lab.encoding_study.scores import HeldOut
from wherewhat.lab.language import recording_steps, train_language
from wherewhat.lab.training import MODEL_FILE
from wherewhat.models.loaded import resolve_device
from wherewhat.numerics import new_process_settings
from wherewhat.progress import Progress, Silent
from wherewhat.runs.provenance import collect_versions

CONFIG_FILE = "config.json"
RECORDS_FILE = "records.safetensors"
AFTER_FILE = "after.safetensors"
PROVENANCE_FILE = "provenance.json"
"""Written last: a directory that holds it is finished."""


@dataclass(frozen=True)
class EncodingRun:
    """A finished model of the study, without its weights.

    Attributes:
        path: Its directory.
        config: All that its numbers depend on.
        provenance: Versions, device and seconds, on which they do not.
    """

    path: Path
    config: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def encoding(self) -> str:
        """Its encoding."""
        return str(self.config["encoding"])

    @property
    def seed(self) -> int:
        """Seed of its weights."""
        return int(self.config["seed"])

    @property
    def context(self) -> int:
        """Bytes of the texts it was trained on."""
        return int(self.config["training"]["context"])

    def records(self) -> Records:
        """What was recorded while it learned."""
        return Records.read(self.path / RECORDS_FILE)

    def after(self) -> Table:
        """What was measured afterwards."""
        return read_table(self.path / AFTER_FILE)


@new_process_settings()
def run_one(
    recipe: Recipe,
    corpus: Corpus,
    encoding: str,
    seed: int,
    *,
    out: Path,
    device: str = "cpu",
    keep: bool = False,
    progress: Progress | None = None,
) -> EncodingRun:
    """Train, watch and measure one model.

    Done before, it is read; begun before, it goes on where it stopped and ends with the same records.

    Args:
        recipe: The study.
        corpus: Its text.
        encoding: The model's encoding.
        seed: Seed of its weights.
        out: Folder that holds the directories of all models.
        device: cpu, cuda or cuda:N.
        keep: Keep the trained model too.
        progress: Who is told how far it is.
    """
    place = resolve_device(device)
    config = {"encoding": encoding, "seed": seed, "text": corpus.sha256, "device": place.type, **recipe.values()}
    path = out / f"{encoding}-seed{seed}-{config_hash(config)[:12]}"
    if (path / PROVENANCE_FILE).exists() and ((path / MODEL_FILE).exists() or not keep):
        return open_run(path)
    training, context = recipe.training_for(seed), recipe.training.context
    # What is too short for any of it is refused before anything is written.
    held_out = HeldOut.of(corpus, context, recipe.watch)
    corpus.windows(1, recipe.after.times * context, seed=recipe.after.seed)
    make_folder(path)
    write_file(path / CONFIG_FILE, readable_json(config))
    recorder = Recorder(held_out, recipe.watch, path=path / RECORDS_FILE)
    resumed = int(recorder.records.steps.max()) if len(recorder.records) else None
    started = time.perf_counter()
    model = train_language(
        recipe.model_for(encoding, seed),
        training,
        corpus.training,
        record=recorder,
        record_at=recording_steps(training.steps, recipe.watch.records),
        directory=path,
        progress=progress,
        device=str(place),
    )
    wait_for(model)
    trained = time.perf_counter()
    write_table(path / AFTER_FILE, measure_after(model, corpus, recipe.after, context=context))
    done = time.perf_counter()
    provenance: dict[str, Any] = {
        "seconds_training": round(trained - started - recorder.seconds, 3),
        "seconds_recording": round(recorder.seconds, 3),
        "seconds_after": round(done - trained, 3),
        "seconds_by_record": {str(step): round(seconds, 4) for step, seconds in recorder.each.items()},
        # Seconds are those of the last process alone.
        "resumed_after_step": resumed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "text": corpus.source,
        "versions": dict(collect_versions()),
    }
    write_file(path / PROVENANCE_FILE, readable_json(provenance))
    if not keep:
        remove(path / MODEL_FILE)
        remove(path / "tensorboard")
    return open_run(path)


def open_run(path: Path) -> EncodingRun:
    """A directory that :func:`run_one` finished."""
    try:
        config, provenance = (parse_object((path / name).read_bytes()) for name in (CONFIG_FILE, PROVENANCE_FILE))
    except OSError as error:
        raise StoreError(f"{path} is no finished run of the study: run it again") from error
    if config is None or provenance is None or "encoding" not in config:
        raise StoreError(f"{path} holds a damaged {CONFIG_FILE} or {PROVENANCE_FILE}: run it again")
    return EncodingRun(path, dict(config), dict(provenance))


def open_runs(folder: Path) -> list[EncodingRun]:
    """All finished runs in a folder, by encoding and seed, all of the same recipe and text."""
    try:
        paths = sorted(path.parent for path in folder.glob(f"*/{PROVENANCE_FILE}"))
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from error
    runs = sorted(map(open_run, paths), key=lambda run: ((*ENCODINGS, run.encoding).index(run.encoding), run.seed))
    if not runs:
        raise StoreError(f"{folder} holds no finished run: make some with 'wherewhat encodings run --out {folder}'")
    first = _shared(runs[0])
    for run in runs[1:]:
        for name, value in _shared(run).items():
            if value != first.get(name):
                raise StoreError(
                    f"{run.path.name} and {runs[0].path.name} differ in {name}: keep each study in a folder of its own"
                )
    return runs


def _shared(run: EncodingRun) -> dict[str, Any]:
    return {name: value for name, value in run.config.items() if name not in ("encoding", "seed")}


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
