"""Numbers of the figures of arXiv 2605.31558, from finished runs and from the paper.

Most are in the records of a training. Measured here, and kept as parts of the run directory: accuracy with extra
tokens, information flow along the path of solved inputs, geometry of queries and keys in the dominant planes, and
accuracy by position of the answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.measures.frequencies.planes import mean_frequency_softmax
from wherewhat.numerics import new_process_settings
from wherewhat.runs.records import Axes, Records, read_part, save_table
from wherewhat.scores import Column
from wherewhat_lab.constructions.geometry import plane_geometry, task_labels
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.accuracy import EXTRA, Accuracy, solved_by
from wherewhat_lab.multihop.functions import find_roles, hop_function
from wherewhat_lab.multihop.learning import Alignment, Learning, Purity, align, find_learning, find_purity, has_no_sink
from wherewhat_lab.multihop.study import Checkpoint, MultihopRun, measure_extra
from wherewhat_lab.tasks.task import Sequences, SequenceTask

Tensors = Mapping[str, Tensor]

ROLES = ("other", "Reflexive", "Index", "Retrieval")
"""Roles of heads; their codes are indices into this tuple."""

PLACES = (0, 100)
"""Numbers of extra tokens at which accuracy is measured by position of the answer."""

_HEAD = ("layer", "head")
AXES: Axes = {
    # Information flow; a model that solves no input has the first only.
    "solved": ("number",),  # share of the sequences that the model solves
    "roles": _HEAD,  # index into ROLES
    "on_next": (*_HEAD, "hop"),  # mean attention weight on the next hop by number of hops left, NaN if not solved
    "path": ("hop",),  # visited positions of one solved input with the most hops, from the query's to the answer's
    "pattern": (*_HEAD, "query", "key"),  # its attention weights
    # Geometry in each head's plane with the largest logit contributions.
    "planes": _HEAD,  # its index
    "shares": _HEAD,  # its share of the sum over planes
    "key_resultant": _HEAD,  # resultant length of the keys: 1 for one direction
    "query_spread": _HEAD,  # circular variance of the mean query directions by label: 1 for uniform directions
    "query_tightness": _HEAD,  # mean resultant length of the queries of a label: 1 if it determines the direction
    "keys": (*_HEAD, "point", "coordinate"),  # points in the plane, before rotation
    "queries": (*_HEAD, "point", "coordinate"),
    "query_labels": ("point",),
    # Accuracy by position of the answer in the target window.
    "hits": ("slot",),
    "counts": ("slot",),
}
"""Dimensions of the measured tensors."""

_SEED = 1_000_003
"""Seed of the sequences, which no training uses."""

_POINTS = 32
"""Sequences whose queries and keys are stored as points."""


@dataclass(frozen=True)
class RunFigures:
    """Everything that the figures need of one run.

    Attributes:
        run: The run.
        extra: Accuracy by number of extra tokens, by checkpoint.
        flow: Information flow on solved inputs, see :data:`AXES`.
        geometry: Queries and keys in the dominant planes; empty unless the task's hop is Index and planes rotate.
        places: Correct answers by position of the answer, by number of extra tokens.
    """

    run: MultihopRun
    extra: Mapping[Checkpoint, Mapping[int, Accuracy]]
    flow: Tensors
    geometry: Tensors
    places: Mapping[int, Tensors]

    @cached_property
    def records(self) -> Records:
        """Scores by training step."""
        return self.run.records()

    @cached_property
    def purity(self) -> Purity:
        """Pure heads by training step, over all keys."""
        return find_purity(self.records)

    @cached_property
    def purity_no_sink(self) -> Purity | None:
        """The same with sinks apart and without swaps of the first key; None for records of earlier versions."""
        return find_purity(self.records, no_sink=True) if has_no_sink(self.records) else None

    @cached_property
    def alignment(self) -> Alignment:
        """Pure heads compared with accuracy."""
        return align(self.records)

    @cached_property
    def learning(self) -> Learning:
        """Steps at which accuracy reached 0.9."""
        return find_learning(self.records, levels=(0.9,))


@new_process_settings()
def measure_figures(run: MultihopRun, extra: Sequence[int], *, count: int, device: str = "cpu") -> RunFigures:
    """Return the numbers of a run, of which those that its directory does not hold are measured.

    Args:
        run: A finished training.
        extra: Numbers of extra tokens.
        count: Sequences of each.
        device: cpu, cuda or cuda:N.
    """
    task = run.setup.task

    def stored(key: str, count: int, measure: Callable[..., Tensors], extra: int = 0) -> Tensors:
        key, directory = f"{key}, {count} sequences", run.directory
        if not directory.has(key):
            started = time.perf_counter()
            tensors = measure(run.model(device=device), task, task.sample(count, seed=_SEED, extra=extra))
            table = {name: Column(values.cpu(), AXES[name]) for name, values in tensors.items()}
            with directory.lock():
                save_table(directory, key, table, seconds=time.perf_counter() - started)
        return {name: column.values for name, column in read_part(directory, key).items()}

    rotated = run.records()["use"].shape[-1] > 0
    return RunFigures(
        run,
        extra={
            name: measure_extra(run, extra, count=count, checkpoint=name, device=device) for name in run.checkpoints
        },
        flow=stored("information flow", count, information_flow),
        geometry=stored("geometry", _POINTS, plane_points) if rotated and hop_function(task) == "Index" else {},
        places={
            added: stored(f"answer places, {added} extra tokens", count, answer_places, added)
            for added in PLACES
            if added in extra
        },
    )


def information_flow(model: LabModel, task: SequenceTask, sequences: Sequences) -> Tensors:
    """Return roles of heads and attention along the path on solved inputs, and all attention on one of them."""
    solved = solved_by(model, sequences)
    flow = {"solved": solved.double().mean()[None]}
    if not bool(solved.any()):
        return flow
    roles = find_roles(model, task, sequences)
    on_next = torch.full((*roles.on_next.shape[:2], task.max_hops), torch.nan)
    on_next[..., [left - 1 for left in roles.left]] = roles.on_next.float()
    rows = (solved & (sequences.hops == sequences.hops[solved].max())).nonzero()[:1, 0]
    tokens, path = sequences.tokens[rows], sequences.path[rows[0]]
    pattern = [layer.pattern()[0] for layer in model.attention(tokens.to(model.embedding.device))]
    return {
        **flow,
        "roles": torch.tensor([ROLES.index(head.role) for head in roles.heads]).view(on_next.shape[:2]),
        "on_next": on_next,
        "path": path[path >= 0],
        "pattern": torch.stack(pattern),
    }


def plane_points(model: LabModel, task: SequenceTask, sequences: Sequences) -> Tensors:
    """Return queries and keys of every head in its dominant plane, and how they are distributed."""
    keys, queries = task_labels(task, sequences.tokens)
    geometries = [
        [plane_geometry(layer, key_labels=keys, query_labels=queries, head=head) for head in range(layer.heads)]
        for layer in model.attention(sequences.tokens.to(model.embedding.device))
    ]

    def by_head(name: str) -> Tensor:
        values = [[torch.as_tensor(getattr(head, name)) for head in layer] for layer in geometries]
        return torch.stack([torch.stack(layer) for layer in values])

    return {
        "planes": by_head("plane"),
        "shares": by_head("share"),
        **{name: by_head(name) for name in ("key_resultant", "query_spread", "query_tightness")},
        **{name: by_head(name).float() for name in ("keys", "queries")},
        "query_labels": geometries[0][0].query_labels,
    }


def answer_places(model: LabModel, task: SequenceTask, sequences: Sequences) -> Tensors:
    """Return correct answers and questions by position of the answer in the target window."""
    extra = sequences.tokens.shape[1] - task.length
    slots = sequences.path.gather(1, sequences.hops[:, None])[:, 0] - extra
    right = slots[solved_by(model, sequences)]
    hits, counts = (torch.bincount(positions, minlength=task.slots) for positions in (right, slots))
    return {"hits": hits, "counts": counts}


def runs_by_task(runs: Sequence[MultihopRun]) -> dict[str, list[MultihopRun]]:
    """Return the runs of each of the paper's tasks by seed; those of one task must differ in their seeds only."""
    by_task: dict[str, list[MultihopRun]] = {task: [] for task in PAPER}
    for run in sorted(runs, key=lambda run: run.seed):
        task = run.setup.name
        if task not in by_task:
            raise ConfigError(f"{run.path} is a run of the {task} task: give runs of the tasks {' and '.join(PAPER)}")
        by_task[task].append(run)
        if run.setup.seeded(0) != by_task[task][0].setup.seeded(0):
            raise ConfigError(f"{run.path} and {by_task[task][0].path} differ in more than their seeds: give one setup")
    for task, same in by_task.items():
        seeds = Counter(run.seed for run in same)
        if len(seeds) < len(same):
            raise ConfigError(f"several runs of the {task} task have seed {seeds.most_common()[0][0]}: give each once")
    return {task: same for task, same in by_task.items() if same}


def frequency_ids(run: MultihopRun, use: Tensor | None = None) -> Tensor:
    """Return the mean frequency ID with softmax weights at every record, ``(records, layers, heads)``.

    Args:
        run: A finished training.
        use: Use of planes ``(records, layers, heads, planes)``; the recorded one by default.
    """
    records, rotation = run.records(), LabModel(run.setup.model).rotation
    if rotation is None:
        return records["mean_frequency"]
    if use is None and "mean_frequency_softmax" in records.values:
        return records["mean_frequency_softmax"]
    # Records of earlier versions hold the use of planes alone.
    return mean_frequency_softmax(records["use"] if use is None else use, rotation.inv_freq)


def unscaled_use(run: MultihopRun) -> Tensor:
    """Return the use of planes in dot products before their scale 1/√d, ``(records, layers, heads, planes)``."""
    model = run.setup.model
    return run.records()["use"] / (model.head_width**-0.5 if model.scale is None else model.scale)


@dataclass(frozen=True)
class PaperResults:
    """Results of one task; layers are counted from 0.

    Attributes:
        s_pos: Final positional score at the last token, by layer; an upper bound from layer 5 on.
        s_sym: Final symbolic score, by layer.
        pure: Layers with pure heads in the final scores, by γ and label.
        order: Order in which numbers of hops are learned.
        best_step: Step at which the largest accuracy is reached, the dashed line of the figure.
        frequency_ids: Weighted mean frequency ID (softmax weights), by layer.
        linear_ids: The same with linear weights, computed from the curves of the appendix, for the first layers.
        peaks: Largest logit contribution of one plane, for the first layers.
        lowest_s_sym: Smallest symbolic score during training, by layer; the paper does not discuss it.
        accuracy: Accuracy by number of extra tokens.
    """

    s_pos: tuple[float, ...]
    s_sym: tuple[float, ...]
    pure: Mapping[float, Mapping[str, tuple[int, ...]]]
    order: str
    best_step: int
    frequency_ids: tuple[int, ...]
    accuracy: Mapping[int, float]
    linear_ids: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()
    lowest_s_sym: Mapping[int, float] = field(default_factory=dict)


def _by_extra(values: str) -> Mapping[int, float]:
    return dict(zip(EXTRA, map(float, values.split()), strict=True))


_NUMBER = "1 1 .945 .881 .838 .803 .742 .644 .472 .359 .316 .292 .253 .205 .149 .104 .067 .042"
_LETTER = "1 1 1 1 1 1 1 .995 .990 .970 .957 .917 .894 .868 .797 .740 .628 .487"

PAPER: Mapping[str, PaperResults] = {
    "number": PaperResults(
        s_pos=(0.39, 1.0, 1.0, 0.96, 0.06, *(0.01,) * 7),
        s_sym=(0.62, 0.01, 0.01, 0.09, 0.99, *(1.0,) * 7),
        # The text says layers 0 to 3 are positional; these are the layers by the final scores.
        pure={
            0.1: {"positional": (1, 2, 3), "symbolic": tuple(range(4, 12))},
            0.05: {"positional": (1, 2), "symbolic": tuple(range(5, 12))},
        },
        order="1 hop first, then 2, 3, 4",
        best_step=4800,
        frequency_ids=(1, 2, 2, 2, 10, 39, 38, 38, 38, 37, 37, 38),
        linear_ids=(13.8, 9.2, 12.3, 21.0),
        peaks=(46, 76, 57, 25),
        accuracy=_by_extra(_NUMBER),
    ),
    "letter": PaperResults(
        s_pos=(0.32, *(0.0,) * 4, *(0.04,) * 7),
        s_sym=(0.86, *(1.0,) * 11),
        pure={gamma: {"positional": (), "symbolic": tuple(range(1, 12))} for gamma in (0.1, 0.05)},
        order="all hops together",
        best_step=3400,
        frequency_ids=(18, 32, 42, 37, 40, 38, 41, 38, 41, 39, 38, 40),
        lowest_s_sym={7: 0.87, 8: 0.81, 9: 0.56, 10: 0.35, 11: 0.19},
        accuracy=_by_extra(_LETTER),
    ),
}
"""Results by task. Frequency IDs count from 1, the fastest plane."""

INDEX_ANGLE, RETRIEVAL_ANGLE, LETTERS = 0.866, 0.0027, 8
"""Parameters of the figure of the discrepancy: angles of planes 2 and 42 per position, and number of letters."""
