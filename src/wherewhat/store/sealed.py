"""Small JSON files that carry their own checksum and those of the files beside them.

They are what makes damage noticeable: a truncated, altered or missing file no longer agrees with its seal.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from wherewhat.errors import ConfigError, StoreError
from wherewhat.store.atomic import explain, write_file
from wherewhat.store.hashing import (
    JSON,
    canonical_json,
    file_sha256,
    parse_object,
    readable_json,
    text_sha256,
)

_SEAL = "checksum"


def write_sealed(path: Path, content: Mapping[str, JSON]) -> None:
    """Writes `content` atomically with an added `checksum`: the sha256 of its canonical JSON.

    Raises:
        StoreError: The file cannot be written.
    """
    write_file(path, readable_json({**content, _SEAL: text_sha256(canonical_json(content))}))


def read_sealed(path: Path) -> dict[str, JSON] | None:
    """Reads what `write_sealed` wrote; None when the file is missing, truncated or altered.

    Raises:
        StoreError: The file is there but may not be read, which says nothing about damage.
    """
    try:
        content = parse_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error
    if content is None:
        return None
    seal = content.pop(_SEAL, None)
    try:
        intact = seal == text_sha256(canonical_json(content))
    except ConfigError:  # an altered byte can make a number infinite or a string invalid
        return None
    return content if intact else None


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, JSON]:
    """The sha256 of each of the files `names` in `folder`, for a sealed file to carry.

    Raises:
        StoreError: A file cannot be read.
    """
    found: dict[str, JSON] = {}
    for name in names:
        path = folder / name
        found[name] = {"sha256": file_sha256(path)}
    return found


def first_damaged(folder: Path, expected: JSON) -> str | None:
    """The name of the first file in `folder` that does not have its expected sha256; None if all do.

    Raises:
        StoreError: A file is there but may not be read.
    """
    if not isinstance(expected, Mapping) or not expected:
        return "the list of files"
    for name, fingerprint in expected.items():
        try:
            if fingerprints(folder, [name])[name] != fingerprint:
                return name
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                return name
            raise
    return None
