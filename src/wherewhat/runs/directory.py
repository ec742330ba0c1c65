"""Crash-safe run directories: results of one configuration, computed once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from wherewhat.boundary import user_path
from wherewhat.errors import StoreError
from wherewhat.files import check_writable, hold, remove, remove_temporaries, write_file
from wherewhat.hashes import (
    JSON,
    config_hash,
    fingerprints,
    plain_json,
    read_object,
    readable_json,
    run_folder_name,
    write_sealed,
)
from wherewhat.options import checked
from wherewhat.runs.layout import (
    COMPLETE,
    CONFIG,
    LOCK,
    PARTS,
    PROFILES,
    PROVENANCE,
    SCORES,
    Parts,
    PartTimes,
    Provenance,
    check_place,
    provenance_json,
    stored_config_hash,
    take_away_if_empty,
    verify,
)
from wherewhat.runs.schema import SCHEMA_VERSION, ProfileFile, join_profiles, join_scores, read_scores, stored_scores
from wherewhat.scores import Scores

if TYPE_CHECKING:
    import pyarrow as pa


_log = logging.getLogger(__name__)


class RunDirectory:
    """One run: a configuration, its finished parts, and in the end its scores and profiles.

    Examples:
        >>> run = RunDirectory.open(Path("runs"), name="entropy-smollm2", config=config)
        >>> with run.lock():
        ...     for key in keys:
        ...         if not run.has(key):
        ...             run.save(key, compute(key), seconds=seconds)
        ...     run.finish(keys, provenance=provenance)
        >>> run.scores()

    Attributes:
        path: The directory.
        config: The resolved configuration.
        config_hash: Its sha256; the first 12 digits end the directory's name.
    """

    def __init__(self, path: Path, config: Mapping[str, JSON]) -> None:
        """Use `open` or `load`."""
        self.path = path
        self.config = config
        self.config_hash = config_hash(config)
        self._parts = Parts(path / PARTS, config_hash=self.config_hash)
        self._keys: frozenset[str] | None = None  # of the complete run; None while it is not complete
        self._locked = False

    @classmethod
    @checked()
    def open(cls, parent: str | os.PathLike[str], *, name: str, config: Mapping[str, JSON]) -> RunDirectory:
        """Find the run of `config` under `parent`, finished, begun or new; write nothing yet.

        Args:
            parent: The folder of run directories; created when the lock is taken.
            name: Readable beginning of the directory's name.
            config: The resolved configuration: everything the numbers depend on.
        """
        plain = cast("dict[str, JSON]", plain_json(config))
        run = cls(user_path(parent, name="the folder of runs") / run_folder_name(name, config_hash(plain)), plain)
        check_place(run.path, config_hash=run.config_hash)
        run._keys, _ = verify(run.path, config_hash=run.config_hash)
        if not run.is_complete:  # a finished run can be read from a read-only folder
            check_writable(run.path)
        return run

    @classmethod
    @checked()
    def load(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Open a finished run for reading; the folder may have been renamed or moved."""
        path = user_path(path, name="the run directory", error=StoreError)
        config = read_object(path / CONFIG)
        if config is None or stored_config_hash(path) is None:
            raise StoreError(f"{path} is not a run directory: it has no readable {CONFIG}")
        run = cls(path, config)
        run._keys, problem = verify(path, config_hash=run.config_hash)
        if problem is not None:
            raise StoreError(f"{path}: {problem}; run its command again to redo what is missing")
        return run

    @property
    def is_complete(self) -> bool:
        """Whether the run was finished and intact when last checked: on opening, locking and finishing."""
        return self._keys is not None

    @contextmanager
    def lock(self, *, timeout: float | None = None, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Make this process the only writer; parts that other processes finished meanwhile are found afterwards.

        A run directory without a finished part is removed when the lock is released.

        Args:
            timeout: Seconds to wait for another process; None waits without limit.
            on_wait: Called once with one line before waiting.
        """
        if self._locked:
            raise RuntimeError(f"{self.path} is locked by this object already")
        with hold(self.path / LOCK, timeout=timeout, on_wait=on_wait):
            try:
                self._prepare()
                self._locked = True
                yield
            finally:
                self._locked = False
                take_away_if_empty(self.path)

    @checked()
    def has(self, key: str) -> bool:
        """Whether the part `key` is finished and undamaged; under the lock a damaged one is removed."""
        if self._keys is not None and key in self._keys:
            return True
        if self._parts.times(key) is not None:
            return True
        if self._locked:
            self._parts.discard_damaged(key)
        return False

    @checked()
    def save(self, key: str, scores: Scores, *, document: str | None = None, seconds: float) -> None:
        """Write the results of the part `key`.

        Args:
            key: Name of the part, such as its document's; any text.
            scores: Scores and curves, checked; see :meth:`wherewhat.Scores.checked`.
            document: Name of the document in the score table; None for all documents together.
            seconds: Wall time of the computation.
        """
        self._require_lock()
        if self.has(key):
            raise ValueError(f"the part {key!r} is finished already: ask has() first")
        source = {name: self.config.get(name) for name in ("measurement", "model", "weights", "seed")}
        self._parts.save(key, scores, source=source, document=document, seconds=seconds)

    def clear(self) -> None:
        """Remove all results, so that they are measured anew; the mark of a finished run goes first."""
        self._require_lock()
        self._keys = None
        for name in (COMPLETE, PARTS, SCORES, PROFILES, PROVENANCE):
            remove(self.path / name)
        self._parts.forget()

    @checked()
    def part(self, key: str) -> Scores:
        """Return scores and curves of the finished part `key`, before or after the run is finished."""
        self._checked_times(key)
        folder = self._parts.path(key)
        table = read_scores(folder / SCORES) if (folder / SCORES).exists() else None
        found = stored_scores(table, ProfileFile(folder / PROFILES))
        return next(iter(found.values()), Scores())

    def finish(self, keys: Iterable[str], *, provenance: Provenance, files: Iterable[str] = ()) -> None:
        """Join the parts into the run's files; the bytes do not depend on the order in which parts were finished.

        Args:
            keys: Names of all parts.
            provenance: Versions, hashes and device of the run.
            files: Other files in the directory that belong to the finished run, such as a trained model.
        """
        self._require_lock()
        wanted = sorted(set(keys))
        if not wanted:
            raise StoreError(f"{self.path}: a run needs at least one part")
        if self._keys == frozenset(wanted):
            return
        self._keys = None
        remove(self.path / COMPLETE)
        times = [self._checked_times(key, trust=len(wanted) == 1) for key in wanted]
        linked: dict[str, JSON] = {}
        made = [PROFILES]
        if len(wanted) == 1:  # the files of the run are those of the part, which are checked whenever they are read
            linked, made = self._parts.link(wanted[0], self.path), []
        else:
            folders = [self._parts.path(key) for key in wanted]
            tables = [folder / SCORES for folder in folders if (folder / SCORES).exists()]
            if tables:  # a run of parts without score rows does without pyarrow
                join_scores(self.path / SCORES, tables)
                made.append(SCORES)
            join_profiles(self.path / PROFILES, [folder / PROFILES for folder in folders])
        content = provenance_json(provenance, times, config_hash=self.config_hash)
        write_file(self.path / PROVENANCE, readable_json(content))
        seal: dict[str, JSON] = {
            "schema": SCHEMA_VERSION,
            "config_hash": self.config_hash,
            "parts": wanted,
            "files": {**linked, **fingerprints(self.path, [CONFIG, PROVENANCE, *made, *files])},
        }
        write_sealed(self.path / COMPLETE, seal)
        self._keys = frozenset(wanted)

    def scores(self) -> pa.Table:
        """Return the score table of the finished run."""
        self._require_complete()
        return read_scores(self.path / SCORES)

    def profiles(self) -> ProfileFile:
        """Return the curves of the finished run by name, each read on access."""
        self._require_complete()
        return ProfileFile(self.path / PROFILES)

    def provenance(self) -> dict[str, JSON]:
        """Return the content of `provenance.json` of the finished run."""
        self._require_complete()
        content = read_object(self.path / PROVENANCE)
        if content is None:
            raise StoreError(f"cannot read {self.path / PROVENANCE}: it is missing or damaged")
        return content

    def _prepare(self) -> None:
        remove_temporaries(self.path)
        self._parts.remove_leftovers()
        self._parts.forget()
        if stored_config_hash(self.path) != self.config_hash:
            write_file(self.path / CONFIG, readable_json(self.config))
        self._keys, problem = verify(self.path, config_hash=self.config_hash)
        if problem is not None and os.path.lexists(self.path / COMPLETE):
            _log.warning("%s: %s; its files are joined again from the parts", self.path, problem)
            write_file(self.path / CONFIG, readable_json(self.config))  # it may say the same in other bytes
            remove(self.path / COMPLETE)

    def _checked_times(self, key: str, *, trust: bool = False) -> PartTimes:
        # By default read again: a part may have been damaged since this process wrote or checked it.
        times = self._parts.times(key, trust=trust)
        if times is None:
            self._parts.discard_damaged(key)
            raise StoreError(f"{self.path}: the part {key!r} is missing or damaged; run the command again")
        return times

    def _require_lock(self) -> None:
        if not self._locked:
            raise RuntimeError("writing needs the lock: use `with run.lock():`")

    def _require_complete(self) -> None:
        if not self.is_complete:
            raise StoreError(f"{self.path}: the run is not finished; run its command again to finish it")
