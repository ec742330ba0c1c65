"""Curves for TensorBoard, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Board:
    """Writes scalars into a folder; does nothing without a folder or without TensorBoard.

    Args:
        folder: Where to; None for nowhere.
        first: Steps done already: what was written for later ones by a process that died is hidden.
    """

    def __init__(self, folder: Path | None, *, first: int) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder), purge_step=first + 1)

    def add(self, step: int, **values: float) -> None:
        """Write values of a step by name."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
