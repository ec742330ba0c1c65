"""What is measured of a trained model: longer texts, disturbed texts, and logits made additive."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.encodings.lengths import loss_by_position
from wherewhat.encodings.recipe import AfterConfig
from wherewhat.encodings.text import Corpus, spanned
from wherewhat.measure.base import DocumentScores, Subject
from wherewhat.measure.perturb import PERTURB
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.residual import RESIDUAL, ResidualConfig
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.steps import products
from wherewhat.multihop.subject import LabSubject
from wherewhat.store.profiles import Profile


def measure_after(model: LabModel, corpus: Corpus, config: AfterConfig, *, context: int) -> dict[str, Profile]:
    """Curves of a trained model, one row per document, all in full float32.

    Returns:
        ``position`` and ``loss_by_position_<method>`` of :func:`~wherewhat.encodings.lengths.loss_by_position`;
        ``loss_by_rate_<kind>`` ``(documents, rates, columns)`` with rate, loss, loss on untouched targets, its rise and
        share of moved bytes; ``loss_by_strength`` ``(documents, strengths, 2)`` with λ and loss; ``cost_without_a`` and
        ``cost_without_c`` ``(documents,)``.

    Raises:
        TextError: If too little text is held out.
        MeasureError: If a replacement is not faithful.
    """
    with torch.no_grad(), products("highest"):
        long = corpus.windows(config.length_documents, config.times * context, seed=config.seed)
        found = loss_by_position(model, long, context=context, methods=config.methods)
        subject = LabSubject(model, trained_length=context)
        found |= _perturbed(subject, corpus, config, context)
        found |= _residual(subject, corpus, config, context)
    return found


def _perturbed(subject: Subject, corpus: Corpus, config: AfterConfig, context: int) -> dict[str, Profile]:
    options = PerturbConfig(
        kinds=config.kinds, rates=config.rates, seeds=config.draws, axes=False, equivalence=False, seed=config.seed
    )
    # Jitter moves the last bytes on, and learned positions end with the context.
    length = context - options.reach
    windows = corpus.windows(config.perturb_documents, length, seed=config.seed)
    assert PERTURB.measure is not None
    measured = [PERTURB.measure(subject, spanned(ids), options) for ids in windows]
    return _curves(measured, ("rate", "rate, loss, untouched, rise of untouched, moved"))


def _residual(subject: Subject, corpus: Corpus, config: AfterConfig, context: int) -> dict[str, Profile]:
    options = ResidualConfig(strengths=config.strengths, layers=False)
    assert RESIDUAL.measure is not None
    windows = corpus.windows(config.residual_documents, context, seed=config.seed)
    measured = [RESIDUAL.measure(subject, ids[None], options) for ids in windows]
    costs = {
        name: Profile(_stacked([torch.tensor(document.whole[name]) for document in measured]), ("document",))
        for name in ("cost_without_a", "cost_without_c")
    }
    return _curves(measured, ("strength", "strength, loss")) | costs


def _curves(measured: list[DocumentScores], axes: tuple[str, ...]) -> dict[str, Profile]:
    """Curves of all documents together, by name."""
    return {
        name: Profile(_stacked([document.curves[name].values for document in measured]), ("document", *axes))
        for name in measured[0].curves
    }


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).float()
