"""wherewhat shows how a language model separates *where* from *what* in its attention.

Importing it is light: models, files and the terminal are touched only by the names that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.errors import WherewhatError
from wherewhat.imports import lazy_names

if TYPE_CHECKING:
    from wherewhat.caches.limited_cache import planned
    from wherewhat.caches.plan import Plan
    from wherewhat.captures.attention import LayerAttention
    from wherewhat.captures.proof import Proof, capture, intervene, prove
    from wherewhat.lengths import register_length_method
    from wherewhat.measures.layers import attention_statistics, axes, frequencies, planes, swaps
    from wherewhat.measures.measurement import (
        ChoicesMeasurement,
        DocumentsMeasurement,
        LayerMeasurement,
        Measurement,
        QuestionMeasurement,
        Text,
        TextMeasurement,
    )
    from wherewhat.measures.registry import register
    from wherewhat.models.source import SupportedModel, supported_models
    from wherewhat.plans.planner import make_plan
    from wherewhat.plans.triattention import save_triattention
    from wherewhat.report.claims.judgement import Judgement, judge_claims
    from wherewhat.report.report import make_report
    from wherewhat.report.result import Result, measure, run
    from wherewhat.runs.directory import RunDirectory
    from wherewhat.runs.records import TrainingRun
    from wherewhat.runs.request import ModelRequest, Request
    from wherewhat.runs.subject import attention, load
    from wherewhat.runs.trainer import TrainerCallback
    from wherewhat.runs.training import TrainingRecorder
    from wherewhat.scores import Column, Metric, Scores
    from wherewhat.text.documents import Document, embedded_documents
    from wherewhat.text.files import read_documents

_HOMES = {
    "ChoicesMeasurement": "wherewhat.measures.measurement",
    "Column": "wherewhat.scores",
    "Document": "wherewhat.text.documents",
    "DocumentsMeasurement": "wherewhat.measures.measurement",
    "Judgement": "wherewhat.report.claims.judgement",
    "LayerAttention": "wherewhat.captures.attention",
    "LayerMeasurement": "wherewhat.measures.measurement",
    "Measurement": "wherewhat.measures.measurement",
    "Metric": "wherewhat.scores",
    "ModelRequest": "wherewhat.runs.request",
    "Plan": "wherewhat.caches.plan",
    "Proof": "wherewhat.captures.proof",
    "QuestionMeasurement": "wherewhat.measures.measurement",
    "Request": "wherewhat.runs.request",
    "Result": "wherewhat.report.result",
    "RunDirectory": "wherewhat.runs.directory",
    "Scores": "wherewhat.scores",
    "SupportedModel": "wherewhat.models.source",
    "Text": "wherewhat.measures.measurement",
    "TextMeasurement": "wherewhat.measures.measurement",
    "TrainerCallback": "wherewhat.runs.trainer",
    "TrainingRecorder": "wherewhat.runs.training",
    "TrainingRun": "wherewhat.runs.records",
    "WherewhatError": "wherewhat.errors",
    "attention": "wherewhat.runs.subject",
    "attention_statistics": "wherewhat.measures.layers",
    "axes": "wherewhat.measures.layers",
    "capture": "wherewhat.captures.proof",
    "embedded_documents": "wherewhat.text.documents",
    "frequencies": "wherewhat.measures.layers",
    "intervene": "wherewhat.captures.proof",
    "judge_claims": "wherewhat.report.claims.judgement",
    "load": "wherewhat.runs.subject",
    "make_plan": "wherewhat.plans.planner",
    "make_report": "wherewhat.report.report",
    "measure": "wherewhat.report.result",
    "planes": "wherewhat.measures.layers",
    "planned": "wherewhat.caches.limited_cache",
    "prove": "wherewhat.captures.proof",
    "read_documents": "wherewhat.text.files",
    "register": "wherewhat.measures.registry",
    "register_length_method": "wherewhat.lengths",
    "run": "wherewhat.report.result",
    "save_triattention": "wherewhat.plans.triattention",
    "supported_models": "wherewhat.models.source",
    "swaps": "wherewhat.measures.layers",
}

__all__ = [
    "ChoicesMeasurement",
    "Column",
    "Document",
    "DocumentsMeasurement",
    "Judgement",
    "LayerAttention",
    "LayerMeasurement",
    "Measurement",
    "Metric",
    "ModelRequest",
    "Plan",
    "Proof",
    "QuestionMeasurement",
    "Request",
    "Result",
    "RunDirectory",
    "Scores",
    "SupportedModel",
    "Text",
    "TextMeasurement",
    "TrainerCallback",
    "TrainingRecorder",
    "TrainingRun",
    "WherewhatError",
    "attention",
    "attention_statistics",
    "axes",
    "capture",
    "embedded_documents",
    "frequencies",
    "intervene",
    "judge_claims",
    "load",
    "make_plan",
    "make_report",
    "measure",
    "planes",
    "planned",
    "prove",
    "read_documents",
    "register",
    "register_length_method",
    "run",
    "save_triattention",
    "supported_models",
    "swaps",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, folders=("lengths",))
