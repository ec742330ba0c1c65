"""Scores and accuracy by training step, and the recorder that collects them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, StoreError
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.scores import HeadScores, HeldOut, score_model
from wherewhat.runs.profiles import Profile, ProfileFile, profile_name, write_profiles

_HEAD = ("step", "layer", "head")
_AXES: Mapping[str, tuple[str, ...]] = {
    "steps": ("step",),
    "accuracy": ("step", "hop"),
    "loss": ("step", "hop"),
    **dict.fromkeys(("s_pos", "s_sym", "s_pos_spread", "s_sym_spread", "s_pos_path", "s_sym_path"), _HEAD),
    **dict.fromkeys(("entropy", "mean_frequency", "r", "r_pooled"), _HEAD),
    "use": (*_HEAD, "plane"),
    "hops": ("hop",),
    "counts": ("hop",),
    "about": ("number",),
}
_FIXED = ("hops", "counts", "about")
"""What does not change from step to step."""


@dataclass(frozen=True)
class Dynamics:
    """One model's records, in the order of steps; float32 but for whole numbers.

    Attributes:
        steps: Steps done at each record, ascending, ``(records,)`` int64.
        accuracy: Share of right answers by number of hops, ``(records, hops)``.
        loss: Mean cross-entropy of the answers, likewise.
        s_pos: Positional score at the last token, mean over sequences, ``(records, layers, heads)``.
        s_sym: Symbolic score, likewise.
        s_pos_spread: Standard deviation of the positional score over sequences, likewise.
        s_sym_spread: Of the symbolic score.
        s_pos_path: Positional score over the tokens that hops leave from, likewise; NaN if not asked for.
        s_sym_path: Symbolic score, likewise.
        entropy: Entropy of attention at the last token in nats, mean over sequences, likewise.
        mean_frequency: Mean frequency ID, weighted by use, likewise.
        r: Correlation with three additive axes, mean over sequences, likewise.
        r_pooled: The same from the errors of all sequences together, likewise.
        use: Largest absolute logit contribution of each plane, ``(records, layers, heads, planes)``.
        hops: The numbers of hops, ``(hops,)`` int64.
        counts: Questions of each, ``(hops,)`` int64.
        about: Fingerprint of what was recorded, number of sequences that heads were scored on, and their tokens,
            ``(3,)`` int64.
    """

    steps: Tensor
    accuracy: Tensor
    loss: Tensor
    s_pos: Tensor
    s_sym: Tensor
    s_pos_spread: Tensor
    s_sym_spread: Tensor
    s_pos_path: Tensor
    s_sym_path: Tensor
    entropy: Tensor
    mean_frequency: Tensor
    r: Tensor
    r_pooled: Tensor
    use: Tensor
    hops: Tensor
    counts: Tensor
    about: Tensor

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def overall(self) -> Tensor:
        """Share of right answers of all, ``(records,)`` float64."""
        return (self.accuracy.double() * self.counts).sum(-1) / self.counts.sum()

    @property
    def r_noise(self) -> float:
        """The r that logits of pure noise would have: what to read ``r`` against."""
        n = int(self.about[2])
        return float(min(1.0, (3 * n - 4) / (n * (n + 1) / 2 - 1)) ** 0.5)

    def join(self, other: Dynamics) -> Dynamics:
        """These records and others of the same model, in the order of steps; steps that are here stay as they are."""
        new = ~torch.isin(other.steps, self.steps)
        order = torch.cat([self.steps, other.steps[new]]).argsort()
        joined = {
            name: getattr(self, name)
            if name in _FIXED
            else torch.cat([getattr(self, name), getattr(other, name)[new]])[order]
            for name in _AXES
        }
        return Dynamics(**joined)

    def write(self, path: Path) -> None:
        """Write to a file, atomically."""
        write_profiles(path, {profile_name(None, None, n): Profile(getattr(self, n), a) for n, a in _AXES.items()})

    @classmethod
    def read(cls, path: Path) -> Dynamics:
        """Read what :meth:`write` wrote."""
        file = ProfileFile(path)
        names = {name: profile_name(None, None, name) for name in _AXES}
        if any(full not in file or file.axes(full) != _AXES[name] for name, full in names.items()):
            raise StoreError(f"cannot read {path}: it holds no records of a model that learns")
        return cls(**{name: file[full] for name, full in names.items()})


def make_record(step: int, scores: HeadScores, held_out: HeldOut, *, identity: int) -> Dynamics:
    """One record.

    Args:
        step: Steps done.
        scores: The model then.
        held_out: The sequences it was seen on.
        identity: A number that says what is recorded.
    """

    def one(values: Tensor) -> Tensor:
        return values[None].float()

    return Dynamics(
        steps=torch.tensor([step]),
        accuracy=one(scores.accuracy.shares),
        loss=one(scores.accuracy.loss),
        s_pos=one(scores.s_pos.mean(-1)),
        s_sym=one(scores.s_sym.mean(-1)),
        s_pos_spread=one(scores.s_pos.std(-1, correction=0)),
        s_sym_spread=one(scores.s_sym.std(-1, correction=0)),
        s_pos_path=one(scores.s_pos_path),
        s_sym_path=one(scores.s_sym_path),
        entropy=one(scores.entropy.mean(-1)),
        mean_frequency=one(scores.mean_frequency),
        r=one(scores.r.nanmean(-1)),
        r_pooled=one(scores.r_pooled),
        use=one(scores.use),
        hops=torch.tensor(scores.accuracy.hops),
        counts=scores.accuracy.counts,
        about=torch.tensor([identity, held_out.scored, held_out.sequences.tokens.shape[1]]),
    )


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
        """Record ``model`` after ``step`` steps."""
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
        """All records."""
        if self._records is None:
            raise StoreError("nothing has been recorded: give the recorder to a training as its record")
        return self._records


def _check_same(there: Dynamics, here: Dynamics) -> None:
    """Refuse to mix models of different shapes."""
    for field in fields(Dynamics):
        before, now = (getattr(x, field.name).shape[1:] for x in (there, here))
        if before != now:
            raise ConfigError(
                f"a record with {field.name} of shape {tuple(now)} does not continue those of shape {tuple(before)}: "
                "record every model in a file of its own"
            )
