"""Measurements of a model while it is trained, without changing the training."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.proof import prove
from wherewhat.captures.structure import same_modules, state_of
from wherewhat.errors import ConfigError, MeasureError, StoreError, TextError, WherewhatError, one_line
from wherewhat.files import JSON, remove
from wherewhat.measures.measurement import (
    ChoicesMeasurement,
    DocumentsMeasurement,
    LayerMeasurement,
    Measurement,
    QuestionMeasurement,
    Text,
    declared_metrics,
    find_measurement,
    measure_pass,
    measure_text,
)
from wherewhat.models.loaded import LoadedModel, evaluation, max_positions
from wherewhat.models.memory import load_memory
from wherewhat.numerics import few_threads, new_process_settings, random_states, weight_dtypes
from wherewhat.options import build_config, checked, config_values, nearest
from wherewhat.runs.code import code_identity
from wherewhat.runs.directory import COMPLETE, Provenance, RunDirectory, model_provenance
from wherewhat.runs.identity import loaded_model, texts_identity
from wherewhat.runs.records import (
    RECORDS,
    RECORDS_FILE,
    TRAINING,
    Recorder,
    Records,
    TrainingRun,
    save_table,
    study_config,
)
from wherewhat.runs.request import MemoryModel, common_length, document_text, model_request
from wherewhat.runs.results import commonest
from wherewhat.runs.subject import ModelSubject, texts_at_once
from wherewhat.scores import Column, Scores
from wherewhat.text.documents import Document, documents_of, embedded_documents

_log = logging.getLogger(__name__)

_RECORDED: Mapping[str, Mapping[str, Any]] = {
    "axes": {"curves": False},
    "heads": {"queries": 4, "taus": (), "blocks": ()},
}
"""Options that differ from a measurement's defaults in a training, where curves are not kept and time matters."""

MEASUREMENTS = ("axes", "heads")
"""Measurements that are recorded by default."""

_LEAST_TOKENS = 8
_SECONDS_TO_WAIT = 60.0
"""Longest time to wait for another process that writes to the run directory."""

Chosen = Mapping[str, tuple[Measurement, Any]]
"""Measurements and their configs by name."""


def choose_measurements(names: str | Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> Chosen:
    """Return measurements of texts with their options for records.

    Options, by name of the measurement, take precedence over those that it declares for records.
    """
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise ConfigError("measurements is empty: give at least one, such as axes")
    unused = next((name for name in options or {} if name not in listed), None)
    if unused is not None:
        raise ConfigError(f"options are given for '{unused}', which is not recorded: {nearest(unused, listed)}")
    chosen: dict[str, tuple[Measurement, Any]] = {}
    for name in listed:
        measurement = find_measurement(name)
        if isinstance(measurement, QuestionMeasurement | ChoicesMeasurement):
            raise ConfigError(f"{name} is measured on questions, not on texts: it cannot be recorded during training")
        values = {**_RECORDED.get(name, {}), **(options or {}).get(name, {})}
        chosen[name] = (measurement, build_config(measurement.config, values))
    return chosen


class TrainingRecorder:
    """Measure a model at training steps and store the scores; the training itself is not changed.

    Each record runs the model on the same few texts in evaluation mode and in the precision of its weights, without
    gradients and autocast. The mode of each module, the random number generators and PyTorch's numerical settings are
    restored afterwards, so that the weights after training are the same, bit for bit, as without records. The model is
    verified once; later passes are checked as they run.

    The model is recorded once at construction, which raises an error if it cannot be recorded. An error at a later step
    is one line of warning, and nothing is recorded from then on.

    Args:
        model: The model that is trained: of transformers, also inside PEFT or ``torch.compile``.
        texts: Texts to measure it on: strings, documents, or token ids ``(documents, n)``; by default embedded prose,
            which needs a tokenizer.
        tokenizer: Tokenizer, for strings.
        every: Number of steps between two records.
        measurements: Names of measurements.
        options: Options of measurements by name, such as ``{"heads": {"queries": 16}}``.
        tokens: Tokens of each text, at most.
        documents: Number of texts, from the first, at most.
        out: Folder of run directories; None keeps the records in memory.
        name: Name of the training; by default that of the model. Trainings of the same name, texts and options share a
            run directory.
        start: Number of finished steps. At 0 a new record is begun. A training that is resumed from a checkpoint
            continues its records, of which those of later steps are removed.

    Attributes:
        every: Number of steps between two records.
        active: Whether it records: until it is finished or an error occurs.

    Examples:
        >>> watch = TrainingRecorder(model, ids, every=50, out="runs")
        >>> for step, batch in enumerate(loader, 1):
        ...     train_on(batch)
        ...     watch(step)
        >>> run = watch.finish()
    """

    @checked(texts=documents_of)
    def __init__(
        self,
        model: Any,
        texts: tuple[Document, ...] | None = None,
        *,
        tokenizer: Any = None,
        every: int = 500,
        measurements: str | Sequence[str] = MEASUREMENTS,
        options: Mapping[str, Any] | None = None,
        tokens: int = 128,
        documents: int = 2,
        out: str | os.PathLike[str] | None = None,
        name: str | None = None,
        start: int = 0,
    ) -> None:
        check_positive(every=every, tokens=tokens, documents=documents)
        if start < 0:
            raise ConfigError(f"start is {start}: give the number of finished steps, 0 or more")
        self.every = every
        self.active = True
        self._chosen = choose_measurements(measurements, options)
        request = model_request(model, tokenizer)
        if not isinstance(request, MemoryModel):
            raise ConfigError(f"model is {model!r}: give the transformers model that is trained")
        module, read = request.module, request.tokenizer
        self._loaded = load_memory(module, read, name=request.model, weights="trained", seed=0, hashed=False)
        if texts is None and read is None:
            raise TextError("there are no texts and no tokenizer for the embedded ones: give texts, such as token ids")
        self._documents = listed = (texts or tuple(embedded_documents(documents)))[:documents]
        self._texts = _in_tokens(self._loaded, listed, tokens)
        for measurement, _ in self._chosen.values():
            if len(listed) < measurement.least_documents:
                raise TextError(
                    f"{measurement.name} needs {measurement.least_documents} texts: {len(listed)} are given"
                )
        with self._undisturbed():
            self._subject = ModelSubject(self._loaded, prove(module))
            self._heads: dict[int, int] = {}
            self._subject.run(self._texts[0].ids, lambda layer: self._heads.update({layer.layer: layer.heads}))
        self._config = self._resolved(name or request.model)
        self._directory = (
            None
            if out is None
            else RunDirectory.open(out, name=f"training-{name or request.model}", config=self._config)
        )
        self._axes: dict[str, tuple[str, ...]] = {}
        self._recorder = self._begin(start)
        self._written = self._stamp()
        self._step = start
        self._record(start)

    def __call__(self, step: int) -> dict[str, float]:
        """Record the model after ``step`` steps if that is a multiple of ``every``.

        Returns:
            Main metrics by names such as ``wherewhat/axes/r``, to be logged; empty if nothing was recorded.
        """
        if step < 0:
            raise ConfigError(f"step is {step}: give the number of finished steps, from 0")
        self._step = step
        return {} if step % self.every else self.record(step)

    def record(self, step: int) -> dict[str, float]:
        """Record the model after ``step`` steps, unless it is recorded already; returns what a call returns."""
        self._step = step
        if not self.active or step in self._recorder.records:
            return {}
        try:
            self._record(step)
        except Exception as error:  # noqa: BLE001 - a measurement must not end a training
            self.stop(error)
            return {}
        return self.numbers()

    def numbers(self) -> dict[str, float]:
        """Return the main metrics of the last record, means over heads, by names such as ``wherewhat/axes/r``."""
        return {f"wherewhat/{name}": value for name, value in self.run().last().items()}

    def stop(self, error: BaseException) -> None:
        """Warn in one line and record nothing from now on."""
        self.active = False
        warn(error, step=self._step)

    def finish(self) -> TrainingRun:
        """Record the last step that was seen, complete the run directory, and return the run."""
        self.record(self._step)
        self.active = False
        directory = self._directory
        if directory is not None and (directory.path / RECORDS_FILE).exists():
            self._check_alone()
            with directory.lock(timeout=_SECONDS_TO_WAIT):
                save_table(directory, RECORDS, self._recorder.records.table(), seconds=self._recorder.seconds)
                directory.finish([RECORDS], provenance=self._provenance())
                remove(directory.path / RECORDS_FILE)
        return self.run()

    def run(self) -> TrainingRun:
        """Return the records made so far, with tables and figures."""
        return TrainingRun(
            self._recorder.records, self._config, None if self._directory is None else self._directory.path
        )

    @property
    def seconds(self) -> float:
        """Wall time of all records that this process made."""
        return self._recorder.seconds

    def _record(self, step: int) -> None:
        self._check_alone()
        self._recorder(step, self._loaded.model)
        self._written = self._stamp()

    def _begin(self, start: int) -> Recorder:
        """Return a recorder that continues the records up to a step, or begins new ones at step 0."""
        indices = [(layer, head) for layer, heads in sorted(self._heads.items()) for head in range(heads)]
        constants = {
            "layer": Column(torch.tensor([layer for layer, _ in indices]), ("head",)),
            "head": Column(torch.tensor([head for _, head in indices]), ("head",)),
        }
        path = None
        if self._directory is not None:
            folder, path = self._directory.path, self._directory.path / RECORDS_FILE
            records = Records(constants=constants)
            if start and (path.exists() or (folder / COMPLETE).exists()):
                records = TrainingRun.load(folder).records.until(start)
            with self._directory.lock(timeout=_SECONDS_TO_WAIT):
                # The records are written first: whenever the process is killed, there are records to be read.
                records.write(path)
                self._directory.clear()
        return Recorder(lambda _: self._scores(), self._axes, constants=constants, path=path)

    def _scores(self) -> dict[str, Tensor]:
        """Measure all texts; return means over texts, of heads ``(heads,)`` and of the whole model ``()``, float32."""
        with self._undisturbed():
            self._renew_proof()
            by_measurement = measure_texts(self._subject, self._texts, self._chosen)
        scores: dict[str, Tensor] = {}
        for measurement, documents in by_measurement.items():
            definition, config = self._chosen[measurement]
            documents = [
                document.checked(declared_metrics(definition, config), of=measurement) for document in documents
            ]
            declared = {name: metric for document in documents for name, metric in document.metrics.items()}
            categories = {name: metric.categories for name, metric in declared.items() if metric.categories}
            for name, values in _means(documents, self._heads, categories).items():
                scores[f"{measurement}.{name}"] = values.float()
                self._axes[f"{measurement}.{name}"] = ("head",) * values.ndim
        return scores

    def _renew_proof(self) -> None:
        """Keep the proof while only the values of weights change; every pass is checked as it runs."""
        model, proof = self._loaded.model, self._subject.proof
        state = state_of(model)
        if state != proof.state:
            self._subject.proof = replace(proof, state=state) if same_modules(state, proof.state) else prove(model)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Use evaluation mode and the settings of a new process; restore everything that training depends on."""
        model = self._loaded.model
        settings = new_process_settings(weight_dtypes(model))
        with random_states(), settings, few_threads(model), evaluation(model), _own_forward(model):
            yield

    def _stamp(self) -> tuple[int, int] | None:
        """Return what identifies the records file as it was last written; None without a file."""
        if self._directory is None:
            return None
        try:
            status = (self._directory.path / RECORDS_FILE).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _check_alone(self) -> None:
        """Refuse to write where another training has written since."""
        if self._stamp() != self._written:
            assert self._directory is not None
            raise StoreError(
                f"another training writes to {self._directory.path}: give each its own name, or its own out"
            )

    def _resolved(self, name: str) -> dict[str, Any]:
        """Return everything that is recorded; its hash names the run directory."""
        model = loaded_model(self._loaded)
        return study_config(
            TRAINING,
            name=name,
            model=type(self._loaded.model).__name__,
            measurements={
                measurement.name: {"options": config_values(config), **code_identity(measurement, config)}
                for measurement, config in self._chosen.values()
            },
            tokens=self._texts[0].ids.shape[1],
            **texts_identity(self._documents, [text.ids.tolist() for text in self._texts]),
            # Not its weights, which the training changes.
            **{key: model[key] for key in ("tokenizer_hash", "dtype", "device", "attention", "versions")},
        )

    def _provenance(self) -> Provenance:
        loaded, recorder = self._loaded, self._recorder
        extra: dict[str, JSON] = {
            "seconds_recording": round(recorder.seconds, 3),
            "seconds_by_record": {str(step): round(s, 4) for step, s in recorder.seconds_by_step.items()},
            "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        }
        return replace(model_provenance(loaded, self._documents, extra), model_hash=None)


@contextmanager
def _own_forward(model: Any) -> Iterator[None]:
    """Call the model's own forward function, which accelerate wraps in autocast for mixed precision."""
    own, wrapped = getattr(model, "_original_forward", None), vars(model).get("forward")
    if own is None or wrapped is None:
        yield
        return
    model.forward = own
    try:
        yield
    finally:
        model.forward = wrapped


def warn(error: BaseException, *, step: int | None = None) -> None:
    """Log one line of warning: the training goes on without records."""
    when = "" if step is None else f" from step {step} on"
    _log.warning("wherewhat records nothing%s, training goes on: %s", when, one_line(error, most=400))


def check_positive(**values: int) -> None:
    """Raise a ConfigError for a value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: give 1 or more")


def measure_texts(subject: ModelSubject, texts: Sequence[Text], chosen: Chosen) -> dict[str, list[Scores]]:
    """Return the scores of each text, or of all texts together, by measurement.

    The texts have one length: as many as memory allows go through the model together, and all measurements of layers
    share their passes.
    """
    layered = {name: (x, config) for name, (x, config) in chosen.items() if isinstance(x, LayerMeasurement)}
    scores: dict[str, list[Scores]] = {name: [] for name in layered}
    step = texts_at_once(subject.loaded.model, texts[0].ids.shape[1])
    for start in range(0, len(texts) if layered else 0, step):
        outcomes = measure_pass(subject, texts[start : start + step], list(layered.values()))
        for name, outcome in zip(layered, outcomes, strict=True):
            if isinstance(outcome, WherewhatError):
                raise outcome
            scores[name] += outcome
    for name, (measurement, config) in chosen.items():
        if isinstance(measurement, DocumentsMeasurement):
            scores[name] = [measurement.measure(subject, texts, config)]
        elif name not in layered:
            scores[name] = [measure_text(measurement, subject, text, config) for text in texts]
    return {name: scores[name] for name in chosen}


def _in_tokens(loaded: LoadedModel, documents: Sequence[Document], tokens: int) -> list[Text]:
    """Return the texts in tokens, all of one length: that of the shortest, at most ``tokens``."""
    limit, _ = max_positions(loaded.model)
    length = min(tokens, common_length(loaded, documents), limit or tokens)
    if length < _LEAST_TOKENS:
        raise TextError(f"the shortest text has {length} tokens: give texts of {_LEAST_TOKENS} or more")
    return [document_text(loaded, document, length) for document in documents]


def _means(documents: Sequence[Scores], heads: Mapping[int, int], categories: Collection[str]) -> dict[str, Tensor]:
    """Return means over documents: of heads, over all layers ``(heads,)``, and of the whole model ``()``.

    Of ``categories``, which have no mean, the value of most documents is returned.
    """
    indices = sorted(heads)
    starts = dict(zip(indices, accumulate((heads[i] for i in indices), initial=0), strict=False))
    by_metric: dict[str, list[Tensor]] = {}
    for document in documents:
        rows: dict[str, Tensor] = {}
        of_layers: dict[str, list[float]] = {}
        for layer in document.layers:
            for name, values in layer.heads.items():
                row = rows.setdefault(name, torch.full((sum(heads.values()),), torch.nan, dtype=torch.float64))
                row[starts[layer.layer] : starts[layer.layer] + len(values)] = values
            for name, value in layer.whole.items():
                of_layers.setdefault(name, []).append(value)
        whole = {**{name: sum(values) / len(values) for name, values in of_layers.items()}, **document.whole}
        single = {name: torch.tensor(value, dtype=torch.float64) for name, value in whole.items()}
        for name, values in {**single, **rows}.items():
            by_metric.setdefault(name, []).append(values)
    if not by_metric:
        raise MeasureError("the texts gave no scores")
    return {
        name: _commonest(torch.stack(listed)) if name in categories else torch.stack(listed).nanmean(0)
        for name, listed in by_metric.items()
    }


def _commonest(codes: Tensor) -> Tensor:
    """Return the commonest code of each head in ``(documents, heads)``; NaN where none is defined."""
    columns = map(commonest, codes.view(len(codes), -1).T.tolist())  # NaN is not at least 0, as defined codes are
    values = [torch.nan if code is None else code for code in columns]
    return torch.tensor(values, dtype=torch.float64).view(codes.shape[1:])
