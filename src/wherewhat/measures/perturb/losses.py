"""Losses and changes of heads under each kind and rate of perturbation, and position swaps against feature swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import CaptureError, MeasureError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.batches import read_at_once, rows_at_once
from wherewhat.measures.measurement import Subject, Text
from wherewhat.measures.perturb import KINDS, PerturbConfig, percent, perturbations
from wherewhat.measures.perturb.changes import (
    Change,
    adjacent_pairs,
    make_change,
    no_change,
    random_pairs,
    swapped_order,
    units,
)
from wherewhat.measures.tensors import check_faithful, correlation, defined, text_losses, token_losses
from wherewhat.numerics import constant_tensor
from wherewhat.scores import Column, Scores

_FAITHFUL = 1e-5
"""Largest relative change of the loss at rate 0."""

_SHORTEST = 8

_LEAST_CHANGE = 1e-3
"""Smallest change of a head's output that is not rounding: under a constant shift, no change is larger."""


def measure_perturb(subject: Subject, text: Text, config: PerturbConfig) -> Scores:
    """Return the scores of one text; see :func:`measure_all_perturbed`."""
    return measure_all_perturbed(subject, [text], config)[0]


def measure_all_perturbed(subject: Subject, texts: Sequence[Text], config: PerturbConfig) -> list[Scores]:
    """Return losses by kind and rate, changes of heads and axes at one rate, and the equivalence of position swaps.

    Texts have one length; all their perturbations of one length are rows of a batch.
    """
    for text in texts:
        n = text.ids.shape[1]
        if n - text.prefix < _SHORTEST:
            raise MeasureError(f"{n - text.prefix} tokens of text are too few to perturb: use {_SHORTEST} or more")
    runs = PerturbedRuns(subject, texts=len(texts))
    intact = [no_change(text.ids[0].cpu()) for text in texts]
    kinds = [config.kinds] * len(texts) if config.kinds else _possible(runs, texts, config)
    drawn = [_Draws(text, own, config) for text, own in zip(texts, kinds, strict=True)]
    # First, because the losses of the same passes are needed below.
    heads = _heads(runs, intact, drawn, config) if config.axes else [({}, {})] * len(texts)
    runs.run([*intact, *(change for draws in drawn for change in draws.values())])
    return [
        _scores(runs, draws, runs.losses(unchanged), *of_heads)
        for draws, unchanged, of_heads in zip(drawn, intact, heads, strict=True)
    ]


class _Draws(Mapping[tuple[str, float, int], Change]):
    """All perturbations of one text, by label of the kind, rate and seed.

    Each kind has a rate of 0 with the first seed, which changes nothing.

    Attributes:
        text: The text.
        kinds: The kinds.
        config: Options.
    """

    def __init__(self, text: Text, kinds: Sequence[str], config: PerturbConfig) -> None:
        self.text, self.kinds, self.config = text, kinds, config
        self._changes = {
            (label, rate, seed): make_change(text, kind, rate, seed, config, layer=layer)
            for kind, label, _, layer in perturbations(kinds, config.layers)
            for rate in sorted({0.0, *config.rates, *([config.at] if config.axes else [])})
            for seed in self.seeds(kind, rate)
        }

    def seeds(self, kind: str, rate: float) -> range:
        """Return the seeds to average over; a constant shift is not random, and a rate of 0 changes nothing."""
        config = self.config
        return range(config.seed, config.seed + (1 if kind == "position_shift" or rate == 0 else config.seeds))

    def of(self, kind: str, label: str, rate: float) -> list[Change]:
        """Return the perturbations of one kind and rate."""
        return [self[label, rate, seed] for seed in self.seeds(kind, rate)]

    def __getitem__(self, key: tuple[str, float, int]) -> Change:
        return self._changes[key]

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[tuple[str, float, int]]:
        return iter(self._changes)


def _scores(
    runs: PerturbedRuns,
    draws: _Draws,
    plain: Tensor,
    heads: Mapping[int, Mapping[str, Tensor]],
    predicted: Mapping[str, float],
) -> Scores:
    """Return the scores of one text, whose perturbations were run, from its intact losses and its heads."""
    config = draws.config
    whole: dict[str, float] = {"loss": float(plain.mean())}
    curves: dict[str, Column] = {}
    for kind, label, _, _ in perturbations(draws.kinds, config.layers):
        rises = rises_by_rate(runs, draws, plain, kind, label)
        for rate, rise in rises.items():
            whole[f"rise_{label}_at_{percent(rate)}"] = rise.rise
            whole[f"rise_{label}_at_{percent(rate)}_untouched"] = rise.rise_untouched
        rows = [[rate, x.loss, x.untouched, x.rise_untouched, x.moved] for rate, x in rises.items()]
        columns = "rate, loss, loss on untouched targets, its rise, share of tokens moved"
        curves[f"loss_by_rate_{label}"] = Column(torch.tensor(rows), ("rate", columns))
    for p in ("5", "10"):
        for end in ("", "_untouched"):
            if (name := f"rise_words_at_{p}{end}") in whole:
                whole[f"rise_at_{p}{end}"] = whole[name]
    if config.equivalence and "position_swap" in draws.kinds and "features" in draws.kinds:
        seeds = range(config.seed, config.seed + config.seeds)
        whole |= equivalence(runs, draws.text, plain, rate=config.at, seeds=seeds)
    scores = [Scores(layer=layer, heads=values) for layer, values in sorted(heads.items())]
    return Scores(layers=scores, whole=defined({**whole, **predicted}), curves=curves)


def _possible(runs: PerturbedRuns, texts: Sequence[Text], config: PerturbConfig) -> list[tuple[str, ...]]:
    """Return the kinds of perturbation that the model and each text allow."""
    allowed: list[list[str]] = [[] for _ in texts]
    for kind in KINDS:
        changes: dict[int, Change] = {}
        for index, text in enumerate(texts):
            with suppress(MeasureError):
                changes[index] = make_change(text, kind, 0.0, config.seed, config, layer=min(config.layers))
        try:
            runs.run([change for change in changes.values() if change.positions is not None])
        except (MeasureError, CaptureError):
            continue
        for index in changes:
            allowed[index].append(kind)
    return [tuple(kinds) for kinds in allowed]


def _heads(
    runs: PerturbedRuns, intact: Sequence[Change], drawn: Sequence[_Draws], config: PerturbConfig
) -> list[tuple[dict[int, dict[str, Tensor]], dict[str, float]]]:
    """Return axes and sensitivity of every head under each kind at one rate, and how well the axes predict it.

    There is one result for each text.
    """
    n = len(intact[0].ids)
    last = torch.arange(max(0, n - config.queries), n)
    asked: list[tuple[Change, Tensor]] = [(change, last) for change in intact]
    places: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
    for index, draws in enumerate(drawn):
        for kind, label, _, _ in perturbations(draws.kinds, config.layers):
            for change in draws.of(kind, label, config.at):
                rows, origin = last_unmoved(change, n, len(last))
                places.setdefault((index, label), []).append((len(asked), origin - last[0]))
                asked.append((change, rows))
    states = runs.states(asked)
    results = []
    for index, draws in enumerate(drawn):
        before = states[index]
        heads = {layer: dict(state.axes) for layer, state in before.items()}
        predicted: dict[str, float] = {}
        for _, label, _, _ in perturbations(draws.kinds, config.layers):
            for layer, state in before.items():
                changes = [
                    _head_changes(label, state, states[place][layer], origin) for place, origin in places[index, label]
                ]
                heads[layer] |= {x: torch.stack([values[x] for values in changes]).nanmean(0) for x in changes[0]}
            sensitive = torch.cat([heads[layer][f"sensitivity_{label}"] for layer in before])
            if not float(sensitive.max()) > _LEAST_CHANGE:
                continue
            for share, name in (("share_a", f"predicted_{label}"), ("share_c", f"predicted_by_key_{label}")):
                predicted[name] = correlation(sensitive, torch.cat([state.axes[share] for state in before.values()]))
        results.append((heads, predicted))
    return results


def _head_changes(label: str, before: LayerState, after: LayerState, rows: Tensor) -> dict[str, Tensor]:
    changes = {f"{name}_change_{label}": after.axes[name] - x for name, x in before.axes.items()}
    return {f"sensitivity_{label}": sensitivity(before.output[rows], after.output)} | changes


@dataclass(frozen=True)
class Rise:
    """Losses under a perturbation, in nats.

    Attributes:
        loss: Sum over all targets, per target of the intact text.
        untouched: Mean over untouched targets; NaN if there are none.
        rise: Loss minus that of the intact text.
        rise_untouched: The same over untouched targets, each compared with itself.
        moved: Share of the tokens that were moved.
    """

    loss: float
    untouched: float
    rise: float
    rise_untouched: float
    moved: float


def loss_rise(change: Change, losses: Tensor, plain: Tensor) -> Rise:
    """Compare losses ``(m - 1,)`` of a perturbed text with those of the intact one, ``(n - 1,)``.

    Two adjacent tokens that were not moved are also adjacent in the intact text, so each such target has a loss there.
    """
    kept = change.untouched
    loss, before = float(losses.sum() / len(plain)), float(plain.mean())
    after = losses[kept]
    return Rise(
        loss=loss,
        untouched=float(after.mean()),
        rise=loss - before,
        rise_untouched=float((after - plain[change.origin[1:][kept] - 1]).mean()),
        moved=float(change.moved.double().mean()),
    )


def rises_by_rate(runs: PerturbedRuns, draws: _Draws, plain: Tensor, kind: str, label: str) -> dict[float, Rise]:
    """Return the losses of one kind at every rate, averaged over seeds; those of the intact text are ``plain``."""
    (unchanged,) = draws.of(kind, label, 0.0)
    loss, expected = float(runs.losses(unchanged).mean()), float(plain.mean())
    check_faithful(f"perturbation of {kind}", loss, expected, dtypes=runs.dtypes, precision=_FAITHFUL)
    by_rate = {}
    for rate in sorted(draws.config.rates):
        rises = [loss_rise(change, runs.losses(change), plain) for change in draws.of(kind, label, rate)]
        columns = zip(*(astuple(rise) for rise in rises), strict=True)
        by_rate[rate] = Rise(*(float(torch.tensor(column).double().nanmean()) for column in columns))
    return by_rate


def perturbed_losses(
    subject: Subject,
    change: Change,
    reducer: Callable[[LayerAttention], None] = lambda _: None,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the loss of each target of a perturbed text in nats, ``(m - 1,)`` float64.

    ``targets`` ``(m,)`` are tokens to score in place of those of the text.
    """
    with subject.reordered(change.orders) if change.orders else nullcontext():
        logits = subject.run(change.ids[None], reducer, logits=True, positions=change.positions)
    assert logits is not None
    return token_losses(logits, (change.ids if targets is None else targets)[None])


@dataclass(frozen=True)
class LayerState:
    """Fit and output of one layer in one pass.

    Attributes:
        axes: Correlation ``r`` of logits with the three axes, and decrease of R² without one, ``share_a`` to
            ``share_c``, ``(heads,)`` each.
        output: Attention output of some tokens, ``(rows, heads, d_v)``.
    """

    axes: dict[str, Tensor]
    output: Tensor


class PerturbedRuns:
    """Runs a model on perturbed texts, and keeps the losses: the same text, positions and orders are run once.

    Kinds have perturbations in common: at rate 0, where a rate is too low for a swap, and where positions and features
    are compared. Perturbed texts of one length are rows of a batch.

    Args:
        subject: The model.
        texts: Number of texts that are measured together, which the first pass may hold.

    Attributes:
        layers: Indices of the layers that were run.
        dtypes: Dtypes of their queries.
    """

    def __init__(self, subject: Subject, *, texts: int = 1) -> None:
        self.subject = subject
        self._most: Callable[[int], int] = lambda _: texts
        self.layers: set[int] = set()
        self.dtypes: set[torch.dtype] = set()
        self._known: dict[_Key, Tensor] = {}

    def losses(self, change: Change) -> Tensor:
        """Return the loss of each target of a perturbed text in nats, ``(m - 1,)`` float64."""
        self.run([change])
        return self._known[_key(change)]

    def run(self, changes: Iterable[Change]) -> None:
        """Run perturbed texts whose losses are not known yet."""
        unknown = {key: change for change in changes if (key := _key(change)) not in self._known}
        self._run([*unknown.values()], lambda attention, _: self._seen(attention))

    def states(self, asked: Sequence[tuple[Change, Tensor]]) -> list[dict[int, LayerState]]:
        """Return fits of all layers on perturbed texts, with the attention output of tokens ``(rows,)`` of each."""
        fits: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        most = max(len(rows) for _, rows in asked)
        # Filled up to one number of tokens, so that those of all texts are read at once.
        tokens = torch.stack([torch.cat([rows, rows.new_zeros(most - len(rows))]) for _, rows in asked])
        at: dict[torch.device, Tensor] = {}

        def measure(attention: LayerAttention, texts: Sequence[int]) -> None:
            self._seen(attention)
            device = attention.output.device
            if device not in at:
                at[device] = tokens.to(device)
            # Axes are of the order in the text, whatever the positions.
            plain = attention if attention.positions.ndim == 1 else replace(attention, positions=attention.positions[0])
            fit = fit_layer(plain.merged)
            axes = torch.stack([fit.r, *(fit.unique[axis] for axis in "abc")]).double()
            by_text = torch.unflatten(axes, 1, (attention.texts, -1))
            own = at[device].index_select(0, constant_tensor(tuple(texts), device))
            chosen = attention.output.detach().take_along_dim(own[:, :, None, None], 1).float()
            for row, text in enumerate(texts):
                fits[text, attention.layer], outputs[text, attention.layer] = by_text[:, row], chosen[row]

        self._run([change for change, _ in asked], measure)
        axes = dict(zip(fits, read_at_once([*fits.values()]), strict=True))
        read = dict(zip(outputs, read_at_once([*outputs.values()]), strict=True))
        states: list[dict[int, LayerState]] = [{} for _ in asked]
        for (text, layer), values in axes.items():
            named = dict(zip(("r", "share_a", "share_b", "share_c"), values, strict=True))
            output = read[text, layer][: len(asked[text][1])].float()
            states[text][layer] = LayerState(named, output)
        return states

    def _run(self, changes: Sequence[Change], reducer: Callable[[LayerAttention, Sequence[int]], None]) -> None:
        """Run changes, those with the same kinds of inputs as rows of a batch, and keep their losses.

        ``reducer`` is called with each layer and the indices of the changes that are its rows.
        """
        groups: dict[tuple[int, bool, tuple[int, ...]], list[int]] = {}
        for index, change in enumerate(changes):
            key = (len(change.ids), change.positions is None, tuple(sorted(change.orders)))
            groups.setdefault(key, []).append(index)
        losses: dict[int, Tensor] = {}
        for (length, *_), members in groups.items():
            while members:
                most = self._most(length)  # known better after the first pass, which tells the size of the logits
                own, members = members[:most], members[most:]
                losses |= zip(own, self._losses([changes[index] for index in own], own, reducer), strict=True)
        for index, values in zip(losses, read_at_once([*losses.values()]), strict=True):
            self._known[_key(changes[index])] = values

    def _losses(
        self, changes: Sequence[Change], rows: Sequence[int], reducer: Callable[[LayerAttention, Sequence[int]], None]
    ) -> Tensor:
        """Return the losses ``(changes, m - 1)`` of one pass."""
        seen: dict[int, int] = {}

        def reduce(attention: LayerAttention) -> None:
            first = seen.get(attention.layer, 0)  # some models run their rows one after the other
            seen[attention.layer] = first + attention.texts
            reducer(attention, rows[first : first + attention.texts])

        ids = torch.stack([change.ids for change in changes])
        positions = [change.positions for change in changes if change.positions is not None]
        orders = {layer: torch.stack([change.orders[layer] for change in changes]) for layer in changes[0].orders}
        with self.subject.reordered(orders) if orders else nullcontext():
            # One text takes positions as other measurements give them.
            placed = None if not positions else torch.stack(positions) if len(positions) > 1 else positions[0]
            logits = self.subject.run(ids, reduce, logits=True, positions=placed)
        assert logits is not None
        sample = logits[:1, :1].clone()
        self._most = lambda tokens: rows_at_once(sample, tokens=tokens)
        return text_losses(logits, ids)

    def _seen(self, attention: LayerAttention) -> None:
        self.layers.add(attention.layer)
        self.dtypes.add(attention.rot_q.dtype)


_Key = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[tuple[int, tuple[int, ...]], ...]]
"""What the pass over a perturbed text depends on: its tokens, positions and orders."""


def _key(change: Change) -> _Key:
    positions = None if change.positions is None else tuple(change.positions.tolist())
    orders = tuple((layer, tuple(order.tolist())) for layer, order in sorted(change.orders.items()))
    return tuple(change.ids.tolist()), positions, orders


def last_unmoved(change: Change, n: int, queries: int) -> tuple[Tensor, Tensor]:
    """Return indices of the last ``queries`` of n tokens that were not moved, in the perturbed and the intact text."""
    kept = (~change.moved & (change.origin >= n - queries)).nonzero()[:, 0]
    return kept, change.origin[kept]


def sensitivity(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean over tokens of ‖after − before‖ / ‖before‖, ``(heads,)``, of outputs ``(rows, heads, d_v)``."""
    size = before.norm(dim=-1).clamp_min(1e-30)
    relative: Tensor = ((after - before).norm(dim=-1) / size).double().mean(0)
    return relative


def closed_prefixes(order: Tensor) -> Tensor:
    """Return True where an order ``(n,)`` maps all indices up to there onto themselves, ``(n,)`` bool."""
    return order.cummax(0).values == torch.arange(len(order))


def equivalence(runs: PerturbedRuns, text: Text, plain: Tensor, *, rate: float, seeds: range) -> dict[str, float]:
    """Compare swapped positions with swapped hidden states, for the same swaps of a share of the tokens.

    The intact text must have been run; its losses are ``plain`` ``(n - 1,)``.

    Returns:
        Over untouched targets, which are the same after both: ``index_minus_feature`` (mean difference of losses),
        ``index_feature_correlation`` (of the two changes of the loss, over targets); with rotary positions also the
        identities ``identity_first_layer`` and ``identity_tokens``, which are rounding errors.
    """
    first = min(runs.layers)
    gaps, correlations, tokens = [], [], []
    swaps = [same_swaps(text, random_pairs, rate, seed, first) for seed in seeds]
    runs.run([change for both in swaps for change in both])
    for index, feature in swaps:
        by_index, by_feature = (runs.losses(change) for change in (index, feature))
        kept = index.untouched
        if not bool(kept.any()):
            continue
        gaps.append(float((by_index - by_feature)[kept].mean()))
        correlations.append(correlation((by_index - plain)[kept], (by_feature - plain)[kept]))
        order = feature.orders[first]
        swapped = Change(index.ids[order], order, index.moved)
        by_tokens = perturbed_losses(runs.subject, swapped, targets=index.ids)
        tokens.append(float((by_tokens - by_feature).abs().max()))
    scores = {
        "index_minus_feature": float(torch.tensor(gaps).double().mean()),
        "index_feature_correlation": float(torch.tensor(correlations).double().nanmean()),
    }
    # If other blocks precede the first attention layer, its hidden states do not depend on single tokens.
    identity = first_layer_identity(runs.subject, text, rate, seeds[0], first) if first == 0 else None
    if identity is not None:
        scores |= {"identity_first_layer": identity, "identity_tokens": max(tokens, default=torch.nan)}
    return scores


def same_swaps(
    text: Text, draw: Callable[[int, float, int], Tensor], rate: float, seed: int, layer: int
) -> tuple[Change, Change]:
    """Return the same swaps of positions, and of the hidden states that enter a layer."""
    ids = text.ids[0].cpu()
    spans = units(text, "tokens")
    order, moved = swapped_order(len(ids), spans, draw(len(spans), rate, seed))
    places = torch.arange(len(ids))
    return Change(ids, places, moved, positions=order), Change(ids, places, moved, orders={layer: order})


def first_layer_identity(subject: Subject, text: Text, rate: float, seed: int, first: int) -> float | None:
    """Return the largest difference of the first layer's outputs after the two swaps where they are equivalent.

    Swaps of neighbours leave the most queries to compare. Relative to the largest entry; None without rotation.
    """
    outputs: list[Tensor] = []

    def keep(attention: LayerAttention) -> None:
        if attention.layer == first and attention.rotation is not None:
            outputs.append(attention.output[0].detach().float().cpu().clone())

    index, feature = same_swaps(text, adjacent_pairs, rate, seed, first)
    rows = closed_prefixes(feature.orders[first]) & ~feature.moved
    for change in (index, feature):
        perturbed_losses(subject, change, keep)
    if len(outputs) < 2 or not bool(rows.any()):
        return None
    before, other = (output[rows] for output in outputs)
    return float((before - other).abs().max() / before.abs().max().clamp_min(1e-30))
