"""Length methods side by side on a real model beyond its trained length: loss, planted runs, copies, questions.

    python benchmarks/lengths.py $(python tools/real_models.py stories15M) --lengths 2 4 8 --documents 8
    python benchmarks/lengths.py smollm2-folder --lengths 1.5 2 4 --documents 8 --text long --plan plan.json \
        --device cuda --dtype bfloat16 --json studies/lengths/smollm2.json

Every ``--text`` file is one document; by default the documents are the embedded novels, joined where a text must be
longer than one of them. The numbers are those of ``wherewhat extend`` with ``retrieval``; this needs nothing but torch
and transformers. With ``--plan``, near-far is measured twice: for all heads, and as near-far-plan for the plan's heads.
The file of ``--json`` is written after each method, and methods and documents that it holds are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from variants import PLANNED, variant
from wherewhat.caches.plan import Plan
from wherewhat.errors import WherewhatError
from wherewhat.files import write_file
from wherewhat.lengths import METHODS
from wherewhat.lengths.method import LengthMethod
from wherewhat.measures.extend import ExtendConfig
from wherewhat.measures.extend.text import LengthProbes
from wherewhat.measures.statistics import Interval, interval
from wherewhat.models.loaded import LoadedModel
from wherewhat.models.loader import load
from wherewhat.rules.length_methods import compare_methods
from wherewhat.runs.subject import ModelSubject
from wherewhat.text.documents import read_documents

DEPTHS = (0, 20, 40, 70, 100)
"""Depths of planted runs in percent. At 50 and 75 %, a run would be exactly a trained length back in texts of 2 and 4
trained lengths, where windows of the trained length still include most of it."""


def main() -> int:
    """Measure, print tables; return 1 if something is wrong with the input."""
    options = _arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        loaded = load(options.model, device=options.device, dtype=options.dtype)
        subject = ModelSubject(loaded)
        trained = options.trained or subject.trained_length()
        plan = None if options.plan is None else Plan.load(options.plan)
        if plan is not None:
            subject.check_plan(plan)
        config = ExtendConfig(trained=trained, top=options.top, retrieval=True, depths=DEPTHS)
        name = options.name or loaded.name
        about = {"model": name, "weights_hash": loaded.weights_hash, "dtype": loaded.dtype, "trained": trained}
        about |= {"top": options.top} | ({} if plan is None else {"plan": _plan_summary(plan)})
        result = _resumed(options.json, about)

        def save() -> None:
            if options.json is not None:
                write_file(options.json, (json.dumps(result, separators=(",", ":")) + "\n").encode())

        names = list(METHODS if options.methods is None else options.methods)
        names += [PLANNED] if plan is not None and "near-far" in names else []
        names += options.variants
        for multiple in options.lengths:
            texts = _texts(loaded, round(multiple * trained), options.documents, options.text)
            _check_unseen(plan, texts)
            cells = result["lengths"].setdefault(f"{multiple:g}", {})
            for document, ids in texts.items():
                found = cells.setdefault(document, {"sha256": _hash(ids), "methods": {}})
                if found["sha256"] != _hash(ids):
                    raise WherewhatError(f"{options.json} has another text named {document}: give another file")
                missing = [method for method in names if method not in found["methods"]]
                _print(f"{document}, {multiple:g} × {trained:,} tokens: {len(missing)} methods")
                if missing:
                    _measure(subject, loaded, ids, config, missing, plan, found, save)
            _print(f"{name}: {len(texts)} documents of {multiple:g} × {trained:,} tokens")
            _tables(estimates(cells[document] for document in texts), names)
    except WherewhatError as error:
        _print(f"error: {error}")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Length methods side by side beyond the trained length.")
    parser.add_argument("model", help="folder or name of the model")
    parser.add_argument("--name", help="name of the model in results; default: that of its folder")
    parser.add_argument("--lengths", type=float, nargs="+", default=[2.0, 4.0], help="multiples of the trained length")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--text", nargs="+", help="files or folders, one document per file; default: embedded novels")
    parser.add_argument("--methods", nargs="*", choices=METHODS, help="default: all")
    parser.add_argument(
        "--variants", nargs="+", default=[], metavar="METHOD:OPTION=VALUE", help="also methods with other parameters"
    )
    parser.add_argument("--plan", type=Path, help="also measure near-far for the heads of this plan")
    parser.add_argument("--top", type=int, help="far keys that a query sees under near-far")
    parser.add_argument("--trained", type=int, help="trained length in place of that in the model's configuration")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's choice")
    parser.add_argument("--json", type=Path, help="write all numbers to this file, and resume from it")
    return parser.parse_args()


def _plan_summary(plan: Plan) -> dict[str, Any]:
    chosen = json.dumps({str(layer): sorted(some) for layer, some in sorted(plan.full.items())})
    summary = {"unit": plan.unit, "share": round(plan.share, 5), "sha256": hashlib.sha256(chosen.encode()).hexdigest()}
    return summary | {name: plan.provenance.get(name) for name in ("selector", "tokens", "chosen_on")}


def _resumed(path: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file holds, if it holds results of the same model and options; else nothing yet."""
    if path is None or not path.exists():
        return {**about, "lengths": {}}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    other = [name for name, value in about.items() if found.get(name, value) != value]
    if other:
        raise WherewhatError(f"{path} was measured with another {other[0]} ({found[other[0]]}): give another file")
    return {**about, **found}


def _texts(loaded: LoadedModel, tokens: int, count: int, sources: list[str] | None) -> dict[str, Tensor]:
    """Return texts ``(1, tokens)`` by name.

    Without sources each is from one book as far as one is long enough, and no passage is used twice.
    """
    if sources:
        documents = read_documents(sources, count=count)
        return {x.name: loaded.encode(x.text, tokens=tokens, allow_beyond=True)[None] for x in documents}
    books: dict[str, list[tuple[str, str]]] = {}
    for document in read_documents(None, count=None):
        books.setdefault(re.sub(r"-\d+$", "", document.name), []).append((document.name, document.text))
    found: list[tuple[str, Tensor]] = []
    for passages in books.values():
        joined: list[str] = []
        for name, passage in passages:
            joined.append(passage)
            ids = loaded.encode("\n\n".join(joined), allow_beyond=True)
            if len(ids) >= tokens:
                found.append((name, ids[None, :tokens]))
                joined = []
    if len(found) < count:
        raise WherewhatError(f"the embedded text has {len(found)} texts of {tokens} tokens: ask for no more of them")
    # Evenly over the books, which come one after the other.
    return dict(found[i * len(found) // count] for i in range(count))


def _check_unseen(plan: Plan | None, texts: Mapping[str, Tensor]) -> None:
    """Refuse documents on which the heads of the plan were scored."""
    seen = [] if plan is None else [name for name in plan.provenance.get("chosen_on", ()) if name in texts]
    if seen:
        raise WherewhatError(f"the plan was made on {seen[0]}, which would be measured here: make it on other texts")


def _hash(ids: Tensor) -> str:
    return hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:16]


def _measure(
    subject: ModelSubject,
    loaded: LoadedModel,
    ids: Tensor,
    config: ExtendConfig,
    names: list[str],
    plan: Plan | None,
    found: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Add the controls and the given methods to the numbers of a document, saved after each method."""
    trained, length = config.trained or 0, ids.shape[1]
    methods: dict[str, LengthMethod] = {}
    for name in names:
        if ":" in name:
            methods[name] = variant(name, plan).fitted(trained=trained, length=length)
            continue
        kind, own = ("near-far", plan) if name == PLANNED else (name, None)
        methods[name] = config.method(kind, trained=trained, length=length, plan=own)
    prefix = len(loaded.prefix)
    started = time.perf_counter()
    probes = LengthProbes(
        subject, ids, config, list(methods.values()), encode=lambda text: loaded.tokenize(text)[prefix:]
    )
    (controls,) = probes.controls
    found["controls"] = _numbers(controls.whole) | _means(layer.heads for layer in controls.layers)
    _print(f"  controls: {time.perf_counter() - started:.1f} s")
    for name, method in methods.items():
        started = time.perf_counter()
        ((scores,),) = probes.measure([method])
        numbers = _numbers(scores.whole) | _means(layer.heads for layer in scores.layers)
        rises = scores.curves["rise_by_position"].values
        found["positions"] = [round(x) for x in rises[:, 0].tolist()]
        seconds = time.perf_counter() - started
        found["methods"][name] = numbers | {"seconds": round(seconds, 2), "rises": [_rounded(x) for x in rises[:, 1]]}
        save()
        shown = ("loss_rise", "found_beyond", "second_copy", "passkey", "keys")
        _print(f"  {name}: {seconds:.1f} s" + "".join(f", {x} {numbers[x]:.3f}" for x in shown if x in numbers))


def _numbers(whole: Mapping[str, float]) -> dict[str, float]:
    return {name: _rounded(value) for name, value in whole.items()}


def _means(layers: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return means over heads by metric, as the command line shows them."""
    heads: dict[str, list[Tensor]] = {}
    for layer in layers:
        for name, values in layer.items():
            heads.setdefault(name, []).append(values)
    means = {name: float(torch.cat(values).nanmean()) for name, values in heads.items()}
    return {name: _rounded(value) for name, value in means.items() if math.isfinite(value)}


def _rounded(value: float | Tensor) -> float:
    return float(f"{float(value):.5g}")


def estimates(documents: Iterable[Mapping[str, Any]]) -> dict[str, Interval]:
    """Return means with intervals over documents of a result, by metric as ``wherewhat extend`` names them."""
    values: dict[str, list[float]] = {}
    for document in documents:
        named = dict(document["controls"])
        for method, numbers in document["methods"].items():
            named |= {f"{name}_{method}": x for name, x in numbers.items() if name != "rises"}
        for name, value in named.items():
            values.setdefault(name, []).append(value)
    return {name: interval(each) for name, each in values.items()}


def _tables(found: Mapping[str, Interval], names: list[str]) -> None:
    comparison = compare_methods(found, names)
    controls = {"loss": "loss_pieces", "found": "found_pieces", "second copy": "second_copy_pieces"}
    _print("in pieces: " + ", ".join(f"{title} {_text(found[name])}" for title, name in controls.items()))
    titles = ["loss beyond", "rise inside", *comparison.rows[0].metrics, "seconds"]
    _print("| " + " | ".join([comparison.what, *titles]) + " |")
    _print("|---" * (len(titles) + 1) + "|")
    for row in comparison.rows:
        metrics = [*(f"{x}_{row.name}" for x in ("loss_beyond", "rise_inside")), *row.metrics.values()]
        cells = [_text(found.get(name)) for name in (*metrics, f"seconds_{row.name}")]
        _print("| " + " | ".join([row.name, *cells]) + " |")
    for row in comparison.rows:
        _print(f"{row.name}: {row.verdict}")
    for note in comparison.notes:
        _print(note)
    _print("")


def _text(value: Interval | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.3f}" if value.reach is None else f"{value.mean:.3f} ± {value.reach:.3f}"


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
