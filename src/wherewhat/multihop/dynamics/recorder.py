"""The trainer's witness: looks at the model every so many steps, and keeps what it sees in one small file."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

from wherewhat.errors import ConfigError, StoreError
from wherewhat.multihop.dynamics.held_out import HeldOut
from wherewhat.multihop.dynamics.records import Dynamics, make_record
from wherewhat.multihop.dynamics.scoring import score_model
from wherewhat.multihop.model import LabModel


class Recorder:
    """Scores a model whenever it is called with a step; give it to the trainer as ``record``.

    The file is written whole after every record, before the trainer can keep a later state: a training that is resumed
    finds all records up to where it goes on. A step that is there already is not scored again.

    Args:
        held_out: The sequences to see the model on.
        path: File to keep the records in; what it holds already of the same is gone on with. None to keep them in
            memory alone.
        identity: Words for what is trained; records of something else are refused.
        along_path: Also score the other tokens that hops leave from.

    Raises:
        ConfigError: If the file holds records of something else.
        StoreError: If it cannot be read.
    """

    def __init__(
        self, held_out: HeldOut, *, path: Path | None = None, identity: str = "", along_path: bool = False
    ) -> None:
        self.held_out = held_out
        self.path = path
        self._along_path = along_path
        digest = hashlib.blake2b(repr((identity, held_out.fingerprint, along_path)).encode(), digest_size=7)
        self._identity = int.from_bytes(digest.digest())
        self._records: Dynamics | None = None
        if path is not None and path.exists():
            self._records = Dynamics.read(path)
            if int(self._records.about[0]) != self._identity:
                raise ConfigError(
                    f"{path} holds records of another training or other sequences: choose another file, or remove it"
                )

    def __call__(self, step: int, model: LabModel) -> None:
        """Record ``model`` after ``step`` steps.

        Raises:
            ConfigError: If the model has another shape than those recorded before.
            MeasureError: If its logits are not finite.
            StoreError: If the file cannot be written.
        """
        if self._records is not None and step in self._records.steps:
            return
        scores = score_model(model, self.held_out, path=self._along_path)
        record = make_record(step, scores, self.held_out, identity=self._identity)
        if self._records is not None:
            _check_same(self._records, record)
            record = self._records.join(record)
        if self.path is not None:
            record.write(self.path)
        self._records = record

    @property
    def dynamics(self) -> Dynamics:
        """All records.

        Raises:
            StoreError: If there are none.
        """
        if self._records is None:
            raise StoreError("nothing has been recorded: give the recorder to a training as its record")
        return self._records


def _check_same(there: Dynamics, here: Dynamics) -> None:
    """Refuse to mix models of different shapes.

    Raises:
        ConfigError: If they differ.
    """
    for field in fields(Dynamics):
        before, now = (getattr(x, field.name).shape[1:] for x in (there, here))
        if before != now:
            raise ConfigError(
                f"a record with {field.name} of shape {tuple(now)} does not continue those of shape {tuple(before)}: "
                "record every model in a file of its own"
            )
