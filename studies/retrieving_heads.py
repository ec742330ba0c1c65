"""Do the heads that read a planted sequence change from question to question, and does a plan keep them?

    python studies/retrieving_heads.py smollm2 --documents 8 --tokens 512
    python studies/retrieving_heads.py smollm2 --plan plan.json      # also how many of them the plan keeps

Each document has four planted sequences of 16 tokens (``wherewhat extend``), and each is a question: which heads attend
to the planted copy of the token that comes next? The heads that retrieve are the tenth of planned heads with the most
of it. Their overlap is the share that two questions, or two tokens of one, have in common; chance is a tenth. Intervals
are over documents.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Collection, Sequence
from statistics import fmean

import torch
from torch import Tensor

import wherewhat
from wherewhat.caches.plan import Plan, plannable
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import prove
from wherewhat.measures.extend.retrieval import copy_attention, plant
from wherewhat.measures.frequencies.retrieval import RETRIEVAL_SHARE
from wherewhat.measures.statistics import in_words, interval
from wherewhat.measures.variants import DEPTHS, RUN
from wherewhat.runs.subject import ModelSubject


def write(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")


def top(attention: Tensor) -> Tensor:
    """Return True for the tenth of heads with the most attention, ``(heads, …)`` each."""
    count = max(1, round(RETRIEVAL_SHARE * len(attention)))
    order = attention.argsort(dim=0, descending=True, stable=True)
    return torch.zeros_like(attention, dtype=torch.bool).scatter_(0, order[:count], True)


def overlap(chosen: Sequence[Tensor]) -> float:
    """Return the mean share of heads that two of several choices have in common."""
    pairs = itertools.combinations(chosen, 2)
    return fmean(float((one & other).sum() / one.sum()) for one, other in pairs)


def read(subject: ModelSubject, layers: Collection[int], ids: Tensor) -> Tensor:
    """Return the attention of planned heads to planted copies in a text ``(1, n)``, ``(heads, questions, tokens)``."""
    planting = plant(ids, DEPTHS, run=RUN)
    found: dict[int, Tensor] = {}

    def measure(attention: LayerAttention) -> None:
        if attention.layer in layers:
            found[attention.layer] = copy_attention(planting, attention)[0].cpu()

    subject.run(planting.planted, measure)
    return torch.cat([found[layer] for layer in sorted(found)])


def main() -> None:
    """Print overlaps between tokens, questions and documents, and with a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--plan", action="append", default=[], help="file of a plan of this model")
    options = parser.parse_args()
    loaded = wherewhat.load(options.model)
    proof = prove(loaded.model)
    layers = plannable(proof)
    subject = ModelSubject(loaded, proof)
    texts = wherewhat.embedded_documents(options.documents)
    ids = [torch.tensor([loaded.tokenizer(text.text)["input_ids"][: options.tokens]]) for text in texts]
    by_document = [read(subject, layers, one) for one in ids]
    heads = len(by_document[0])
    write(f"{loaded.name}: {heads} planned heads, {options.documents} documents of {options.tokens} tokens")
    write(f"  chance: {round(RETRIEVAL_SHARE * heads) / heads:.2f}")
    tokens = [fmean(overlap(list(top(question).unbind(-1))) for question in found.unbind(1)) for found in by_document]
    questions = [overlap(list(top(found.mean(-1)).unbind(-1))) for found in by_document]
    whole = [top(found.mean((-1, -2))) for found in by_document]
    others = [fmean(overlap([own, other]) for other in whole if other is not own) for own in whole]
    write(f"  tokens of one question: {in_words(interval(tokens))}")
    write(f"  questions of one document: {in_words(interval(questions))}")
    write(f"  documents: {in_words(interval(others))}")
    for path in options.plan:
        plan = Plan.load(path)
        plan.check(loaded.model, proof)
        kept = torch.tensor([head for layer in sorted(layers) for head in plan.full_heads(layer)])
        write(f"  {path}: {kept.double().mean():.2f} of the heads see everything")
        by_question = [top(found.mean(-1)) for found in by_document]
        shares = [float((x & kept[:, None]).sum() / x.sum()) for x in by_question]
        worst = [float((x & kept[:, None]).sum(0).min() / x[:, 0].sum()) for x in by_question]
        mass = [float(found[kept].sum() / found.sum()) for found in by_document]
        write(f"    of the heads that retrieve: {in_words(interval(shares))}; of the worst question {fmean(worst):.2f}")
        write(f"    of all attention to copies: {in_words(interval(mass))}")


if __name__ == "__main__":
    main()
