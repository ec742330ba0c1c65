"""Means and intervals of RULER's scores, and the page ``docs/ruler.md`` made of the files in ``studies/ruler``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nvidia_ruler import NEW_TOKENS, PACKAGE, SEED, SHORTEST_QA, TASKS, VERSION
from variants import PLANNED
from wherewhat.errors import WherewhatError
from wherewhat.lengths import METHODS
from wherewhat.measures.statistics import Interval, share_bounds
from wherewhat.progress import counted

ABLE = 50.0
"""Score of the unmodified model within its trained length below which a task says nothing about methods."""

_TABLE = "studies/ruler"
_COMPARED = (PLANNED, "near-far")
"""Methods with which the others are compared sample by sample: the first that answered."""
_Z = 1.959964
"""97.5 % quantile of the normal distribution."""


def task_interval(scores: Sequence[float]) -> Interval:
    """Return the mean of a task's scores from 0 to 100, with the bounds of Wilson's interval.

    They hold for parts of an answer too: a score between 0 and 1 has at most the variance of a zero or one of the same
    mean.
    """
    n = len(scores)
    mean = sum(scores) / n
    low, high = share_bounds(min(max(mean / 100, 0.0), 1.0), n)
    return Interval(mean, 100 * low, 100 * high, n)


def mean_interval(tasks: Iterable[Interval]) -> Interval:
    """Return the mean over tasks, with an interval from those of the tasks (MOVER, Zou & Donner 2008).

    Distances of the tasks' bounds from their means are added as variances are. Tasks are fixed and not a sample.
    """
    some = list(tasks)
    count = len(some)
    mean = math.fsum(task.mean for task in some) / count
    below = math.hypot(*(task.mean - (task.low or 0.0) for task in some)) / count
    above = math.hypot(*((100.0 if task.high is None else task.high) - task.mean for task in some)) / count
    return Interval(mean, max(0.0, mean - below), min(100.0, mean + above), sum(task.n for task in some))


def paired_difference(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], tasks: Iterable[str]
) -> Interval | None:
    """Return the mean over tasks of first minus second on the same samples; None if they share fewer than two of one.

    Variances of the differences are estimated in each task and added.
    """
    means, errors, count = [], [], 0
    for task in tasks:
        pairs = list(zip(first.get(task, ()), second.get(task, ()), strict=False))
        if len(pairs) < 2:
            return None
        differences = [one - other for one, other in pairs]
        means.append(math.fsum(differences) / len(pairs))
        squares = math.fsum((x - means[-1]) ** 2 for x in differences)
        errors.append(math.sqrt(squares / (len(pairs) - 1) / len(pairs)))
        count += len(pairs)
    if not means:
        return None
    mean, reach = math.fsum(means) / len(means), _Z * math.hypot(*errors) / len(means)
    return Interval(mean, mean - reach, mean + reach, count)


def reference_length(result: Mapping[str, Any]) -> str:
    """Return the longest length within the trained one at which the unmodified model answered."""
    within = [
        length
        for length, cell in result["lengths"].items()
        if int(length) <= result["trained"] and "none" in cell["methods"]
    ]
    if not within:
        raise WherewhatError(
            f"{result['model']} has no answers of the unmodified model within {result['trained']} tokens: answer them "
            "first, since methods are compared with them"
        )
    return max(within, key=int)


def able_tasks(result: Mapping[str, Any]) -> list[str]:
    """Return the tasks that the unmodified model can do within its trained length, in RULER's order."""
    scores = result["lengths"][reference_length(result)]["methods"]["none"]["scores"]
    return [task for task in TASKS if task in scores and task_interval(scores[task]).mean >= ABLE]


def write_page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page in Markdown."""
    parts = [_INTRODUCTION]
    for result in results:
        parts.append(_model(result))
    parts.append(_REST)
    return "\n".join(parts)


def _model(result: Mapping[str, Any]) -> str:
    reference, able = reference_length(result), able_tasks(result)
    first = result["lengths"][reference]["methods"]["none"]["scores"]
    cells = sorted(result["lengths"].items(), key=lambda item: int(item[0]))
    counts = {len(x) for _, cell in cells for found in cell["methods"].values() for x in found["scores"].values()}
    samples = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    lines = [
        f"## {result['model']}",
        "",
        f"Trained length {result['trained']:,} tokens; {result['dtype']}, {result['device']}; {samples} samples of "
        f"each task. Within its trained length ({int(reference):,} tokens) the unmodified model can do {len(able)} of "
        f"{len(first)} tasks: {', '.join(f'`{task}`' for task in able) or 'none of them'}.",
        "",
        f"| tokens | method | mean of {len(able)} tasks | ratio | difference | mean of all | seconds per answer |",
        "|---" * 7 + "|",
    ]
    for length, cell in cells:
        multiple = f"{int(length):,} ({int(length) / result['trained']:.3g} ×)"
        compared = next((cell["methods"][name] for name in _COMPARED if name in cell["methods"]), None)
        for method, found in cell["methods"].items():
            other = None if compared is found or compared is None else compared["scores"]
            lines.append("| " + " | ".join([multiple, _named(method), *_summary(found, first, other, able)]) + " |")
    for length, cell in cells:
        absent = [_named(name) for name in _expected(int(length) > result["trained"]) if name not in cell["methods"]]
        if absent:
            lines += ["", f"Not answered at {int(length):,} tokens: {', '.join(absent)}."]
    for length, cell in cells:
        lines += ["", f"### {result['model']}, {int(length):,} tokens", "", *_tasks(cell, able)]
    return "\n".join([*lines, ""])


def _expected(beyond: bool) -> list[str]:
    """Return the methods that a length is to be answered with, beyond the trained length or within it."""
    return [*METHODS, PLANNED] if beyond else ["none"]


def _summary(
    found: Mapping[str, Any],
    first: Mapping[str, Sequence[float]],
    compared: Mapping[str, Sequence[float]] | None,
    able: Sequence[str],
) -> list[str]:
    """Return the cells of one method at one length in the first table."""
    scores = found["scores"]
    tasks = [task for task in able if task in scores]
    own, within, whole = _means(scores, tasks), _means(first, tasks), _means(scores, list(scores))
    ratio = "" if own is None or within is None else f"{own.mean / within.mean:.2f}"
    change = None if compared is None else paired_difference(scores, compared, tasks)
    difference = "" if change is None else f"{change.mean:+.0f} ({change.low:+.0f} to {change.high:+.0f})"
    some = "" if len(tasks) == len(able) else f", {len(tasks)} of them"
    each = found["seconds"] / sum(map(len, scores.values()))
    return [
        f"{_shown(own)}{some}",
        ratio,
        difference,
        f"{_shown(whole)}, {counted(len(scores), 'task')}",
        f"{each:.2f}",
    ]


def _tasks(cell: Mapping[str, Any], able: Sequence[str]) -> list[str]:
    """Return the table of all tasks at one length, and why some are left out."""
    methods = cell["methods"]
    lines = ["| task | " + " | ".join(map(_named, methods)) + " |", "|---" * (len(methods) + 1) + "|"]
    for task in TASKS:
        scores = [found["scores"].get(task) for found in methods.values()]
        if any(scores):
            texts = [f"`{task}`" + ("" if task in able else " (not done within)")]
            texts += ["" if some is None else _shown(task_interval(some)) for some in scores]
            if task not in able:
                texts = [f"<span style='opacity: 0.5'>{text}</span>" if text else "" for text in texts]
            lines.append("| " + " | ".join(texts) + " |")
    if cell["left_out"]:
        reasons = (f"`{task}` ({reason})" for task, reason in cell["left_out"].items())
        lines += ["", "Left out: " + ", ".join(reasons) + "."]
    return lines


def _means(scores: Mapping[str, Sequence[float]], tasks: Sequence[str]) -> Interval | None:
    some = [task_interval(scores[task]) for task in tasks if task in scores]
    return mean_interval(some) if some else None


def _named(method: str) -> str:
    if method == "none":
        return "unmodified"
    return f"cache plan, {method.removeprefix('plan-')} %" if method.startswith("plan-") else f"`{method}`"


def _shown(value: Interval | None) -> str:
    return "" if value is None else f"{value.mean:.0f} ({value.low:.0f} to {value.high:.0f})"


_INTRODUCTION = f"""# RULER: length methods and cache plans on a benchmark by others

<!-- Written by 'python benchmarks/ruler.py page' from the files in {_TABLE}. -->

[RULER](https://arxiv.org/abs/2404.06654) by NVIDIA asks models for facts in long texts: eight kinds of needle in a
haystack, variable tracking (`vt`), most common and most frequent words (`cwe`, `fwe`) and questions on documents
(`qa_1` SQuAD, `qa_2` HotpotQA). All 13 tasks are generated and scored by NVIDIA's own code (`{PACKAGE}`
{VERSION}, seed {SEED}), unmodified. Answers come from the unmodified model, from [length methods](extend.md) beyond its
trained length, and from [cache plans](plan.md) within it.

**How to read the tables.** Scores are from 0 to 100, with 95 % intervals. A task that the unmodified model does not do
within its trained length (a score below {ABLE:.0f}) says nothing about methods: it is grey, and left out of the mean
that compares them. The mean over all tasks is beside it. *Ratio* is the first mean divided by that of the unmodified
model within its trained length; *difference* is the first mean minus that of `{_COMPARED[0]}`, else `{_COMPARED[1]}`,
on the same samples. Intervals of tasks are Wilson's, which for scores of parts of an answer are too wide rather than
too narrow. Those of means combine them (MOVER, Zou & Donner 2008); they are for these tasks only.

**Prompts** are those of RULER's base template, completed by the model. No chat template is used, not even for models
that were trained on chats. Prompt and answer fit into the length in every sample, which is checked before answering
and before scoring. Answers are greedy, with RULER's number of new tokens: {NEW_TOKENS["niah_single_1"]} for needles,
{NEW_TOKENS["vt"]} for `vt`, {NEW_TOKENS["cwe"]} for `cwe`, {NEW_TOKENS["fwe"]} for `fwe` and {NEW_TOKENS["qa_1"]} for
questions. An answer may end early when it contains all references, because its score is then certain.
Parameters of length methods are those for the length of the whole context, the same for all samples; a name with a
colon has another one, such as the [distance of far keys](lengths.md#distance-of-far-keys).
"""

_REST = f"""## How to repeat it

    python benchmarks/ruler.py prompts MODEL --lengths 1x 2x --out ruler/MODEL
    python benchmarks/ruler.py check MODEL --prompts ruler/MODEL --lengths 1x --count 100
    python benchmarks/ruler.py answers MODEL --prompts ruler/MODEL --out MODEL.jsonl --device cuda --dtype bfloat16
    python benchmarks/ruler.py score MODEL.jsonl --prompts ruler/MODEL
    python benchmarks/ruler.py page

`prompts` and `score` download NVIDIA's package once and run it in a process of its own; `answers` needs torch and
transformers only. An interrupted `answers` continues. `check` compares answers with those of `generate` of
transformers. Prompts of different lengths are answered in one batch without padding: all are read up to the length of
the shortest, then one token of each at a time. Texts that have ended leave the batch.

## Limitations

- Tasks are chosen by the same answers within the trained length to which methods are compared, so the comparison is a
  little too hard for methods.
- `prepare.py` counts neither the token in front of a text nor, in `fwe`, the answer; it is asked for as much less as is
  needed for both to fit. It adds text in steps, so that prompts are up to two fifths shorter than the length.
- The two tasks of questions are left out below {SHORTEST_QA:,} tokens, where RULER's generator does not end.
- Small models do few of these tasks even within their trained length; a method cannot be judged by the others.
- Methods have one set of parameters each, and are applied without training.
- Seconds per answer are those of a batch divided by its texts. Other processes may have shared the GPU, so they compare
  methods roughly.
"""
