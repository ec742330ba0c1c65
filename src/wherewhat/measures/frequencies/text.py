"""Frequencies that heads use, scores of single planes, and the model with planes or dimensions changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.batches import edited_rows, read_at_once, rows_at_once
from wherewhat.measures.extend.retrieval import (
    Encode,
    Planting,
    RememberedFacts,
    copy_attention,
    plant,
    remembered_facts,
)
from wherewhat.measures.frequencies import FrequenciesConfig
from wherewhat.measures.frequencies.masking import (
    FAITHFUL,
    MASSIVE,
    FixedDimensions,
    Masking,
    PlaneVariant,
    frequency_bands,
    output_of,
    relative_norms,
)
from wherewhat.measures.frequencies.planes import (
    frequency_ids,
    layer_frequencies,
    peak_band,
    plane_norms,
    predicted_band,
    slower_planes,
)
from wherewhat.measures.frequencies.retrieval import planted_numbers, retrieval_scores
from wherewhat.measures.measurement import KEYS_MIX, Subject
from wherewhat.measures.swaps import SCORES
from wherewhat.measures.swaps.layer import Swaps, layer_swaps
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.tensors import (
    check_faithful,
    correlation,
    defined,
    per_query_head,
    rotates,
    scores_by_text,
    text_losses,
)
from wherewhat.measures.variants import DEPTHS, LEAST_GAIN, RUN
from wherewhat.numerics import constant_tensor
from wherewhat.scores import Column, Scores, on_cpu


def measure_frequencies(
    subject: Subject, ids: Tensor, config: FrequenciesConfig, *, encode: Encode | None = None, prefix: int = 0
) -> Scores:
    """Return the scores of one text ``(1, n)``; see :func:`measure_all_frequencies`."""
    return measure_all_frequencies(subject, ids, config, encode=encode, prefix=prefix)[0]


def measure_all_frequencies(
    subject: Subject, ids: Tensor, config: FrequenciesConfig, *, encode: Encode | None = None, prefix: int = 0
) -> list[Scores]:
    """Return frequencies of every layer that rotates, and the loss with planes masked or un-rotated, of each text.

    The tokenizer is for the remembered facts of ``config.massive``, which are left out without it; ``prefix`` is the
    number of leading tokens of ``ids`` ``(texts, n)`` that are not text, such as BOS.
    """
    queries = choose_queries(ids.shape[-1], count=config.queries)
    mixing = subject.key_mixing()
    by_text: list[list[Scores]] = [[] for _ in ids]
    bands: dict[int, Tensor] = {}
    slow: dict[int, Tensor] = {}
    fast: dict[int, Tensor] = {}
    massive: dict[int, list[FixedDimensions]] = {}
    dtypes: set[torch.dtype] = set()
    planted = config.massive or config.retrieval
    plantings = [plant(text[None], DEPTHS, run=RUN) for text in ids] if planted else []
    trained = subject.trained_length() if config.unrotate else 0

    def scored(attention: LayerAttention) -> bool:
        return mixing.get(attention.layer, 0.0) <= KEYS_MIX

    def measure(attention: LayerAttention) -> None:
        if not rotates(attention):
            return
        assert attention.rotation is not None
        layer, inv_freq = attention.layer, attention.rotation.inv_freq
        bands[layer] = frequency_bands(inv_freq, config.bands)
        dtypes.add(attention.rot_q.dtype)
        merged = layer_frequencies(
            attention.merged, queries, tau=config.tau, sink_tokens=config.sink_tokens, scored=scored(attention)
        )
        of_texts = scores_by_text(attention, heads=merged.heads, whole=merged.whole, curves=merged.curves)
        for index, (layers, scores) in enumerate(zip(by_text, of_texts, strict=True)):
            text = attention.text(index)
            if config.unrotate:
                scores = _with_band_index(scores, text, trained)
                slow[layer] = slower_planes(inv_freq, scores.whole["band_predicted"])
                fast[layer] = frequency_ids(inv_freq) <= int(slow[layer].sum())
            if config.massive:
                massive.setdefault(layer, []).append(FixedDimensions.massive(text))
                scores = _with_massive(scores, text)
            layers.append(scores)

    needs_loss = config.masking or config.unrotate or planted
    logits = subject.run(ids, measure, logits=needs_loss)
    if not by_text[0]:
        raise MeasureError(
            "no layer of this model rotates its queries and keys: without rotation there are no frequencies; measure "
            "its heads or axes"
        )
    copies = _copy_attention(subject, plantings) if config.retrieval else {}
    by_text = [
        list(scores.layers)
        for scores in on_cpu(
            [
                Scores(layers=[_with_copies(layer, copies, text) for layer in layers])
                for text, layers in enumerate(by_text)
            ]
        )
    ]
    masked = _masked_heads(by_text[0], config.heads)
    wholes = [_correlations(layers) | _band_scores(layers, bands) for layers in by_text]
    if needs_loss:
        assert logits is not None
        losses = text_losses(logits, ids).mean(-1).tolist()
        most = rows_at_once(logits)
        sample = logits[:1, :1].clone()
        del logits
        for whole, loss in zip(wholes, losses, strict=True):
            whole["loss"] = loss
        masking = Masking(subject, ids, masked, config.block_mib, most)
        by_band = [{layer: x[band] for layer, x in bands.items()} for band in range(config.bands)]
        variants = _masked_bands(masking, by_band) if config.masking else []
        variants += _unrotated(masking, by_band, slow, fast) if config.unrotate else []

        def swaps(attention: LayerAttention) -> Swaps | None:
            if not scored(attention):
                return None
            return layer_swaps(attention, queries, tau=config.tau, sink_tokens=config.sink_tokens, from_logits=False)

        after = _MaskedScores(masked, swaps)
        of_variants = masking.losses(variants, after.add) if variants else {}
        for name, what in _UNCHANGED.items():
            for loss, other in zip(losses, of_variants.pop(name, ()), strict=False):
                check_faithful(what, float(other), loss, dtypes=dtypes, precision=FAITHFUL)
        for text, whole in enumerate(wholes):
            whole |= {name: float(x[text]) for name, x in of_variants.items()}
        if config.masking:
            after.compare(wholes, by_text, config.bands)
        if config.massive:
            facts = [None if encode is None else remembered_facts(text[None], encode, prefix=prefix) for text in ids]
            replaced = _MassiveRuns(
                masking, massive, plantings, facts, lambda tokens: rows_at_once(sample, tokens=tokens)
            )
            for whole, own in zip(wholes, replaced.scores(losses, dtypes), strict=True):
                whole |= own
        if config.retrieval:
            read = {
                layer.layer: torch.stack([x[index].heads["copy_attention"] for x in by_text])
                for index, layer in enumerate(by_text[0])
            }
            found = retrieval_scores(masking, plantings, read, by_band[-1], losses, dtypes)
            for whole, own in zip(wholes, found, strict=True):
                whole |= own
    return [
        Scores(layers=sorted(layers, key=lambda layer: layer.layer), whole=defined(whole))
        for layers, whole in zip(by_text, wholes, strict=True)
    ]


_UNCHANGED = {"unmasked": "masking", "rotated": "un-rotation"}
"""Variants in which no plane is changed, whose loss must be that of the model."""


def _masked_heads(layers: Sequence[Scores], chosen: Sequence[str]) -> dict[int, Tensor]:
    """Return the heads to mask by layer, ``(heads,)`` bool each."""
    sizes = {layer.layer: len(layer.heads["mean_frequency"]) for layer in layers}
    if not chosen:
        return {layer: torch.ones(size, dtype=torch.bool) for layer, size in sizes.items()}
    masked: dict[int, Tensor] = {}
    for text in chosen:
        layer, head = map(int, text.split("."))
        if layer not in sizes:
            rotating = ", ".join(map(str, sorted(sizes)))
            raise MeasureError(f"heads holds {text}, but layer {layer} is not one that rotates: choose from {rotating}")
        if head >= sizes[layer]:
            raise MeasureError(f"heads holds {text}, but layer {layer} has heads 0 to {sizes[layer] - 1}")
        masked.setdefault(layer, torch.zeros(sizes[layer], dtype=torch.bool))[head] = True
    return masked


def _correlations(layers: Sequence[Scores]) -> dict[str, float]:
    """Return correlations over heads of the two mean frequencies with the swap scores."""
    means = {"frequency_softmax": "mean_frequency_softmax", "frequency": "mean_frequency"}
    joined = {name: torch.cat([x.heads[name] for x in layers]) for name in (*means.values(), *SCORES)}
    return {
        f"{name}_{score}": correlation(joined[used], joined[score]) for name, used in means.items() for score in SCORES
    }


def _band_scores(layers: Sequence[Scores], bands: Mapping[int, Tensor]) -> dict[str, float]:
    """Return the scores of single planes, averaged over heads and the planes of each band."""
    members = torch.cat([bands[x.layer] for x in layers], 1).double()  # (bands, planes of all layers)
    found: dict[str, float] = {}
    for name in SCORES:
        values = [x.curves[f"plane_{name}"].values.double() for x in layers]
        sums, known = torch.cat([x.nansum(0) for x in values]), torch.cat([(~x.isnan()).sum(0) for x in values])
        means = (members @ sums / (members @ known.double())).tolist()  # NaN for none
        found |= {f"{name}_band_{band}": mean for band, mean in enumerate(means, 1)}
    return found


def _masked_bands(masking: Masking, bands: Sequence[Mapping[int, Tensor]]) -> list[PlaneVariant]:
    """Return the model without each band and with only it, with random planes, and with nothing masked."""
    drawn = masking.random(bands[0])
    return [
        PlaneVariant("unmasked", {}),
        PlaneVariant("loss_without_random", drawn),
        PlaneVariant("loss_only_random", _others(drawn)),
        *(PlaneVariant(f"loss_only_band_{band}", _others(planes)) for band, planes in enumerate(bands, 1)),
        *(PlaneVariant(f"loss_without_band_{band}", planes, scored=True) for band, planes in enumerate(bands, 1)),
    ]


class _MaskedScores:
    """Collects swap scores of masked heads, by variant and text.

    Args:
        heads: Heads that are masked, by layer.
        score: Returns the swap scores of a layer with one text; None if it has none.
    """

    def __init__(self, heads: Mapping[int, Tensor], score: Callable[[LayerAttention], Swaps | None]) -> None:
        self._heads, self._score = heads, score
        self._means: dict[tuple[str, int], list[Tensor]] = {}  # by layer, (scores, masked heads)

    def add(self, attention: LayerAttention, rows: Sequence[tuple[str, int]]) -> None:
        """Add a masked layer whose texts are rows: a variant and a text each."""
        swaps = self._score(attention.merged)
        if swaps is None:
            return
        chosen = tuple(self._heads[attention.layer].nonzero()[:, 0].tolist())
        scores = torch.stack([getattr(swaps, name) for name in SCORES])
        means = torch.unflatten(scores.nanmean(-1), 1, (len(rows), -1))[..., constant_tensor(chosen, scores.device)]
        for row, own in zip(rows, means.unbind(1), strict=True):
            self._means.setdefault(row, []).append(own)

    def compare(self, wholes: Sequence[dict[str, float]], by_text: Sequence[Sequence[Scores]], bands: int) -> None:
        """Add the changes of the masked heads' mean scores without each band to the scores of each text."""
        heads, nothing = self._heads, torch.full((len(SCORES),), torch.nan)
        rows = [(text, band) for text in range(len(wholes)) for band in range(1, bands + 1)]
        means = [self._means.get((f"loss_without_band_{band}", text)) for text, band in rows]
        read = read_at_once([torch.cat(x, 1).mean(1) if x else nothing for x in means])
        after = dict(zip(rows, (x.tolist() for x in read), strict=True))
        for text, (whole, layers) in enumerate(zip(wholes, by_text, strict=True)):
            for index, name in enumerate(SCORES):
                before = torch.cat([x.heads[name][heads[x.layer]] for x in layers if x.layer in heads]).nanmean()
                for band in range(1, bands + 1):
                    whole[f"{name}_change_without_band_{band}"] = after[text, band][index] - float(before)


def _others(planes: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {layer: ~x for layer, x in planes.items()}


def _with_band_index(layer: Scores, attention: LayerAttention, trained: int) -> Scores:
    """Return a layer's scores with the predicted and the measured index of the plane with the largest norm."""
    assert attention.rotation is not None
    window = attention.declared_window or attention.mask.window
    norms = plane_norms(attention)
    predicted = predicted_band(attention.rotation.inv_freq, min(trained, window or trained))
    return replace(
        layer,
        heads={**layer.heads, "band_measured": norms.argmax(-1).double()},
        whole={**layer.whole, "band_predicted": predicted, "band_peak": float(peak_band(norms))},
        curves={**layer.curves, "plane_norm": Column(norms.float(), ("head", "plane"))},
    )


def _unrotated(
    masking: Masking, bands: Sequence[Mapping[int, Tensor]], slow: Mapping[int, Tensor], fast: Mapping[int, Tensor]
) -> list[PlaneVariant]:
    """Return the model with bands un-rotated, with all planes, and with those slower than the predicted band."""
    drawn, everything = masking.random(slow), {layer: torch.ones_like(x) for layer, x in slow.items()}
    unrotated = {
        "rotated": {},
        **{f"loss_unrotated_band_{band}": planes for band, planes in enumerate(bands, 1)},
        "loss_unrotated_random": masking.random(bands[0]),
        "loss_unrotated_all": everything,
        "loss_unrotated_slow": slow,
        "loss_unrotated_slow_random": drawn,
        "loss_unrotated_fast": fast,
    }
    return [
        *(PlaneVariant(name, planes, "unrotate") for name, planes in unrotated.items()),
        PlaneVariant("loss_without_slow", slow),
        PlaneVariant("loss_without_slow_random", drawn),
    ]


def _copy_attention(subject: Subject, plantings: Sequence[Planting]) -> dict[int, Tensor]:
    """Return the attention of each head that reads planted sequences, ``(texts, heads)`` by layer."""
    found: dict[int, Tensor] = {}

    def measure(attention: LayerAttention) -> None:
        if rotates(attention):
            found[attention.layer] = copy_attention(plantings[0], attention).mean((-1, -2))

    subject.run(torch.cat([planting.planted for planting in plantings]), measure)
    return found


def _with_copies(layer: Scores, copies: Mapping[int, Tensor], text: int) -> Scores:
    """Return a layer's scores with the attention of its heads that reads planted sequences, if it was measured."""
    own = copies.get(layer.layer)
    return layer if own is None else replace(layer, heads={**layer.heads, "copy_attention": own[text]})


def _with_massive(layer: Scores, attention: LayerAttention) -> Scores:
    """Return a layer's scores with the largest relative norms of its dimensions, and where massive ones are."""
    assert attention.rotation is not None
    q, k, v = (relative_norms(x[0]).cpu() for x in (attention.rot_q, attention.rot_k, attention.value))
    largest = {
        "massive_q": q.amax(-1),
        "massive_k": per_query_head(k.amax(-1), attention),
        "massive_v": v.amax(-1).repeat_interleave(attention.heads // len(v)),
    }
    fast = attention.rotation.pairs[frequency_ids(attention.rotation.inv_freq) <= attention.rotation.planes / 2]
    slow = torch.ones(q.shape[-1], dtype=torch.bool)
    slow[fast.flatten()] = False
    massive = torch.cat([q, k]) > MASSIVE
    places = {
        "massive_heads": float(((largest["massive_q"] > MASSIVE) | (largest["massive_k"] > MASSIVE)).double().mean()),
        "massive_heads_v": float((largest["massive_v"] > MASSIVE).double().mean()),
        "massive_slow": float((massive & slow).sum().double() / massive.sum()),  # NaN without massive dimensions
        "massive_slow_even": float(slow.double().mean()),
    }
    return replace(layer, heads={**layer.heads, **largest}, whole={**layer.whole, **defined(places)})


@dataclass(frozen=True)
class _MassiveRuns:
    """Runs of a model on texts with massive dimensions replaced by their means, or random ones.

    Attributes:
        masking: The model and the texts.
        massive: Massive dimensions of each text by layer.
        plantings: The texts with planted sequences.
        facts: Questions of general knowledge for each text; None for none.
        most: Largest number of rows of a pass, by their tokens.
    """

    masking: Masking
    massive: Mapping[int, Sequence[FixedDimensions]]
    plantings: Sequence[Planting]
    facts: Sequence[RememberedFacts | None]
    most: Callable[[int], int]

    def scores(self, losses: Sequence[float], dtypes: Collection[torch.dtype]) -> list[dict[str, float]]:
        """Return loss and lost shares of two gains of each text, whose intact losses are given.

        ``later`` are those with massive dimensions replaced at all tokens but the first, which is often an attention
        sink.
        """
        random: dict[int, list[FixedDimensions]] = {layer: [] for layer in self.massive}
        for text in range(len(self.plantings)):
            generator = torch.Generator().manual_seed(0)
            for layer, fixed in self.massive.items():
                random[layer].append(fixed[text].random(generator))
        none = {layer: [x.none() for x in fixed] for layer, fixed in self.massive.items()}
        changes = {
            "": _Replacement(none),
            "massive": _Replacement(self.massive),
            "massive_random": _Replacement(random),
            "massive_later": _Replacement(self.massive, first=1),
        }
        planted, known = self._planted(changes), self._facts(changes)
        scores = []
        for text, loss in enumerate(losses):
            unchanged, gain = planted["", text]
            check_faithful("the replacement of dimensions", unchanged, loss, dtypes=dtypes, precision=FAITHFUL)
            whole = {"planted": gain, "facts": known["", text]}
            for ending in list(changes)[1:]:
                whole[f"loss_{ending}"], still_planted = planted[ending, text]
                pairs = (("planted", gain, still_planted), ("facts", known["", text], known[ending, text]))
                for name, before, after in pairs:
                    whole[f"{name}_lost_{ending}"] = 1 - after / before if before > LEAST_GAIN else torch.nan
            scores.append(whole)
        return scores

    def _planted(self, changes: Mapping[str, _Replacement]) -> dict[tuple[str, int], tuple[float, float]]:
        """Return the loss and the gain from planted sequences, by change and text."""
        count = len(self.plantings)
        rows = [(ending, text) for ending in changes for _ in range(2) for text in range(count)]
        both = [planting.control for planting in self.plantings] + [planting.planted for planting in self.plantings]
        ids = torch.cat(both * len(changes))

        def read(logits: Tensor, chunk: slice) -> list[Tensor]:
            return [
                planted_numbers(self.plantings[text], row) for row, (_, text) in zip(logits, rows[chunk], strict=True)
            ]

        numbers = self._run(ids, [(changes[ending], text) for ending, text in rows], read)
        outcomes = {}
        for index, ending in enumerate(changes):
            own = numbers[2 * count * index :]
            for text in range(count):
                (loss, before), (_, after) = own[text].tolist(), own[count + text].tolist()
                outcomes[ending, text] = (loss, after - before)
        return outcomes

    def _facts(self, changes: Mapping[str, _Replacement]) -> dict[tuple[str, int], float]:
        """Return the gain from remembered facts, by change and text; NaN without questions."""
        gains = {(ending, text): torch.nan for ending in changes for text in range(len(self.facts))}
        for text, facts in enumerate(self.facts):
            if facts is None:
                continue
            count, asked = len(facts.ids), facts

            def read(logits: Tensor, chunk: slice, facts: RememberedFacts = asked) -> list[Tensor]:
                prompts = [row % len(facts.ids) for row in range(chunk.start, chunk.stop)]
                return [facts.logprobs(row, prompt) for row, prompt in zip(logits, prompts, strict=True)]

            rows = [(change, text) for change in changes.values() for _ in range(count)]
            numbers = self._run(facts.ids.repeat(len(changes), 1), rows, read)
            for index, ending in enumerate(changes):
                gains[ending, text] = facts.gain(torch.stack(numbers[count * index : count * (index + 1)]))
        return gains

    def _run(
        self,
        ids: Tensor,
        rows: Sequence[tuple[_Replacement, int]],
        read: Callable[[Tensor, slice], Sequence[Tensor]],
    ) -> list[Tensor]:
        """Return numbers of rows, each with the replacement of a text."""

        def edit(attention: LayerAttention, chunk: slice) -> Tensor | None:
            if attention.layer not in self.massive:
                return None
            fixed = FixedDimensions.stacked([change.fixed[attention.layer][text] for change, text in rows[chunk]])
            first = constant_tensor(tuple(change.first for change, _ in rows[chunk]), attention.rot_q.device)
            changed = fixed.apply_from(attention, first.view(-1, 1, 1, 1))
            return output_of(changed, block_mib=self.masking.block_mib)

        return edited_rows(self.masking.subject.edited, ids, edit, read, most=self.most(ids.shape[1]))


@dataclass(frozen=True)
class _Replacement:
    """Dimensions of each text that are replaced, by layer, at all tokens from ``first`` on."""

    fixed: Mapping[int, Sequence[FixedDimensions]]
    first: int = 0
