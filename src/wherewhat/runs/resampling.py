"""A finished run as if it had been made on other documents: its own, some of them several times and some not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from wherewhat.measures.measurement import declared_metrics, defines
from wherewhat.runs.results import Numbers, StoredRun, read_numbers
from wherewhat.runs.schema import score_table

if TYPE_CHECKING:
    from wherewhat.runs.schema import ProfileFile


class ResampledRun(StoredRun):
    """A run of which each document counts a given number of times.

    Everything is computed from the stored numbers of its documents, also what the measurement combines from all of
    them. It has no curves, and no numbers by kind of layer.

    Args:
        run: The finished run.
        counts: How often each document occurs; documents that are not named are left out. Copies of a document have
            the same name in all runs with the same counts, so that runs remain paired.
    """

    def __init__(self, run: StoredRun, counts: Mapping[str, int]) -> None:
        super().__init__(run.directory)
        self.drawn = dict(sorted((f"{i} {name}", name) for name in run.documents for i in range(counts.get(name, 0))))
        self.documents = list(self.drawn)
        self.measurement, self.config, self.metrics = run.measurement, run.config, run.metrics
        self.categories, self.kinds, self.profiles = run.categories, {}, cast("ProfileFile", {})
        self.numbers = _ResampledNumbers(self, run)


class _ResampledNumbers(Mapping[str, Numbers]):
    """Values of a resampled run by metric, computed on access."""

    def __init__(self, resampled: ResampledRun, run: StoredRun) -> None:
        self._resampled, self._run = resampled, run
        self._known: dict[str, Numbers] = {}

    def __getitem__(self, metric: str) -> Numbers:
        if metric not in self._known:
            self._known[metric] = self._values(metric)
        return self._known[metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self._run.numbers)

    def __len__(self) -> int:
        return len(self._run.numbers)

    def _values(self, metric: str) -> Numbers:
        numbers, drawn = self._run.numbers[metric], self._resampled.drawn
        # Rows are sorted by document.
        ends = np.searchsorted(numbers.document, np.arange(len(numbers.documents) + 1))
        place = {name: index for index, name in enumerate(numbers.documents)}
        copies = [(copy, place[name]) for copy, name in enumerate(drawn.values()) if name in place]
        copy, at = np.array(copies, dtype=np.int64).reshape(-1, 2).T
        sizes = ends[at + 1] - ends[at]
        rows = np.arange(sizes.sum()) + np.repeat(ends[at] - np.cumsum(sizes) + sizes, sizes)
        values = replace(numbers.where(rows), documents=[*drawn, None], document=np.repeat(copy, sizes))
        if ends[-2] == ends[-1] or metric not in self._together:
            return values
        more = self._together[metric]
        return replace(
            values,
            document=np.concatenate([values.document, np.full(len(more.value), len(drawn))]),
            layer=np.concatenate([values.layer, more.layer]),
            head=np.concatenate([values.head, more.head]),
            value=np.concatenate([values.value, more.value]),
        )

    @cached_property
    def _together(self) -> Mapping[str, Numbers]:
        """Values of all documents together by metric; none if the measurement has none."""
        measurement, config = self._run.measurement, self._run.config
        names = list(self._resampled.drawn.values())
        if not defines(measurement, "combine") or len(names) < 2:
            return {}
        scores = measurement.combine([self._run.parts[name] for name in names], config)
        checked = scores.checked(declared_metrics(measurement, config), of=measurement.name, controls=False)
        shared = {name: self._run.directory.config[name] for name in ("measurement", "model", "weights", "seed")}
        return read_numbers(score_table({None: checked}, shared)) if checked.names else {}
