"""What lies where in a run directory, and whether it is what it should be."""

import os
from contextlib import suppress
from pathlib import Path

from wherewhat.errors import ConfigError, StoreError
from wherewhat.store.atomic import explain, is_folder, is_temporary
from wherewhat.store.hashing import JSON, config_hash, parse_object
from wherewhat.store.naming import HASH_DIGITS
from wherewhat.store.schema import check_version
from wherewhat.store.sealed import first_damaged, read_sealed

CONFIG = "config.json"
PROVENANCE = "provenance.json"
SCORES = "scores.parquet"
PROFILES = "profiles.safetensors"
COMPLETE = "complete.json"
PARTS = "parts"
LOCK = ".lock"

_OWN_NAMES = {CONFIG, PROVENANCE, SCORES, PROFILES, COMPLETE, PARTS, LOCK}


def read_object(path: Path) -> dict[str, JSON] | None:
    """The JSON object in a file; None when the file is missing or holds anything else.

    Raises:
        StoreError: The file is there but may not be read.
    """
    try:
        return parse_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error


def stored_config_hash(path: Path) -> str | None:
    """The hash of the configuration in the run directory `path`; None when there is no valid one."""
    config = read_object(path / CONFIG)
    with suppress(ConfigError):  # an altered byte can make a number infinite or a string invalid
        return None if config is None else config_hash(config)
    return None


def check_place(path: Path, *, config_hash: str) -> None:
    """Checks that `path` is, or can become, the run directory of a configuration; writes nothing.

    Raises:
        StoreError: It holds something else, belongs to another configuration, or cannot be read.
    """
    if _nearest_folder(path) != path:
        return
    stored = stored_config_hash(path)
    # A valid configuration that earns the same folder name is another run, not damage to this one.
    if stored not in (None, config_hash) and stored[:HASH_DIGITS] == config_hash[:HASH_DIGITS]:
        raise StoreError(f"{path} belongs to the configuration {stored}, not {config_hash}: choose another folder")
    if os.path.lexists(path / CONFIG):
        return
    try:
        foreign = sorted(p.name for p in path.iterdir() if p.name not in _OWN_NAMES and not is_temporary(p))
    except FileNotFoundError:
        return  # another process took its empty run directory away just now
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error
    if foreign:
        raise StoreError(f"{path} is not a run directory, it holds {foreign[0]!r}: choose another folder")


def check_writable(path: Path) -> None:
    """Checks, without trying, that `path` can be made or written.

    Raises:
        StoreError: The nearest folder that exists may not be written.
    """
    existing = _nearest_folder(path)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StoreError(f"cannot write to {existing}: permission denied; choose another folder")


def _nearest_folder(path: Path) -> Path:
    for folder in (path, *path.parents):
        try:
            if is_folder(folder):
                return folder
        except (OSError, ValueError) as error:
            reason = explain(error) if isinstance(error, OSError) else str(error)
            raise StoreError(f"cannot make the folder {path}: {reason}") from error
    return Path()


def verify(path: Path, *, config_hash: str) -> tuple[frozenset[str] | None, str | None]:
    """Checks every file of a finished run against its checksum.

    Returns:
        The names of the run's parts and None; or None and what is wrong.

    Raises:
        StoreError: A file is there but may not be read, or a newer wherewhat wrote the run.
    """
    if not os.path.lexists(path / COMPLETE):
        return None, "the run is not finished"
    seal = read_sealed(path / COMPLETE)
    if seal is None:
        return None, f"{COMPLETE} is damaged"
    check_version(seal.get("schema"), path / COMPLETE)
    if seal.get("config_hash") != config_hash:
        return None, f"{COMPLETE} belongs to the configuration {seal.get('config_hash')}, not {config_hash}"
    damaged = first_damaged(path, seal.get("files"))
    if damaged is not None:
        return None, f"{damaged} is missing or damaged"
    parts = seal.get("parts")
    return frozenset(str(key) for key in parts) if isinstance(parts, list) else frozenset(), None


def take_away_if_empty(path: Path) -> None:
    """Removes a run directory in which nothing was finished. Only for the holder of the run's lock."""
    with suppress(OSError):  # whatever cannot be removed stays; it is a valid, empty run
        if (path / PARTS).is_dir():
            (path / PARTS).rmdir()
        if {entry.name for entry in path.iterdir()} <= {CONFIG, LOCK}:
            (path / CONFIG).unlink(missing_ok=True)
            (path / LOCK).unlink(missing_ok=True)
            path.rmdir()
