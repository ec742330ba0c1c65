"""Length methods side by side on a real model beyond its trained length: rise of the loss, planted runs, verdicts.

    python benchmarks/lengths.py $(python tools/real_models.py stories15M) --lengths 2 4 8 16 --documents 6 --threads 1
    python benchmarks/lengths.py smollm2-folder --lengths 1.25 1.5 --documents 6 --device cuda --dtype bfloat16

The documents are the embedded novels, joined where a text must be longer than one of them. The numbers are those of
``wherewhat extend``; this needs nothing but torch and transformers. Rises at 1× are those of the trained length itself.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.errors import WherewhatError
from wherewhat.measures.extend.measurement import ExtendConfig, compare
from wherewhat.measures.extend.text import measure_lengths
from wherewhat.measures.measurement import DocumentScores
from wherewhat.models.loaded import LoadedModel
from wherewhat.models.loader import load
from wherewhat.runs.subject import ModelSubject
from wherewhat.text.files import read_documents

_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's 97.5 % points for 1 to 15 degrees of freedom."""


@dataclass(frozen=True)
class Mean:
    """A mean over documents with its 95 % interval."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.high is None else f"{self.mean:.2f} ± {self.high - self.mean:.2f}"


def main() -> int:
    """Measure, print tables; return 1 if something is wrong with the input."""
    options = _arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        loaded = load(options.model, device=options.device, dtype=options.dtype)
        subject = ModelSubject(loaded)
        trained = options.trained or subject.trained_length()
        config = ExtendConfig(trained=trained, **({"methods": tuple(options.methods)} if options.methods else {}))
        result = {}
        for multiple in options.lengths:
            started = time.perf_counter()
            texts = _texts(loaded, round(multiple * trained), options.documents)
            estimates = _estimates([_numbers(measure_lengths(subject, ids, config)) for ids in texts])  # type: ignore[misc]
            seconds = time.perf_counter() - started
            _print(f"{loaded.name}: {len(texts)} documents of {multiple:g} × {trained:,} tokens, {seconds:.0f} s")
            _tables(estimates, config)
            result[f"{multiple:g}"] = {name: vars(x) for name, x in estimates.items()}
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except WherewhatError as error:
        _print(f"error: {error}")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Length methods side by side beyond the trained length.")
    parser.add_argument("model", help="folder or name of the model")
    parser.add_argument("--lengths", type=float, nargs="+", default=[2.0, 4.0], help="multiples of the trained length")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--trained", type=int, help="trained length, where the model's own word is not to be taken")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's choice")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file, after each length")
    return parser.parse_args()


def _texts(loaded: LoadedModel, tokens: int, count: int) -> list[Tensor]:
    """Texts ``(1, tokens)``, each from one book as far as one is long enough, none of a passage that another has."""
    books: dict[str, list[str]] = {}
    for document in read_documents(None, count=None):
        books.setdefault(re.sub(r"-\d+$", "", document.name), []).append(document.text)
    found: list[Tensor] = []
    for passages in books.values():
        joined: list[str] = []
        for passage in passages:
            joined.append(passage)
            ids = loaded.encode("\n\n".join(joined), allow_beyond=True)
            if len(ids) >= tokens:
                found.append(ids[None, :tokens])
                joined = []
    if len(found) < count:
        raise WherewhatError(f"the embedded text holds {len(found)} texts of {tokens} tokens: ask for no more of them")
    # Evenly over the books, which come one after the other.
    return [found[i * len(found) // count] for i in range(count)]


def _numbers(scores: DocumentScores) -> dict[str, float]:
    """One number per metric: means over heads, as the command line has them."""
    heads: dict[str, list[Tensor]] = {}
    for layer in scores.layers:
        for name, values in layer.heads.items():
            heads.setdefault(name, []).append(values)
    means = {name: float(torch.cat(values).nanmean()) for name, values in heads.items()}
    return {name: value for name, value in (means | dict(scores.whole)).items() if math.isfinite(value)}


def _estimates(documents: list[dict[str, float]]) -> dict[str, Mean]:
    found = {}
    for name in dict.fromkeys(name for document in documents for name in document):
        values = torch.tensor([document[name] for document in documents if name in document], dtype=torch.float64)
        n, mean = len(values), float(values.mean())
        reach = None if n < 2 else (_T[n - 2] if n - 2 < len(_T) else 1.96) * float(values.std()) / math.sqrt(n)
        found[name] = Mean(mean, None, None) if reach is None else Mean(mean, mean - reach, mean + reach)
    return found


def _tables(found: dict[str, Mean], config: ExtendConfig) -> None:
    comparison = compare(dict(found), config)
    _print(f"loss in pieces {found['loss_pieces']}, found in a piece {found['found_pieces']}")
    titles = ["loss beyond", "1x", *comparison.rows[0].metrics]
    _print("| " + " | ".join([comparison.what, *titles]) + " |")
    _print("|---" * (len(titles) + 1) + "|")
    for row in comparison.rows:
        names = [f"loss_beyond_{row.name}", f"rise_inside_{row.name}", *row.metrics.values()]
        _print("| " + " | ".join([row.name, *(str(found.get(name, "")) for name in names)]) + " |")
    for row in comparison.rows:
        _print(f"{row.name}: {row.verdict}")
    for note in comparison.notes:
        _print(note)
    _print("")


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
