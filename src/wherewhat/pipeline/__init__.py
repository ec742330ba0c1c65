"""The pipeline: text + model → capture → measure → store."""

from wherewhat.pipeline.request import ModelRequest, Request
from wherewhat.pipeline.running import run

__all__ = ["ModelRequest", "Request", "run"]
