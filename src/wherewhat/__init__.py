"""wherewhat shows how a language model separates *where* from *what* in its attention.

Importing it is light: models, files and the terminal are touched only by the names that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.errors import WherewhatError
from wherewhat.imports import lazy_names

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention
    from wherewhat.captures.proof import Proof, capture, intervene, prove
    from wherewhat.models.catalog import SupportedModel, supported_models
    from wherewhat.report.result import Result, run
    from wherewhat.runs.directory import RunDirectory
    from wherewhat.runs.execution import load
    from wherewhat.runs.request import ModelRequest, Request
    from wherewhat.text.documents import Document, embedded_documents
    from wherewhat.text.files import read_documents

_HOMES = {
    "Document": "wherewhat.text.documents",
    "LayerAttention": "wherewhat.captures.attention",
    "ModelRequest": "wherewhat.runs.request",
    "Proof": "wherewhat.captures.proof",
    "Request": "wherewhat.runs.request",
    "Result": "wherewhat.report.result",
    "RunDirectory": "wherewhat.runs.directory",
    "SupportedModel": "wherewhat.models.catalog",
    "WherewhatError": "wherewhat.errors",
    "capture": "wherewhat.captures.proof",
    "embedded_documents": "wherewhat.text.documents",
    "intervene": "wherewhat.captures.proof",
    "load": "wherewhat.runs.execution",
    "prove": "wherewhat.captures.proof",
    "read_documents": "wherewhat.text.files",
    "run": "wherewhat.report.result",
    "supported_models": "wherewhat.models.catalog",
}

__all__ = [
    "Document",
    "LayerAttention",
    "ModelRequest",
    "Proof",
    "Request",
    "Result",
    "RunDirectory",
    "SupportedModel",
    "WherewhatError",
    "capture",
    "embedded_documents",
    "intervene",
    "load",
    "prove",
    "read_documents",
    "run",
    "supported_models",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
