"""wherewhat shows how a language model separates *where* from *what* in its attention.

Importing it is light: models, files and the terminal are touched only by the names that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.errors import WherewhatError
from wherewhat.lazily import lazy_names

if TYPE_CHECKING:
    from wherewhat.capturing import LayerAttention, Proof, capture, intervene, prove
    from wherewhat.figures import Result, run
    from wherewhat.loading import load
    from wherewhat.pipeline import ModelRequest, Request
    from wherewhat.store import RunDirectory
    from wherewhat.text import Document, embedded_documents, read_documents

_HOMES = {
    "Document": "wherewhat.text",
    "LayerAttention": "wherewhat.capturing",
    "ModelRequest": "wherewhat.pipeline",
    "Proof": "wherewhat.capturing",
    "Request": "wherewhat.pipeline",
    "Result": "wherewhat.figures",
    "RunDirectory": "wherewhat.store",
    "WherewhatError": "wherewhat.errors",
    "capture": "wherewhat.capturing",
    "embedded_documents": "wherewhat.text",
    "intervene": "wherewhat.capturing",
    "load": "wherewhat.loading",
    "prove": "wherewhat.capturing",
    "read_documents": "wherewhat.text",
    "run": "wherewhat.figures",
}

__all__ = [
    "Document",
    "LayerAttention",
    "ModelRequest",
    "Proof",
    "Request",
    "Result",
    "RunDirectory",
    "WherewhatError",
    "capture",
    "embedded_documents",
    "intervene",
    "load",
    "prove",
    "read_documents",
    "run",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
