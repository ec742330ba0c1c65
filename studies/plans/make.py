"""Make the plans of one model that ``docs/plan.md`` compares, and its ready plan.

    python studies/plans/make.py smollm2 --device cuda
    python studies/plans/make.py tinyllama-1.1b.gguf --device cuda --dtype bfloat16
    python studies/plans/make.py gemma-3-270m.gguf --device cuda
    python studies/plans/make.py qwen2.5-coder-0.5b.gguf --device cuda
    python studies/plans/summary.py --write     # then the tables

``python tools/real_models.py TinyLlama-1.1B Gemma-3-270M Qwen2.5-Coder-0.5B`` downloads the files and prints their
paths. The models can be measured at the same time, except for the times of ``auto`` and ``ranks``, which then are those
of a busy machine; each is bound by the host rather than by the GPU. Measured are:

- by groups, the smallest share that reaches the goal: the **ready plan**;
- by groups, all selectors at several shares, where ``auto`` chooses by the cost;
- the time of a plan at 25 % of the groups with ``auto`` and with ``ranks``;
- by layers, a plan at 25 and at 50 % of the layers, with and without sinks, beside layers at equal intervals and at
  random.

The ready plan has the smallest share that keeps 95 % of the retrieval at a rise of at most 0.03 nats on the documents
for choosing, since a quarter of the groups is enough for some models only. It is ``docs/plans/NAME.json``; the outcomes
of each document are ``studies/plans/NAME.json``. If no share reaches the goal, there is no ready plan, and the result
says why. The same command again continues where it was interrupted, and measures the times anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch

import wherewhat
from wherewhat.errors import MeasureError, WherewhatError
from wherewhat.files import readable_json, write_file
from wherewhat.progress import Silent

GOAL = {"min_found": 0.95, "max_rise": 0.03}
"""What the ready plan reaches on the documents for choosing."""

BUDGET = 0.25
"""Share of the groups if no share reaches the goal, and of the plans whose time is taken."""

LAYERS = tuple((budget, sinks) for budget in (0.25, 0.5) for sinks in (4, 0))
"""Share and sinks of the plans by layer."""


class Lines(Silent):
    """Progress that prints lines."""

    shown = True

    def say(self, line: str) -> None:
        """Print a line."""
        if line:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def measured(plan: wherewhat.Plan, runs: Path) -> dict[str, Any]:
    """Return what the tables need of a plan: its share, and the outcomes of each document by selector and share."""
    found = plan.provenance
    run = wherewhat.RunDirectory.load(runs / found["run"])
    outcomes = {name: run.part(f"evaluate:{name}:{found['share']:g}").whole for name in found["evaluated_on"]}
    return {
        "share": found["share"],
        "units": sum(layer.units(plan.unit) for layer in plan.layers.values()),
        "selector": found["selector"],
        "auto": found["auto"],
        "share_of_cache": found["cache"]["share_of_cache"],
        "context": found["cache"]["context"],
        "outcomes": {name: {cell: round(x, 6) for cell, x in row.items()} for name, row in outcomes.items()},
    }


def study(options: argparse.Namespace) -> None:
    """Make all plans of a model, and store what is finished after each."""
    name = options.name or Path(options.model).stem.lower()
    result_file, plan_file = (options.root / folder / "plans" / f"{name}.json" for folder in ("studies", "docs"))
    for path in (result_file, plan_file):
        path.parent.mkdir(parents=True, exist_ok=True)
    progress = Lines()
    loaded = wherewhat.load(options.model, device=options.device, dtype=options.dtype)
    on_gpu = loaded.device.startswith("cuda")
    result: dict[str, Any] = {
        "model": loaded.name,
        "weights_hash": loaded.weights_hash,
        "dtype": loaded.dtype,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "tokens": options.tokens,
        "goal": GOAL,
    }

    def make(title: str, **request: Any) -> wherewhat.Plan:
        started = time.perf_counter()
        common = {"tokens": options.tokens, "documents": options.documents, "out": options.out}
        plan = wherewhat.make_plan(loaded, progress=progress, **{**common, **request})
        progress.say(f"{name}, {title}: {plan}, {time.perf_counter() - started:.0f} s")
        return plan

    def store(**new: Any) -> None:
        result.update(new)
        write_file(result_file, readable_json(result))

    try:
        plan, missed = make("groups", **GOAL), None
        # The hash of the files, as the command stores it: a model in memory is hashed anew.
        found = {**plan.provenance, "weights_hash": loaded.weights_hash}
        dataclasses.replace(plan, provenance=found).save(plan_file)
    except MeasureError as error:  # no share reaches the goal; the next call raises if it is anything else
        plan, missed = make("groups", budget=BUDGET), str(error)
        plan_file.unlink(missing_ok=True)
    chosen_on = len(plan.provenance["chosen_on"])
    store(window=plan.window, choosing=chosen_on, groups=measured(plan, options.out), goal_missed=missed)
    store(curves=measured(make("curves", curves=True, budget=BUDGET), options.out))

    seconds = {}
    for selector in ("ranks", "auto"):
        started = time.perf_counter()
        make(f"time of {selector}", budget=BUDGET, selector=selector, documents=3, again=True)
        seconds[selector] = round(time.perf_counter() - started, 2)
    store(seconds=seconds)

    layers = []
    for budget, sinks in LAYERS:
        request = {"unit": "layer", "budget": budget, "sinks": sinks, "compare": ("random",)}
        plan = make(f"layers, {budget:.0%}, {sinks} sinks", **request)
        layers.append({"sinks": sinks, **measured(plan, options.out)})
        store(layers=layers)


def main() -> None:
    """Make the plans of the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, a folder or a .gguf file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=8, help="documents for measuring")
    parser.add_argument("--name", help="name of the files; by default that of the model")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of run directories")
    repository = Path(__file__).resolve().parents[2]
    parser.add_argument("--root", type=Path, default=repository, help="folder in place of the repository for the files")
    options = parser.parse_args()
    if options.documents < 2:
        parser.error("intervals need 2 --documents or more")
    try:
        study(options)
    except WherewhatError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
