"""A sweep file becomes its cells, all of them checked before the first one runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.evaluate import read_items
from wherewhat.measure.base import Measurement
from wherewhat.measure.options import build_config, config_values
from wherewhat.measure.registry import find
from wherewhat.models.source import EMBEDDED
from wherewhat.pipeline.inputs import read_texts
from wherewhat.pipeline.request import Request
from wherewhat.store.hashing import JSON
from wherewhat.sweep.cell import Cell
from wherewhat.sweep.engine import Resources
from wherewhat.sweep.entries import (
    EMBEDDED_TEXT,
    ON_MODELS,
    ON_TEXTS,
    Axes,
    MeasurementEntry,
    TextEntry,
    axes_of,
    check_keys,
    listed,
    measurement_entries,
    model_entry,
    names_of,
    text_entries,
    typed,
)
from wherewhat.sweep.file import SweepFile
from wherewhat.sweep.variants import Variant, variants
from wherewhat.text import Document, text_hash

_OWN_KEYS = ("store", "resources", "models", "texts", "measurements")


def resources_of(file: SweepFile) -> Resources:
    """What each cell needs, from the file's ``resources``.

    Raises:
        ConfigError: If a key is unknown or a value makes no sense.
    """
    table = file.values.get("resources", {})
    where = f"{file.path}: resources"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, with {', '.join(names_of(Resources))}")
    check_keys(table, names_of(Resources), where)
    try:
        made = build_config(Resources, table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    assert isinstance(made, Resources)
    return made


def expand(file: SweepFile) -> list[Cell]:
    """The cells of a sweep, in the order of the file: models outside, measurements inside.

    Seeds vary twins and prompts. Trained weights on documents do not depend on them and are measured with the first
    one only; a measurement that makes its own prompts or is measured on items is not repeated for every text.

    Raises:
        WherewhatError: If a key, name or value is unknown, texts, items or a model's folder cannot be read, or two
            cells are the same.
    """
    values, where = file.values, str(file.path)
    check_keys(values, [*_OWN_KEYS, *names_of(Axes), *names_of(ON_MODELS), *names_of(ON_TEXTS)], where)
    if "measurements" not in values:
        raise ConfigError(f"{where}: 'measurements' is missing: say what to measure, such as measurements = ['axes']")
    axes = axes_of(values, where)
    models = [
        model_entry(value, f"{where}: models[{i}]", axes)
        for i, value in enumerate(listed(values.get("models", [EMBEDDED]), f"{where}: models"))
    ]
    texts = text_entries(values.get("texts", [EMBEDDED_TEXT]), f"{where}: texts")
    measurements = measurement_entries(values["measurements"], f"{where}: measurements")
    on_models, on_texts = typed(ON_MODELS, values, where), typed(ON_TEXTS, values, where)
    identify = _Texts()
    cells: dict[str, Cell] = {}
    for number, model in enumerate(models):
        for variant in variants(model, on_models, f"{where}: models[{number}]"):
            for cell in _cells(variant, texts, measurements, on_texts, identify):
                if cell.id in cells:
                    raise ConfigError(f"{where}: two cells are the same: {cell.described}; remove what is repeated")
                cells[cell.id] = cell
    return list(cells.values())


def _cells(
    variant: Variant,
    texts: list[TextEntry],
    measurements: list[MeasurementEntry],
    on_texts: dict[str, Any],
    identify: _Texts,
) -> Iterator[Cell]:
    """Cells of one form of a model."""
    for entry in measurements:
        measurement = find(entry.measurement)
        options = config_values(build_config(measurement.config, entry.options))
        for text in _on(measurement, texts):
            makes_own = measurement.prompts is not None
            drawn = variant.request.weights != "trained" or makes_own or (text is not None and text.prompts is not None)
            if not drawn and not variant.first_seed:
                continue
            request = Request(
                measurement=measurement.name,
                model=variant.request,
                text=text.text if text else None,
                prompts=text.prompts if text else None,
                options=options,
                **{**on_texts, **(text.shared if text else {}), **entry.shared},
            )
            inputs: dict[str, JSON] = {"texts": identify(request, measurement), "model": variant.files}
            yield Cell(request=request, text=text.name if text else None, checkpoint=variant.checkpoint, inputs=inputs)


def _on(measurement: Measurement, texts: Sequence[TextEntry]) -> Sequence[TextEntry | None]:
    """The texts a measurement is repeated for; None for what it makes itself, or items named elsewhere."""
    if measurement.items:
        return [text for text in texts if "items" in text.shared] or [None]
    return texts if measurement.prompts is None else [None]


class _Texts:
    """Reads texts and items and knows them by their content, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str | None] = {}

    def __call__(self, request: Request, measurement: Measurement) -> str | None:
        """Hash of the documents or items of a request; None where prompts are made for the model."""
        named = (request.text, request.prompts, request.items, request.documents)
        key = (*named, measurement.least_documents, measurement.prompts is not None, measurement.items)
        if key not in self._known:
            texts = read_texts(request, measurement)
            if measurement.items and request.items is not None:
                found = read_items(request.items, count=request.documents)
                texts = [Document(item.name, item.text, item.source) for item in found]
            self._known[key] = text_hash(texts) if texts else None
        return self._known[key]
