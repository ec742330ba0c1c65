"""``judge_claims``: make the runs that claims need, judge each claim, and collect everything in one result."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from wherewhat.boundary import MOST_DOCUMENTS, check_at_most, output_file, output_folder, read_user_file
from wherewhat.errors import CaptureError, ConfigError, MeasureError, TextError
from wherewhat.files import make_folder, parse_object, plain_json, readable_json, write_file
from wherewhat.measures.frequencies import BANDS
from wherewhat.measures.measurement import QuestionMeasurement, find_measurement
from wherewhat.options import checked
from wherewhat.progress import Progress, Silent, Work
from wherewhat.report.measurements import GivenText, ScheduledRun, given_text, measure, run_length, with_controls
from wherewhat.report.report import seen_model
from wherewhat.report.views import Capacity, ReportRun, view_of
from wherewhat.rules.claims.claim import Claim, Evidence, verdict_json, verdict_words
from wherewhat.rules.claims.registry import CLAIMS
from wherewhat.rules.claims.stability import judge_stably
from wherewhat.runs.collection import Runs
from wherewhat.runs.directory import collect_versions
from wherewhat.runs.execution import LastModel
from wherewhat.runs.request import MemoryModel, ModelRequest, Request, file_names, given_options, model_request
from wherewhat.text.documents import Document, documents_of

FORMAT = 1
"""Version of the file's format."""

PROMPTS = 24
"""Prompts of each kind and size by default."""

_DOCUMENTS, _MOST_DOCUMENTS = 4, 8
"""Documents by default of measurements that state no number, and the largest number by default."""

_TOLERATED = (MeasureError, CaptureError, ConfigError, TextError)
"""Errors of a model or text that a measurement cannot use; claims that need it are then not judged."""


@dataclass(frozen=True)
class ClaimRun:
    """A run that claims need.

    Attributes:
        measurement: Name of the measurement.
        run: Its size, options and control models; None for those of a report, so that both share the run.
        prompts: Kind of prompts instead of texts.
        rotary: Whether it needs a model that rotates queries and keys.
    """

    measurement: str
    run: ReportRun | None = None
    prompts: str | None = None
    rotary: bool = False


def _runs(prompts: int, capacity: Capacity) -> dict[str, ClaimRun]:
    """Return the runs that claims need, by name; the decomposition is first.

    Intervals need four documents, and losses under perturbation more.
    ``prompts`` are those of each kind and size.
    """
    words = {"kinds": ("words",), "rates": (0.05, 0.1, 0.2), "seeds": 1, "axes": False, "equivalence": False}
    swaps = {"kinds": ("position_swap", "features"), "rates": (0.05,), "seeds": 1}
    asked: dict[str, Any] = {"kinds": ("numbers", "letters"), "sizes": (4, 16), "count": prompts}
    additive = {"strengths": (0.0, 1.0), "layers": False}
    queries = {"queries": 8}
    bands = {"bands": min(BANDS, max(1, capacity.planes))}
    unrotated = {**bands, "unrotate": capacity.trained is not None}
    massive = {**bands, "massive": True, "masking": False, "queries": 1}
    retrieval = {**bands, "retrieval": True, "masking": False, "queries": 1}
    return {
        "axes": ClaimRun("axes"),
        "heads": ClaimRun("heads"),
        "random tokens": ClaimRun("heads", ReportRun(5.3, documents=4, tokens=256, options=queries), prompts="random"),
        "planes": ClaimRun("planes", ReportRun(2.0, documents=4, tokens=256, controls=("random",)), rotary=True),
        "distance": ClaimRun("distance", ReportRun(3.3, documents=4, tokens=256), rotary=True),
        "frequencies": ClaimRun(
            "frequencies", ReportRun(31.0, documents=4, tokens=128, options=unrotated), rotary=True
        ),
        "massive": ClaimRun("frequencies", ReportRun(15.0, documents=4, tokens=256, options=massive), rotary=True),
        "retrieval": ClaimRun("frequencies", ReportRun(20.0, documents=4, tokens=256, options=retrieval), rotary=True),
        "words": ClaimRun("perturb", ReportRun(4.4, documents=8, tokens=256, options=words)),
        "positions": ClaimRun("perturb", ReportRun(11.0, documents=4, tokens=192, options=swaps)),
        "residual": ClaimRun("residual", ReportRun(9.5, documents=4, tokens=256, options=additive)),
        # About 100 tokens for each of two kinds in two sizes.
        "prompts": ClaimRun("prompts", ReportRun(2.0, documents=4 * prompts, tokens=100, options=asked)),
        "extend": ClaimRun("extend"),
    }


@dataclass(frozen=True)
class Judgement:
    """All claims judged on one model.

    Attributes:
        data: Model, claims with numbers, controls and verdicts, runs and versions, as plain JSON.
    """

    data: dict[str, Any]

    @property
    def verdicts(self) -> dict[int, str]:
        """The verdict on each claim by number; "holds if" with its condition."""
        return {claim["number"]: verdict_words(claim) for claim in self.data["claims"]}

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return everything about one claim."""
        known: dict[int, dict[str, Any]] = {claim["number"]: claim for claim in self.data["claims"]}
        if number not in known:
            raise KeyError(f"claim {number} is not in this judgement: choose from {', '.join(map(str, known))}")
        return known[number]

    def only(self, numbers: Sequence[int]) -> Judgement:
        """Return the same of some claims, or of all if no numbers are given."""
        known = {claim["number"] for claim in self.data["claims"]}
        for number in numbers:
            if number not in known:
                listed = ", ".join(map(str, sorted(known)))
                raise ConfigError(f"claim {number} is not in the result of {self.data['model']}: choose from {listed}")
        kept = [claim for claim in self.data["claims"] if not numbers or claim["number"] in numbers]
        return Judgement({**self.data, "claims": kept})

    def __repr__(self) -> str:
        """Return model and verdicts, one per line."""
        lines = [f"{number:>2}. {verdict}" for number, verdict in self.verdicts.items()]
        return "\n".join([f"Judgement of {self.data['model']}", *lines])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result as a JSON file."""
        path = output_file(path, name="the claims")
        make_folder(path.parent)
        write_file(path, readable_json(self.data))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Judgement:
        """Read what :meth:`save` wrote."""
        data = parse_object(read_user_file(path, name="the claims")) or {}
        if data.get("wherewhat_claims") != FORMAT:
            raise ConfigError(f"{path} is not a file of judged claims: write one with wherewhat claims")
        wrong = _wrong_field(data, _FIELDS)
        if wrong:
            raise ConfigError(f"the claims {path} are damaged at {wrong}: write them again with wherewhat claims")
        return cls(dict(data))


_NUMBER: dict[str, Any] = {**dict.fromkeys(("mean", "low", "high"), (int, float, None)), "n": (int,)}
_FIELDS: dict[str, Any] = {
    "model": (str,),
    "weights": (str,),
    "documents?": (list,),
    "claims": [
        {
            "number": (int,),
            **dict.fromkeys(("verdict", "condition", "statement", "source", "change", "title?"), (str,)),
            "notes": [(str,)],
            "runs": [(str,)],
            "numbers": [{**_NUMBER, "title": (str,), "control": (int, float, None), "control_title": (str,)}],
            "parts": [
                {
                    "statement": (str,),
                    "outcome": (bool, None),
                    "bounds?": [{**_NUMBER, "outcome": (bool, None), "side": (str,), "threshold": (int, float)}],
                }
            ],
            "stability?": {
                "over": (str,),
                "verdict": (str,),
                "changed": (int, float, None),
                "resamples": (int,),
                "verdicts": (dict,),
            },
        }
    ],
}
"""Types of the fields of a file that are shown; those of later versions end in a question mark."""


def _wrong_field(value: Any, types: Any, at: str = "") -> str:
    """Return the place of a value that has another type, or is missing; empty if there is none."""
    if isinstance(types, tuple):
        allowed = tuple(type(None) if kind is None else kind for kind in types)
        right = isinstance(value, allowed) and (bool in types or not isinstance(value, bool))
        return "" if right else at
    if isinstance(types, list):
        if not isinstance(value, list):
            return at
        return next(filter(None, (_wrong_field(x, types[0], f"{at}[{i}]") for i, x in enumerate(value))), "")
    if not isinstance(value, Mapping):
        return at
    for field, inner in types.items():
        name = field.rstrip("?")
        if name in value or name == field:
            wrong = _wrong_field(value.get(name, ...), inner, f"{at}.{name}".lstrip("."))
            if wrong:
                return wrong
    return ""


@checked(model=model_request, files=file_names, texts=documents_of)
def judge_claims(
    model: ModelRequest | MemoryModel,
    *,
    claims: Sequence[int] = (),
    files: Sequence[str] | None = None,
    texts: tuple[Document, ...] | None = None,
    documents: int | None = None,
    tokens: int | None = None,
    prompts: int = PROMPTS,
    controls: int = 1,
    out: str | os.PathLike[str] = "runs",
    again: bool = False,
    progress: Progress | None = None,
) -> Judgement:
    """Judge the claims of papers about position and content in attention on one model.

    Measurements are run on a few documents, each in its own run directory: finished ones are not computed again, and
    those of a report with the same documents and tokens are shared. Each verdict is tested by resampling the documents.

    Args:
        model: A name, folder or file, a model of transformers in memory, or what :func:`wherewhat.load` returned. A
            model in memory brings its tokenizer as a pipeline, or as :class:`~wherewhat.runs.request.MemoryModel`.
        claims: Numbers of the claims; all by default.
        files: Files, folders or ``-``; None for the embedded text.
        texts: Strings, documents or token ids instead.
        documents: Documents of each measurement; by default the first four, and eight for perturbed words.
        tokens: Tokens of each for the decomposition; 512 by default, or as many as model and texts have. Others use
            256 at most.
        prompts: Prompts of each kind and size.
        controls: Random control models to draw, with consecutive seeds, for claims whose verdict rests on one.
        out: Folder of run directories.
        again: Measure anew what is finished there.
        progress: Progress callback; silent by default.
    """
    progress, out, models = progress or Silent(), output_folder(out, name="--out"), LastModel()
    work = Work(progress)
    chosen = _chosen(claims)
    for option, value in (("--prompts", prompts), ("--controls", controls)):
        if value < 1:
            raise ConfigError(f"{option} is {value}: at least 1 is needed")
    check_at_most(MOST_DOCUMENTS, **{"--prompts": prompts, "--controls": controls})
    Request(measurement="axes", documents=documents, tokens=tokens)  # raises for wrong values
    inputs = given_text(files, documents=documents, out=out, texts=texts, default=_MOST_DOCUMENTS)
    rules = [claim.rule for claim in chosen if claim.rule is not None]
    names = {"axes", *(name for rule in rules for name in (*rule.needs, *rule.also))}
    with progress.watch(work):
        _, seen, pace = seen_model(
            model, inputs.documents, tokens=tokens, out=out, work=work, models=models, again=again
        )
        inputs.keep()
        wanted = {name: claim_run for name, claim_run in _runs(prompts, seen.capacity).items() if name in names}
        length = len(seen.passages[0].tokens)
        requests, scheduled, reasons = _schedule(
            model, seen.capacity, inputs, wanted, documents=documents, tokens=length
        )
        scheduled += _other_draws(scheduled, requests, chosen, controls)
        runs = measure(scheduled, out=out, pace=pace, work=work, models=models, tolerated=_TOLERATED, again=again)
        reasons |= {
            name: why for name, request in requests.items() for refused, why in runs.missing if refused == request
        }
        evidence = Evidence(runs, requests, reasons, seen.capacity.planes)
        drawn = [evidence.find("axes", "random", draw=draw) for draw in range(controls)]
        evidence = replace(evidence, controls=max(1, len(drawn) - drawn.count(None)))
        work.begin("judging the claims on resampled documents")
        verdicts = [verdict_json(verdict) for verdict in judge_stably(chosen, evidence, seed=model.seed)]
    command = _command(
        model, inputs, claims=claims, documents=documents, tokens=tokens, prompts=prompts, controls=controls
    )
    return Judgement(_result(runs, verdicts, command))


def _chosen(numbers: Sequence[int]) -> list[Claim]:
    """Return the claims with these numbers, or all of them."""
    known = {claim.number: claim for claim in CLAIMS}
    for number in numbers:
        if number not in known:
            raise ConfigError(f"there is no claim {number}: choose from 1 to {max(known)}")
    return [claim for claim in CLAIMS if not numbers or claim.number in numbers]


def _schedule(
    model: ModelRequest | MemoryModel,
    capacity: Capacity,
    inputs: GivenText,
    wanted: Mapping[str, ClaimRun],
    *,
    documents: int | None,
    tokens: int,
) -> tuple[dict[str, Request], list[ScheduledRun], dict[str, str]]:
    """Return the request of each run by name, all runs in order with their control models, and reasons for others."""
    requests: dict[str, Request] = {}
    reasons: dict[str, str] = {}
    scheduled = []
    for name, claim_run in wanted.items():
        measurement = find_measurement(claim_run.measurement)
        run = claim_run.run or view_of(measurement).report_run(capacity, tokens=tokens)
        if claim_run.rotary and not capacity.rotates:
            run = "no layer of this model rotates its queries and keys"
        if not isinstance(run, ReportRun):
            reasons[name] = run or f"{claim_run.measurement} was not measured"
            continue
        length = run_length(run, tokens)
        count = documents or min(max(run.documents or 0, _DOCUMENTS), len(inputs.documents))
        request = Request(measurement=claim_run.measurement, model=model, beyond=run.beyond, options=run.options)
        if isinstance(measurement, QuestionMeasurement):
            count = run.documents or 0
        elif claim_run.prompts is not None:
            count = documents or run.documents or _DOCUMENTS
            request = replace(request, prompts=claim_run.prompts, documents=count, tokens=length)
        else:
            request = replace(request, files=inputs.sources, texts=inputs.texts, documents=count, tokens=length)
        requests[name] = request
        scheduled.append((ScheduledRun(request, run.passes * count * length), run))
    return requests, with_controls(scheduled), reasons


def _other_draws(
    scheduled: Sequence[ScheduledRun], requests: Mapping[str, Request], claims: Sequence[Claim], controls: int
) -> list[ScheduledRun]:
    """Return the runs on further random control models that claims read, one model after the other."""
    rules = [claim.rule for claim in claims if claim.drawn and claim.rule is not None]
    names = {name for rule in rules for name in (*rule.needs, *rule.also)}
    first = [request.with_weights("random") for name, request in requests.items() if name in names]
    return [
        replace(item, request=item.request.with_weights("random", draw=draw))
        for draw in range(1, controls)
        for item in scheduled
        if item.request in first
    ]


def _result(runs: Runs, verdicts: list[dict[str, Any]], command: str | None) -> dict[str, Any]:
    """Return the content of the result; nothing in it depends on when or how often the command was started."""
    _, first = runs.first
    config = first.directory.config
    used = {name for verdict in verdicts for name in verdict["runs"]}
    commands = {run.directory.path.name: request.command() for request, run in runs.finished}
    shown = {run.directory.path.name: run for run in runs.shown}
    result = {
        "wherewhat_claims": FORMAT,
        **{
            name: config[name]
            for name in ("model", "weights", "weights_hash", "tokenizer_hash", "dtype", "device", "seed")
        },
        "tokens": config["tokens"],
        "documents": config["documents"],
        "claims": verdicts,
        "runs": [
            {
                "name": name,
                "measurement": run.measurement.name,
                "weights": run.directory.config["weights"],
                "config_hash": run.directory.config_hash,
                "command": commands.get(name),
            }
            for name, run in shown.items()
            if name in commands or name in used
        ],
        "left_out": list(runs.left_out),
        "versions": collect_versions(),
        "command": command,
    }
    return cast("dict[str, Any]", plain_json(result))


def _command(
    model: ModelRequest | MemoryModel,
    inputs: GivenText,
    *,
    claims: Sequence[int],
    documents: int | None,
    tokens: int | None,
    prompts: int,
    controls: int,
) -> str | None:
    """Return the command that gives the same result; None if model or texts are only in memory."""
    if not isinstance(model, ModelRequest) or inputs.texts is not None:
        return None
    words = ["wherewhat", "claims", os.fspath(model.model)]
    for number in claims:
        words += ["--claim", str(number)]
    for source in inputs.sources or ():
        words += ["--text", source]
    for name, value, default in (
        ("documents", documents, None),
        ("tokens", tokens, None),
        ("prompts", prompts, PROMPTS),
        ("controls", controls, 1),
    ):
        words += [] if value == default else [f"--{name}", str(value)]
    return shlex.join([*words, *given_options(model, leave_out=("model",))])
