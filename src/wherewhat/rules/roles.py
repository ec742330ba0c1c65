"""Roles of heads: what each head attends to, with the numbers that say so, and a portrait in one sentence.

A pattern, such as induction, is a role where its attention exceeds that of uniform attention by a threshold in most
documents. Sinks and the kinds of positional and symbolic scores are those of the labels. A head may have several roles,
or none.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from wherewhat.errors import StoreError
from wherewhat.measures.statistics import Interval, in_brief, in_words, interval
from wherewhat.measures.swaps import LABELS
from wherewhat.rules.numbers import count_documents, head_labels, head_means, negative
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.identity import KnownRuns
from wherewhat.runs.results import StoredRun
from wherewhat.runs.tables import joined_tables
from wherewhat.scores import MODEL

if TYPE_CHECKING:
    import pyarrow as pa

POSITIONS, TARGETS = 0.2, 0.1
"""Least attention beyond chance of roles at a position, and of roles that look for a token.

In prose few queries have a token to look for that is also the best one: the strongest induction head exceeds chance by
0.31 in SmolLM2-135M and by 0.19 in Gemma-3-270M, all but five heads of each by less than 0.05, and no head of the same
models with random weights exceeds the chance of any pattern by more than 0.01 (4 documents of 256 tokens).
"""

MOST_DOCUMENTS = 0.75
"""Share of the documents in which the attention of a role must exceed chance."""


@dataclass(frozen=True)
class Pattern:
    """A role that is a pattern of attention.

    Attributes:
        metric: Its metric of ``heads``; its chance level is the one of uniform attention.
        least: Attention beyond chance that it needs.
        place: Where the attention is, after "of its attention".
    """

    metric: str
    least: float
    place: str


PATTERNS = {
    "induction": Pattern("induction", TARGETS, "on the token after an earlier occurrence of the current one"),
    "duplicate token": Pattern("duplicate_token", TARGETS, "on earlier occurrences of the same token"),
    "retrieval": Pattern("retrieval", TARGETS, "on occurrences of the next token of the text"),
    "previous token": Pattern("previous_token", POSITIONS, "on the previous token"),
    "fixed distance": Pattern("slash_max", POSITIONS, "on the token {distance} back"),
}
"""Patterns by the name of their role."""

ROLES = (*PATTERNS, "sink", "positional", "symbolic", "uniform", "mixed")
"""Names of all roles, the most specific first."""

_SOUGHT = ("induction", "duplicate token", "retrieval")
"""Roles whose attention is of the queries that see such a token."""

_SCORES = {"positional": "s_pos_no_sink", "symbolic": "s_sym_no_sink", "sink": "sink_mass"}
"""The metric that a label is shown with."""

ROLE_METRICS = {**{role: pattern.metric for role, pattern in PATTERNS.items()}, **_SCORES}
"""The metric of each role that has one."""

_DECIDES = {
    "positional": "position decides, content hardly matters",
    "symbolic": "content decides, position hardly matters",
    "uniform": "attention is even, whatever the position and the content",
    "mixed": "position and content both matter",
}


@dataclass(frozen=True)
class HeadRole:
    """A role of a head.

    Attributes:
        layer: The layer.
        head: The head.
        role: One of :data:`ROLES`.
        value: Share of attention of a pattern or a sink, the score of a positional or symbolic head; mean over
            documents. None for the other labels.
        chance: The same share of uniform attention; None for scores.
        documents: Number of documents.
        documents_with: Documents that show the role on their own.
        distance: Tokens back of a fixed distance, 0 for the token itself; None for other roles.
    """

    layer: int
    head: int
    role: str
    value: float | None
    chance: float | None
    documents: int
    documents_with: int
    distance: int | None = None

    @property
    def name(self) -> str:
        """The head as ``L17H3``."""
        return f"L{self.layer}H{self.head}"

    @property
    def excess(self) -> float:
        """Attention beyond chance; 0 for roles without a chance level."""
        return 0.0 if self.value is None or self.chance is None else self.value - self.chance

    def words(self, sink_tokens: int = 1) -> str:
        """Return what the head attends to, in words with its numbers; for scores the number of documents alone."""
        several = f"{self.documents_with} of " if self.documents > 1 else ""
        count = f"in {several}{count_documents(self.documents)}"
        if self.value is None or self.chance is None:
            return count
        if self.role == "sink":
            place = "on the first token" if sink_tokens == 1 else f"on the first {sink_tokens} tokens"
        elif self.distance == 0:
            place = "on the token itself"
        else:
            place = PATTERNS[self.role].place.format(distance=self.distance)
        where = ", where there is one" if self.role in _SOUGHT else ""
        share, chance = (f"{x:.0%}".replace("%", "\u00a0%") for x in (self.value, self.chance))
        return f"{share} of its attention {place}{where} (chance {chance}), {count}"


Place = tuple[int, int]
"""Layer and head."""


def find_roles(run: StoredRun) -> dict[Place, list[HeadRole]]:
    """Return the roles of every head of a run of ``heads``, in the order of :data:`ROLES`; of some heads none."""
    roles: dict[Place, list[HeadRole]] = {place: [] for place in run.head_documents("s_pos")}
    for role in (*_labelled(run), *_patterned(run)):
        roles.setdefault((role.layer, role.head), []).append(role)
    for listed in roles.values():
        listed.sort(key=lambda role: ROLES.index(role.role))
    return dict(sorted(roles.items()))


def _labelled(run: StoredRun) -> Iterator[HeadRole]:
    """Yield the roles that follow from labels over all documents together."""
    single = run.head_documents("label_no_sink")
    shown = {label: head_means(run, metric) for label, metric in _SCORES.items()}
    uniform = _chance(run, "sink_mass")
    for place, code in head_labels(run).items():
        label, codes = LABELS[code], single.get(place, {})
        chances = [uniform[place[0]][name] for name in codes if name in uniform.get(place[0], {})]
        yield HeadRole(
            *place,
            label,
            shown[label].get(place) if label in shown else None,
            sum(chances) / len(chances) if label == "sink" and chances else None,
            len(run.documents),
            sum(value == code for value in codes.values()),
        )


def _patterned(run: StoredRun) -> Iterator[HeadRole]:
    """Yield the roles that are patterns."""
    distances = run.head_documents("slash_lag")
    for name, pattern in PATTERNS.items():
        chance = _chance(run, pattern.metric)
        for place, values in run.head_documents(pattern.metric).items():
            uniform = chance.get(place[0], {})
            beyond = {document: value - uniform[document] for document, value in values.items() if document in uniform}
            having = [document for document, excess in beyond.items() if excess >= pattern.least]
            distance = None
            if name == "fixed distance":
                at = Counter(int(distances[place][document]) for document in having)
                # The previous token is a role of its own; other distances must agree between documents.
                distance = next((lag for lag, _ in at.most_common(1) if lag != 1), None)
                having = [document for document in having if int(distances[place][document]) == distance]
            if not having or len(having) < MOST_DOCUMENTS * len(beyond):
                continue
            mean = sum(values[document] for document in beyond) / len(beyond)
            even = sum(uniform[document] for document in beyond) / len(beyond)
            yield HeadRole(*place, name, mean, even, len(beyond), len(having), distance)


def _chance(run: StoredRun, metric: str) -> dict[int, dict[str, float]]:
    """Return a metric of uniform attention by layer and document."""
    name = f"{metric}_uniform"
    if name not in run.numbers:
        return {}
    numbers = run.numbers[name].of_documents.defined
    numbers = numbers.where(numbers.head == MODEL)
    chance: dict[int, dict[str, float]] = {}
    for document, layer, value in zip(numbers.document, numbers.layer, numbers.value, strict=True):
        chance.setdefault(int(layer), {})[str(numbers.documents[document])] = float(value)
    return chance


def telling_heads(roles: dict[Place, list[HeadRole]], count: int = 10) -> list[HeadRole]:
    """Return the heads that show their roles most clearly: the clearest of each role, then the second of each, ….

    Each head is named once, with the role in which it comes first.
    """
    ranked = {
        role: sorted(
            (item for listed in roles.values() for item in listed if item.role == role),
            key=lambda item: (-item.excess, -(item.value or 0.0), item.layer, item.head),
        )
        for role in ROLES
        if role not in ("uniform", "mixed")
    }
    # Patterns say more than scores: these follow where there are too few of them.
    patterns = {role: listed for role, listed in ranked.items() if role not in _DECIDES}
    scores = {role: listed for role, listed in ranked.items() if role in _DECIDES}
    chosen: dict[Place, HeadRole] = {}
    for group in (patterns, scores):
        for position in range(max(map(len, group.values()), default=0)):
            for listed in group.values():
                if position < len(listed) and len(chosen) < count:
                    chosen.setdefault((listed[position].layer, listed[position].head), listed[position])
    return list(chosen.values())


def score_label(s_pos: float, s_sym: float, gamma: float) -> str:
    """Return the label of two scores, as :func:`~wherewhat.measures.swaps.scores.label` does for tensors."""
    high = s_pos >= 1 - gamma, s_sym >= 1 - gamma
    if all(high):
        return "uniform"
    if high[0] and s_sym <= gamma:
        return "positional"
    return "symbolic" if high[1] and s_pos <= gamma else "mixed"


def role_table(runs: Mapping[str, StoredRun]) -> pa.Table:
    """Return one row per role of a head, of a model and its control models by weights."""
    import pyarrow as pa

    texts, counts = pa.string(), pa.int32()
    kinds = {"role": texts, "value": pa.float64(), "chance": pa.float64()}
    schema = pa.schema([(item.name, kinds.get(item.name, counts)) for item in dataclasses.fields(HeadRole)])
    tables = []
    for run in runs.values():
        rows = [dataclasses.asdict(role) for listed in find_roles(run).values() for role in listed]
        tables.append(pa.Table.from_pylist(rows, schema=schema))
    return joined_tables(runs, tables, keep_empty=True)


def find_removal(run: StoredRun) -> StoredRun | None:
    """Return a finished run of ``removal`` on the same model and texts, or some of them, in the folder of a run.

    Of several it is the one on the most documents, then the newest.
    """
    config, folder = run.directory.config, run.directory.path.parent
    same = {name: config.get(name) for name in ("weights", "weights_hash", "tokenizer_hash")}
    texts = {str(document) for document in cast("list[object]", config["documents"])}
    paths: list[tuple[int, Path]] = []
    for path, other in KnownRuns(folder).finished() if any(folder.glob("removal-*")) else ():
        documents = [str(document) for document in cast("list[object]", other["documents"])]
        if other["measurement"] == "removal" and same.items() <= other.items() and texts.issuperset(documents):
            paths.append((len(documents), path))
    for _, path in sorted(paths, key=lambda item: -item[0]):
        with suppress(StoreError):  # a damaged one is passed over
            return StoredRun(RunDirectory.load(path))
    return None


def removal_words(rise: Interval, noise: Interval | None = None) -> str:
    """Return what the removal of a head does to the loss, in words, and noise of the same size with the same sign."""
    clear = rise.low is None or rise.high is None or rise.low > 0 or rise.high < 0
    if not clear:
        words = f"removing it changes the loss by {in_words(rise)} nats"
    elif rise.mean >= 0:
        words = f"removing it costs {in_words(rise)} nats"
    else:
        words = f"removing it lowers the loss by {in_words(negative(rise))} nats"
        noise = None if noise is None else negative(noise)
    words += " in one document" if rise.n == 1 else ""
    return words if noise is None else f"{words} (noise of the same size {in_brief(noise)})"


def _removal_clauses(run: StoredRun | None) -> dict[Place, str]:
    """Return what the removal of each head does to the loss, by a run of ``removal``."""
    if run is None:
        return {}
    noise = run.head_documents("noise_loss")
    return {
        place: removal_words(interval([*rise.values()]), interval([*noise[place].values()]) if place in noise else None)
        for place, rise in run.head_documents("removal_loss").items()
    }


def portraits(run: StoredRun, removal: StoredRun | None = None) -> dict[Place, str]:
    """Return one sentence about every head: what it attends to, whether position or content decides, and its effect.

    Args:
        run: A run of ``heads``.
        removal: A run of ``removal`` on the same model and texts; by default that of :func:`find_removal`, if any.
    """
    removed = _removal_clauses(removal or find_removal(run))
    scores = [head_means(run, metric) for metric in ("s_pos_no_sink", "s_sym_no_sink")]
    sentences = {}
    for place, roles in find_roles(run).items():
        patterns = [role for role in roles if role.chance is not None]
        clauses = [role.words(run.config.sink_tokens) for role in patterns]
        known = [by_head[place] for by_head in scores if place in by_head]
        if len(known) == len(scores):
            label = score_label(known[0], known[1], run.config.gamma)
            after = "after the sink " if any(role.role == "sink" for role in roles) else ""
            clauses.append(f"{after}{_DECIDES[label]} (scores {known[0]:.2f} and {known[1]:.2f})")
        if place in removed:
            clauses.append(removed[place])
        names = " and ".join(role.role for role in patterns or roles) or "no role"
        sentences[place] = f"{names[0].upper()}{names[1:]}: {'; '.join(clauses)}."
    return sentences
