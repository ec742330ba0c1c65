"""Texts as named documents: the embedded English default, files, folders, JSON lines and standard input."""

from wherewhat.text.document import Document, text_hash
from wherewhat.text.embedded import embedded_documents
from wherewhat.text.reading import read_documents

__all__ = ["Document", "embedded_documents", "read_documents", "text_hash"]
