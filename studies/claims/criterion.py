"""Criterion for heads that can be perturbed: chosen on one model, tested on others (claim 10).

    python studies/claims/criterion.py runs/perturb-SmolLM2… runs/perturb-stories15m…

Each argument is a run of ``wherewhat perturb`` with ``axes`` and swapped positions, as ``wherewhat claims`` makes it. A
head can be perturbed if its output changes less than the median head's when positions are swapped. The criterion is a
threshold of the share that only distance explains, with a direction; both are those with the most hits on the first
model of a pair, and the hits are counted on the second.
"""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path
from statistics import median

from wherewhat.measures.statistics import wilson
from wherewhat.rules.numbers import head_means
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.results import StoredRun

Heads = list[tuple[float, bool]]
"""Share of distance of each head, and whether it can be perturbed."""


def heads(path: Path) -> Heads:
    """Return the heads of a run."""
    run = StoredRun(RunDirectory.load(path))
    shares, changes = head_means(run, "share_a"), head_means(run, "sensitivity_position_swap")
    places = [place for place in shares if place in changes]
    middle = median(changes[place] for place in places)
    return [(shares[place], changes[place] < middle) for place in places]


def chosen(found: Heads) -> tuple[float, bool]:
    """Return the threshold and direction with the most hits."""
    rules = [(share, above) for share, _ in found for above in (False, True)]
    return max(rules, key=lambda rule: sum(hits(found, rule)))


def hits(found: Heads, rule: tuple[float, bool]) -> list[float]:
    """Return 1 for each head that a rule is right about, 0 for others."""
    threshold, above = rule
    return [float(((share > threshold) == above) == stable) for share, stable in found]


def main(paths: list[str]) -> None:
    """Print the hits of each pair of models."""
    models = {Path(path).name: heads(Path(path)) for path in paths}
    for first, second in permutations(models, 2):
        rule = chosen(models[first])
        own, other = (wilson(hits(models[name], rule)) for name in (first, second))
        side = "above" if rule[1] else "at most"
        sys.stdout.write(
            f"chosen on {first}: share of distance {side} {rule[0]:.3f}, right for {own.mean:.2f} of its heads; "
            f"on {second}: {other.mean:.2f} ({other.low:.2f} to {other.high:.2f}), {other.n} heads\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
