"""How often the intervals over documents contain the mean: quantities as they are distributed over documents.

    python studies/coverage.py smollm2 --out runs-coverage          # 64 windows of 256 tokens, about 40 minutes
    python studies/coverage.py smollm2 --out runs-coverage --all    # a row for every quantity

Measures axes, heads, perturb and residual on windows of the embedded documents, and axes on an untrained model as well.
The windows are the population: 2, 3, 4 or 8 of them are drawn without replacement, and the interval of their mean
(``statistics.interval``) contains the mean of all windows or not. Drawing without replacement avoids ties, which have
no spread; as the mean of n of N windows varies less than that of n independent ones, errors are multiplied by
√(1 - n/N) (Cochran, Sampling Techniques, 1977). ``Interval.within`` cannot exclude a mean inside the range and is left
out. Quantities are grouped by their declared range: median coverage, and the lowest and highest of all quantities, or
of the middle 90 % of single heads. Simulated distributions follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import wherewhat
from wherewhat.measures.statistics import student
from wherewhat.runs.results import StoredRun
from wherewhat.scores import NON_NEGATIVE, SHARE, UNBOUNDED

Values = npt.NDArray[np.float64]

SIZES = (2, 3, 4, 8)
"""Numbers of documents."""

MEASURED: Mapping[str, Mapping[str, object]] = {
    "perturb": {"kinds": ("words", "position_jitter"), "rates": (0.05,), "seeds": 1, "axes": False},
    "residual": {"strengths": (0.0,), "layers": False, "axes": False},
    "axes": {},
    "heads": {"queries": 8, "taus": (), "blocks": ()},
}
"""Measurements and their options."""

KINDS = {
    SHARE: "shares, r and scores",
    NON_NEGATIVE: "losses, entropies and distances",
    UNBOUNDED: "rises, differences and ranks",
}
"""Kinds of quantities by range."""


HEADS = ("r_behaviour", "unique_a", "unique_c", "sink_mass", "s_pos_no_sink", "s_sym_no_sink")
"""Metrics of single heads."""

FEWER = 10
"""Fewer draws of single heads by this factor: there are hundreds."""


@dataclass(frozen=True)
class Quantity:
    """A number per document: its name, its kind, and its values."""

    name: str
    kind: str
    values: Values


def write(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def windows(count: int) -> list[str]:
    """Return parts of the embedded documents of equal distance, each from the beginning of a sentence."""
    documents = wherewhat.embedded_documents()
    each = -(-count // len(documents))
    texts = []
    for document in documents:
        for index in range(each):
            start = document.text.find(". ", index * len(document.text) // (each + 1))
            texts.append(document.text[start + 2 :][:3000])
    return texts[:count]


def quantities(run: StoredRun, untrained: StoredRun | None) -> Iterator[Quantity]:
    """Return every declared number of a run, rises over the plain loss, and differences to the untrained model."""
    for metric in run.metrics:
        values = run.document_means(metric.name)
        if len(values) < len(run.documents):
            continue
        if metric.name.startswith("loss_"):
            yield Quantity(f"{metric.name} - loss", KINDS[UNBOUNDED], np.array(run.values(metric.name, less="loss")))
        yield Quantity(metric.name, KINDS.get(metric.range, "correlations"), np.array([*values.values()]))
        other = {} if untrained is None else untrained.document_means(metric.name)
        if other:
            change = np.array([value - other[name] for name, value in values.items()])
            yield Quantity(f"{metric.name} - untrained", KINDS[UNBOUNDED], change)


def single_heads(run: StoredRun) -> Iterator[Quantity]:
    """Return the numbers of every head that the page shows."""
    for metric in HEADS:
        for (layer, head), values in (run.head_values(metric) if metric in run.numbers else {}).items():
            if len(values) == len(run.documents):
                yield Quantity(f"{metric}, layer {layer}, head {head}", "single heads", np.array(values))


def coverage(values: Values, n: int, *, draws: int, seed: int = 0) -> float:
    """Return how often the interval of ``n`` values contains the mean of all."""
    order = np.random.default_rng(seed).random((draws, len(values))).argpartition(n, 1)[:, :n]
    return contained(values[order], float(values.mean()), left=1 - n / len(values))


def contained(samples: Values, mean: float, *, left: float = 1.0) -> float:
    """Return how often Student's interval of samples ``(draws, n)`` contains a mean; ``left`` scales the variance."""
    n = samples.shape[1]
    reach = student(n) * np.sqrt(samples.var(1, ddof=1) / n * left)
    return float((np.abs(samples.mean(1) - mean) <= reach).mean())


def skewness(values: Values) -> float:
    """Return the third standardised moment."""
    return float((((values - values.mean()) / values.std()) ** 3).mean())


def simulated(n: int, *, draws: int) -> Iterator[tuple[str, float]]:
    """Return the coverage of distributions with a known mean."""
    rng = np.random.default_rng(0)
    yield "normal", contained(rng.normal(0, 1, (draws, n)), 0.0)
    for a, b in ((8, 24), (2, 18)):
        yield f"share, Beta({a}, {b})", contained(rng.beta(a, b, (draws, n)), a / (a + b))
    for shape in (9, 4, 1):
        yield f"gamma({shape}), skewness {2 / shape**0.5:.2g}", contained(rng.gamma(shape, 1, (draws, n)), float(shape))
    for mean, shape in ((140, 20), (9, 4)):
        counts = rng.poisson(rng.gamma(shape, mean / shape, (draws, n))).astype(float)
        yield f"count, negative binomial, mean {mean}", contained(counts, float(mean))


def row(name: str, cells: list[str]) -> None:
    """Print a row of a table."""
    write(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measure, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--measurements", nargs="+", default=[*MEASURED], choices=[*MEASURED])
    parser.add_argument(
        "--out", default="runs-coverage", help="folder of runs, in which finished parts are found again"
    )
    parser.add_argument("--all", action="store_true", help="print every quantity")
    given = parser.parse_args()

    texts, model = windows(given.windows), wherewhat.load(given.model)
    found: list[Quantity] = []
    heads: list[Quantity] = []
    for name in given.measurements:
        result = wherewhat.measure(
            name,
            model,
            texts=texts,
            tokens=given.tokens,
            controls=("random",) if name == "axes" else (),
            out=given.out,
            **MEASURED[name],
        )
        untrained = result.controls.get("random")
        found += quantities(result.stored, None if untrained is None else untrained.stored)
        heads += single_heads(result.stored)
    found, heads = ([one for one in x if one.values.std() > 1e-9 * abs(one.values.mean())] for x in (found, heads))
    covered = {one.name: [coverage(one.values, n, draws=given.draws) for n in SIZES] for one in found}
    for seed, one in enumerate(heads):
        covered[one.name] = [coverage(one.values, n, draws=given.draws // FEWER, seed=seed) for n in SIZES]

    heading = [f"{n} documents" for n in SIZES]
    row(f"{given.model}, {given.windows} windows of {given.tokens} tokens", ["quantities", "skewness", *heading])
    row("---", ["---"] * (2 + len(SIZES)))
    for kind in dict.fromkeys(one.kind for one in [*found, *heads]):
        group = [one for one in [*found, *heads] if one.kind == kind]
        skew = np.quantile([abs(skewness(one.values)) for one in group], (0.5, 1))
        # Of hundreds of heads the middle 90 %.
        ends = (0.05, 0.95) if kind == "single heads" else (0.0, 1.0)
        levels = np.quantile([covered[one.name] for one in group], (ends[0], 0.5, ends[1]), axis=0).T
        cells = [f"{100 * middle:.0f} ({100 * low:.0f} to {100 * high:.0f}) %" for low, middle, high in levels]
        row(kind, [str(len(group)), f"{skew[0]:.1f}, at most {skew[1]:.1f}", *cells])
    for one in found if given.all else ():
        cells = [f"{100 * level:.1f}" for level in covered[one.name]]
        row(one.name, [f"{one.values.mean():.4g} ± {one.values.std():.2g}", f"{skewness(one.values):.1f}", *cells])
    table = {n: dict(simulated(n, draws=given.draws)) for n in SIZES}
    for name in table[SIZES[0]]:
        row(name, ["", "", *(f"{100 * table[n][name]:.1f} %" for n in SIZES)])


if __name__ == "__main__":
    main()
