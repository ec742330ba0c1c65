"""Parts: the smallest units that a run computes, keeps and never computes twice.

A part is a folder that appears whole by one rename. It holds the same two files as a finished run, and a
sealed `part.json` with their checksums.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from wherewhat.errors import StoreError
from wherewhat.store.atomic import atomic_folder, make_folder, remove, remove_temporaries, write_file
from wherewhat.store.hashing import JSON
from wherewhat.store.layout import PROFILES, SCORES
from wherewhat.store.naming import part_folder_name
from wherewhat.store.profiles import Profile, write_profiles
from wherewhat.store.provenance import PartTimes, package_version
from wherewhat.store.schema import SCHEMA_VERSION, check_version
from wherewhat.store.scores import Score
from wherewhat.store.sealed import fingerprints, first_damaged, read_sealed, write_sealed
from wherewhat.store.table import encode_scores, score_table

_PART = "part.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """What computing one part gave.

    Attributes:
        scores: Score rows.
        profiles: Curves under the names that `profile_name` makes.
    """

    scores: Iterable[Score] = ()
    profiles: Mapping[str, Profile] = field(default_factory=dict)


class Parts:
    """The finished parts of one run, in the folder `parts` of its directory."""

    def __init__(self, folder: Path, *, config_hash: str) -> None:
        """Looks at `folder`, which need not exist yet, for parts of the configuration `config_hash`."""
        self.folder = folder
        self._config_hash = config_hash
        self._known: dict[str, PartTimes] = {}

    def path(self, key: str) -> Path:
        """The folder of the part `key`."""
        return self.folder / part_folder_name(key)

    def times(self, key: str, *, trust: bool = True) -> PartTimes | None:
        """Times of the part `key` if it is finished and undamaged, else None.

        Args:
            key: Name of the part.
            trust: Believe what this process checked or wrote before, instead of reading again.

        Raises:
            StoreError: The part may not be read, or a newer wherewhat wrote it.
        """
        if trust and key in self._known:
            return self._known[key]
        self._known.pop(key, None)
        path = self.path(key)
        content = read_sealed(path / _PART)
        if content is None:
            return None
        check_version(content.get("schema"), path / _PART)
        if (content.get("key"), content.get("config_hash")) != (key, self._config_hash):
            return None
        if first_damaged(path, content.get("files")) is not None:
            return None
        self._known[key] = PartTimes(**cast("dict[str, JSON]", content["times"]))  # type: ignore[arg-type]
        return self._known[key]

    def forget(self) -> None:
        """Forgets what was checked, since another process may have been at work."""
        self._known.clear()

    def discard_damaged(self, key: str) -> None:
        """Removes what stands in the place of the part `key`. Only for the holder of the run's lock."""
        path = self.path(key)
        if path.exists() or path.is_symlink():
            _log.warning("the part %r in %s is damaged: it is computed again", key, path)
            remove(path)

    def remove_leftovers(self) -> None:
        """Removes unfinished writes of dead processes. Only for the holder of the run's lock."""
        if self.folder.is_dir():
            remove_temporaries(self.folder)

    def save(self, key: str, result: PartResult, *, seconds: float) -> None:
        """Keeps a finished part. Only for the holder of the run's lock.

        Raises:
            StoreError: The result breaks the schema or cannot be written; nothing of it remains then.
        """
        table = score_table(result.scores)
        now = time.time()
        times = PartTimes(
            key=key,
            started=_utc(now - seconds),
            finished=_utc(now),
            seconds=float(seconds),
            wherewhat=package_version("wherewhat"),
        )
        make_folder(self.folder)
        path = self.path(key)
        try:
            with atomic_folder(path) as folder:
                write_file(folder / SCORES, encode_scores(table))
                write_profiles(folder / PROFILES, result.profiles)
                content: dict[str, JSON] = {
                    "schema": SCHEMA_VERSION,
                    "config_hash": self._config_hash,
                    "key": key,
                    "times": asdict(times),
                    "files": fingerprints(folder, [SCORES, PROFILES]),
                }
                write_sealed(folder / _PART, content)
        except StoreError as error:
            raise StoreError(f"cannot save the part {key!r}: {error}") from error
        self._known[key] = times


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
