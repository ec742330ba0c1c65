"""The trainer's witness: looks at the model at chosen steps, and keeps what it sees and how long that took."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from wherewhat.encodings.recipe import WatchConfig
from wherewhat.encodings.records import Records
from wherewhat.encodings.scoring import AXES, HeldOut, score
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.steps import products
from wherewhat.multihop.subject import LabSubject


class Recorder:
    """Scores a model whenever it is called with a step; give it to the trainer as ``record``.

    The file is written whole after every record, before the trainer can keep a later state: a training that is resumed
    finds all records up to where it goes on. A step that is there already is not scored again.

    Args:
        held_out: What to look at the model on.
        config: How much of it.
        path: File to keep the records in; what it holds already is gone on with.
    """

    def __init__(self, held_out: HeldOut, config: WatchConfig, *, path: Path) -> None:
        self.records = Records.read(path) if path.exists() else Records()
        self.each: dict[int, float] = {}
        self._held_out, self._config, self._path = held_out, config, path

    def __call__(self, step: int, model: LabModel) -> None:
        """Record ``model`` after ``step`` steps, in full float32 whatever it is trained in.

        Raises:
            MeasureError: If its logits are not finite.
            StoreError: If the file cannot be written.
        """
        if step in self.records:
            return
        wait_for(model)  # for what training has launched, which is not recording
        started = time.perf_counter()
        subject = LabSubject(model, trained_length=self._held_out.windows.shape[1])
        with torch.no_grad(), products("highest"):
            found = score(subject, self._held_out, self._config)
        self.records = self.records.joined(step, found, AXES)
        self.records.write(self._path)
        self.each[step] = time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """How long all records of this process took; the first pays for what is compiled and set up."""
        return sum(self.each.values())


def wait_for(model: LabModel) -> None:
    """Wait until a GPU has done all that it was given."""
    if model.embedding.is_cuda:
        torch.cuda.synchronize(model.embedding.device)
