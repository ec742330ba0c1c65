"""wherewhat shows how a language model separates *where* from *what* in its attention.

Importing it is light: models, files and the terminal are touched only by the names that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wherewhat.errors import WherewhatError

if TYPE_CHECKING:
    from wherewhat.capturing import LayerAttention, Proof, capture, intervene, prove
    from wherewhat.loading import load
    from wherewhat.pipeline import ModelRequest, Request, run
    from wherewhat.store import RunDirectory
    from wherewhat.text import Document, embedded_documents, read_documents

_HOMES = {
    "Document": "wherewhat.text",
    "LayerAttention": "wherewhat.capturing",
    "ModelRequest": "wherewhat.pipeline",
    "Proof": "wherewhat.capturing",
    "Request": "wherewhat.pipeline",
    "RunDirectory": "wherewhat.store",
    "capture": "wherewhat.capturing",
    "embedded_documents": "wherewhat.text",
    "intervene": "wherewhat.capturing",
    "load": "wherewhat.loading",
    "prove": "wherewhat.capturing",
    "read_documents": "wherewhat.text",
    "run": "wherewhat.pipeline",
}

__all__ = [
    "Document",
    "LayerAttention",
    "ModelRequest",
    "Proof",
    "Request",
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


def __getattr__(name: str) -> Any:
    """Import the module that holds ``name`` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
