"""Crash-safe run directories: results of one configuration, computed once; their files, parts and provenance."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from wherewhat.boundary import user_path
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import (
    HASH_DIGITS,
    JSON,
    atomic_folder,
    check_writable,
    config_hash,
    explain,
    fingerprints,
    first_damaged,
    hold,
    is_temporary,
    link_file,
    make_folder,
    nearest_folder,
    part_folder_name,
    plain_json,
    read_object,
    read_sealed,
    readable_json,
    remove,
    remove_temporaries,
    run_folder_name,
    write_file,
    write_parts,
    write_sealed,
)
from wherewhat.imports import package_version
from wherewhat.options import checked
from wherewhat.runs.schema import (
    SCHEMA_VERSION,
    ProfileFile,
    encode_profiles,
    encode_scores,
    is_current,
    join_curves,
    join_tables,
    read_scores,
    score_profiles,
    score_table,
    stored_curves,
    stored_scores,
    write_profiles,
)
from wherewhat.scores import Scores
from wherewhat.text.documents import Document, text_hash

if TYPE_CHECKING:
    import pyarrow as pa

    from wherewhat.models.loaded import LoadedModel

CONFIG = "config.json"
PROVENANCE = "provenance.json"
SCORES = "scores.parquet"
PROFILES = "profiles.safetensors"
COMPLETE = "complete.json"
PARTS = "parts"
LOCK = ".lock"

_PART = "part.json"
_PART_FILES = {SCORES, PROFILES, _PART}
_OWN_NAMES = {CONFIG, PROVENANCE, SCORES, PROFILES, COMPLETE, PARTS, LOCK}
_CURVES_SINCE = 2
_log = logging.getLogger(__name__)


def _stored_config_hash(path: Path) -> str | None:
    """Return the hash of the configuration in the run directory `path`; None when there is no valid one."""
    config = read_object(path / CONFIG)
    with suppress(ConfigError):  # an altered byte can make a number infinite or a string invalid
        return None if config is None else config_hash(config)
    return None


def _is_readable(seal: Mapping[str, JSON], path: Path) -> bool:
    """Return whether a run or part has files of this version; curves without scores are the same since version 2."""
    files = seal.get("files")
    only_curves = isinstance(files, Mapping) and SCORES not in files and seal.get("schema") == _CURVES_SINCE
    return is_current(seal.get("schema"), path) or only_curves


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


_PACKAGES = ("wherewhat", "torch", "transformers", "safetensors", "numpy", "pyarrow", "gguf")


def collect_versions() -> dict[str, str | None]:
    """Return the versions of Python, the platform and the packages that numbers can depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: package_version(name) for name in _PACKAGES},
    }


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the caller knows about a run; the run directory adds times and the schema version.

    Attributes:
        model_hash: Hash of the model's weights.
        tokenizer_hash: Hash of the tokenizer; None when no text was tokenised.
        text_hash: Hash of the text; None when no text was read.
        dtype: Type of the model's weights, such as `float32`.
        device: Device of the model, such as `cpu` or `cuda:0`.
        seed: Seed of the run.
        versions: Versions of Python, the platform and packages.
        extra: Further facts, such as the name of the GPU.
    """

    model_hash: str | None
    tokenizer_hash: str | None
    text_hash: str | None
    dtype: str
    device: str
    seed: int
    versions: Mapping[str, str | None] = field(default_factory=collect_versions)
    extra: Mapping[str, JSON] = field(default_factory=dict)


def model_provenance(
    loaded: LoadedModel, texts: Sequence[Document], extra: Mapping[str, JSON] | None = None
) -> Provenance:
    """Return the provenance of a run of a model on texts."""
    return Provenance(
        model_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        text_hash=text_hash(texts),
        dtype=loaded.dtype,
        device=loaded.device,
        seed=loaded.seed,
        extra=extra or {},
    )


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """When a part was computed, in UTC and ISO 8601, and how long it took, in seconds of wall time.

    `wherewhat` is the version that computed it; a resumed run can mix versions.
    """

    key: str
    started: str
    finished: str
    seconds: float
    wherewhat: str | None


def provenance_json(provenance: Provenance, times: Sequence[PartTimes], *, config_hash: str) -> dict[str, JSON]:
    """Return the content of `provenance.json`.

    Times are those of the parts, so that an interrupted run states the time that was spent on computing.
    """
    parts = {part.key: asdict(part) for part in times}
    for part in parts.values():
        del part["key"]
    return {
        "config_hash": config_hash,
        **asdict(provenance),
        # All times are UTC in one format, so that their order as text is their order in time.
        "created": min(part.started for part in times),
        "finished": max(part.finished for part in times),
        "seconds": sum(part.seconds for part in times),
        "parts": parts,
    }


@dataclass(frozen=True)
class NewPart:
    """Results of a part that are not stored yet.

    Attributes:
        scores: Scores and curves, checked; see :meth:`wherewhat.Scores.checked`.
        document: Name of the document in the score table; None for all documents together.
        seconds: Wall time of the computation.
        ended: When it ended, in seconds since 1970.
    """

    scores: Scores
    document: str | None
    seconds: float
    ended: float = field(default_factory=time.time)

    def times(self, key: str) -> PartTimes:
        """Return when the part of a name was computed."""
        return PartTimes(
            key=key,
            started=_utc(self.ended - self.seconds),
            finished=_utc(self.ended),
            seconds=float(self.seconds),
            wherewhat=package_version("wherewhat"),
        )


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
        self._times: dict[str, PartTimes] = {}  # of parts that this process checked or wrote
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
        run._check_place()
        run._verify()
        if not run.is_complete:  # a finished run can be read from a read-only folder
            check_writable(run.path)
        return run

    @classmethod
    @checked()
    def load(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Open a finished run for reading; the folder may have been renamed or moved."""
        path = user_path(path, name="the run directory", error=StoreError)
        config = read_object(path / CONFIG)
        if config is None or _stored_config_hash(path) is None:
            raise StoreError(f"{path} is not a run directory: it has no readable {CONFIG}")
        run = cls(path, config)
        if (problem := run._verify()) is not None:
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
                self._take_away_if_empty()

    @checked()
    def has(self, key: str) -> bool:
        """Whether the part `key` is finished and undamaged; under the lock a damaged one is removed."""
        if self._keys is not None and key in self._keys:
            return True
        if key in self._times or self._read_times(key) is not None:
            return True
        if self._locked:
            self._discard_damaged(key)
        return False

    @checked()
    def save(self, key: str, scores: Scores, *, document: str | None = None, seconds: float) -> None:
        """Write the results of the part `key`; without a score table if it has curves only.

        Args:
            key: Name of the part, such as its document's; any text.
            scores: Scores and curves, checked; see :meth:`wherewhat.Scores.checked`.
            document: Name of the document in the score table; None for all documents together.
            seconds: Wall time of the computation.
        """
        self._require_lock()
        if self.has(key):
            raise ValueError(f"the part {key!r} is finished already: ask has() first")
        part = NewPart(scores, document, seconds)
        table, times = self._table({document: scores}), part.times(key)
        make_folder(self.path / PARTS)
        try:
            with atomic_folder(self._part(key)) as folder:
                files: dict[str, JSON] = {}
                if table is not None:
                    files[SCORES] = write_parts(folder / SCORES, [encode_scores(table)])
                files[PROFILES] = write_profiles(folder / PROFILES, score_profiles(scores, document))
                content: dict[str, JSON] = {
                    "schema": SCHEMA_VERSION,
                    "config_hash": self.config_hash,
                    "key": key,
                    "times": asdict(times),
                    "files": files,
                }
                write_sealed(folder / _PART, content)
        except StoreError as error:
            raise StoreError(f"cannot save the part {key!r}: {error}") from error
        self._times[key] = times

    def clear(self) -> None:
        """Remove all results, so that they are measured anew; the mark of a finished run goes first."""
        self._require_lock()
        self._keys = None
        for name in (COMPLETE, PARTS, SCORES, PROFILES, PROVENANCE):
            remove(self.path / name)
        self._times.clear()

    @checked()
    def part(self, key: str) -> Scores:
        """Return scores and curves of the finished part `key`, before or after the run is finished."""
        self._checked_times(key)
        folder = self._part(key)
        table = read_scores(folder / SCORES) if (folder / SCORES).exists() else None
        scores = stored_scores(table, ProfileFile(folder / PROFILES))
        return next(iter(scores.values()), Scores())

    def part_files(self, key: str) -> dict[str, bytes]:
        """Return the files of the finished part `key` by name, for :meth:`add_part` on another machine."""
        self._checked_times(key)
        return {
            name: (self._part(key) / name).read_bytes() for name in _PART_FILES if (self._part(key) / name).exists()
        }

    def add_part(self, key: str, files: Mapping[str, bytes]) -> None:
        """Add the files of a part that was finished elsewhere; :meth:`has` says whether they are complete."""
        self._require_lock()
        make_folder(self.path / PARTS)
        with atomic_folder(self._part(key)) as folder:
            for name in _PART_FILES & files.keys():
                write_file(folder / name, files[name])

    def remove_part(self, key: str) -> None:
        """Remove the part `key` of a run that is finished elsewhere."""
        self._require_lock()
        self._times.pop(key, None)
        remove(self._part(key))

    def _table(self, scores: Mapping[str | None, Scores]) -> pa.Table | None:
        """Return the score table of documents; None if they have curves only."""
        source = {name: self.config.get(name) for name in ("measurement", "model", "weights", "seed")}
        return score_table(scores, source) if any(part.names for part in scores.values()) else None

    def finish(
        self,
        keys: Iterable[str],
        *,
        provenance: Provenance,
        files: Iterable[str] = (),
        parts: Mapping[str, NewPart] | None = None,
    ) -> None:
        """Join the parts into the run's files; the bytes do not depend on the order in which parts were finished.

        Args:
            keys: Names of all parts.
            provenance: Versions, hashes and device of the run.
            files: Other files in the directory that belong to the finished run, such as a trained model.
            parts: Parts of different documents that were not saved, because all were measured at once; they are written
                with the others.
        """
        self._require_lock()
        wanted = sorted(set(keys))
        if not wanted:
            raise StoreError(f"{self.path}: a run needs at least one part")
        if self._keys == frozenset(wanted):
            return
        self._keys = None
        remove(self.path / COMPLETE)
        new = parts or {}
        assert len({part.document for part in new.values()}) == len(new), "new parts are of different documents"
        times = [
            new[key].times(key) if key in new else self._checked_times(key, trust=len(wanted) == 1) for key in wanted
        ]
        if (
            len(wanted) == 1 and not new
        ):  # the files of the run are those of the part, which are checked whenever they are read
            written = self._link(wanted[0])
        else:
            folders = [self._part(key) for key in wanted if key not in new]
            curves = [stored_curves(ProfileFile(folder / PROFILES)) for folder in folders]
            curves += [score_profiles(part.scores, part.document) for part in new.values()]
            blocks = encode_profiles(join_curves(curves))
            with ThreadPoolExecutor(1) as pool:  # curves are written and hashed while the score table is encoded
                profiles = pool.submit(write_parts, self.path / PROFILES, blocks)
                tables = [read_scores(folder / SCORES) for folder in folders if (folder / SCORES).exists()]
                table = self._table({part.document: part.scores for part in new.values()})
                if tables:
                    table = join_tables([*tables, table] if table is not None else tables)
                written = {}
                if table is not None:  # a run of parts without score rows does without pyarrow
                    written[SCORES] = write_parts(self.path / SCORES, [encode_scores(table)])
                written[PROFILES] = profiles.result()
        content = provenance_json(provenance, times, config_hash=self.config_hash)
        write_file(self.path / PROVENANCE, readable_json(content))
        seal: dict[str, JSON] = {
            "schema": SCHEMA_VERSION,
            "config_hash": self.config_hash,
            "parts": wanted,
            "files": {**written, **fingerprints(self.path, [CONFIG, PROVENANCE, *files])},
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
        """Remove what other processes left unfinished, and find what they finished."""
        for folder in (self.path, self.path / PARTS):
            if folder.is_dir():
                remove_temporaries(folder)
        self._times.clear()  # another process may have changed files
        if _stored_config_hash(self.path) != self.config_hash:
            write_file(self.path / CONFIG, readable_json(self.config))
        problem = self._verify()
        if problem is not None and os.path.lexists(self.path / COMPLETE):
            _log.warning("%s: %s; its files are joined again from the parts", self.path, problem)
            write_file(self.path / CONFIG, readable_json(self.config))  # it may say the same in other bytes
            remove(self.path / COMPLETE)

    def _check_place(self) -> None:
        """Check that the path is, or can become, the directory of this run; writes nothing."""
        path, own = self.path, self.config_hash
        if nearest_folder(path) != path:
            return
        stored = _stored_config_hash(path)
        # A valid configuration with the same folder name is another run, not damage to this one.
        if stored not in (None, own) and stored[:HASH_DIGITS] == own[:HASH_DIGITS]:
            raise StoreError(f"{path} belongs to the configuration {stored}, not {own}: choose another folder")
        if os.path.lexists(path / CONFIG):
            return
        try:
            foreign = sorted(p.name for p in path.iterdir() if p.name not in _OWN_NAMES and not is_temporary(p))
        except FileNotFoundError:
            return  # another process just removed its empty run directory
        except OSError as error:
            raise StoreError(f"cannot read {path}: {explain(error)}") from error
        if foreign:
            raise StoreError(f"{path} is not a run directory, it holds {foreign[0]!r}: choose another folder")

    def _verify(self) -> str | None:
        """Check every file of a finished run against its checksum; return what is wrong, None if nothing is."""
        self._keys = None
        complete = self.path / COMPLETE
        if not os.path.lexists(complete):
            return "the run is not finished"
        seal = read_sealed(complete)
        if seal is None:
            return f"{COMPLETE} is damaged"
        if not _is_readable(seal, complete):
            return f"the run has schema version {seal['schema']}, older than {SCHEMA_VERSION}"
        if seal.get("config_hash") != self.config_hash:
            return f"{COMPLETE} belongs to the configuration {seal.get('config_hash')}, not {self.config_hash}"
        damaged = first_damaged(self.path, seal.get("files"))
        if damaged is not None:
            return f"{damaged} is missing or damaged"
        parts = seal.get("parts")
        self._keys = frozenset(str(key) for key in parts) if isinstance(parts, list) else frozenset()
        return None

    def _take_away_if_empty(self) -> None:
        """Remove a run directory without a finished part."""
        path = self.path
        with suppress(OSError):  # what cannot be removed stays; it is a valid, empty run
            if (path / PARTS).is_dir():
                (path / PARTS).rmdir()
            if {entry.name for entry in path.iterdir()} <= {CONFIG, LOCK}:
                (path / CONFIG).unlink(missing_ok=True)
                (path / LOCK).unlink(missing_ok=True)
                path.rmdir()

    def _part(self, key: str) -> Path:
        return self.path / PARTS / part_folder_name(key)

    def _read_times(self, key: str) -> PartTimes | None:
        """Return the times of the part `key` if it is finished and undamaged, else None."""
        self._times.pop(key, None)
        path = self._part(key)
        content = read_sealed(path / _PART)
        if content is None or not _is_readable(content, path / _PART):
            return None
        if (content.get("key"), content.get("config_hash")) != (key, self.config_hash):
            return None
        if first_damaged(path, content.get("files")) is not None:
            return None
        self._times[key] = PartTimes(**cast("dict[str, JSON]", content["times"]))  # type: ignore[arg-type]
        return self._times[key]

    def _checked_times(self, key: str, *, trust: bool = False) -> PartTimes:
        # By default read again: a part may have been damaged since this process wrote or checked it.
        times = self._times[key] if trust and key in self._times else self._read_times(key)
        if times is None:
            self._discard_damaged(key)
            raise StoreError(f"{self.path}: the part {key!r} is missing or damaged; run the command again")
        return times

    def _discard_damaged(self, key: str) -> None:
        path = self._part(key)
        if path.exists() or path.is_symlink():
            _log.warning("the part %r in %s is damaged or of an older version: it is computed again", key, path)
            remove(path)

    def _link(self, key: str) -> dict[str, JSON]:
        """Give the files of a finished part a second name as those of the run, and return their fingerprints."""
        content = read_sealed(self._part(key) / _PART) or {}
        files = dict(cast("Mapping[str, JSON]", content.get("files") or {}))
        for name in files:
            link_file(self._part(key) / name, self.path / name)
        return files

    def _require_lock(self) -> None:
        if not self._locked:
            raise RuntimeError("writing needs the lock: use `with run.lock():`")

    def _require_complete(self) -> None:
        if not self.is_complete:
            raise StoreError(f"{self.path}: the run is not finished; run its command again to finish it")
