"""Names that are safe on any file system, for whatever a model or document is called."""

import re
import unicodedata

from wherewhat.errors import StoreError
from wherewhat.store.hashing import text_sha256

_LONGEST = 48
HASH_DIGITS = 12


def slug(name: str, *, fallback: str) -> str:
    """The readable part of a file name: ASCII letters, digits, `.`, `_` and `-`, at most 48 characters.

    It never starts with a dot and never holds a separator, so it cannot leave its folder. Different names may
    give the same slug; whoever needs them apart appends a hash.
    """
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_name)
    safe = re.sub(r"\.{2,}", ".", safe).strip("-.")[:_LONGEST].rstrip("-.")
    return safe or fallback


def part_folder_name(key: str) -> str:
    """The folder name of the part called `key`: its slug and a hash that keeps all keys apart.

    Raises:
        StoreError: The key is not valid Unicode, so it could not be written down in the part.
    """
    try:
        digest = text_sha256(key)
    except UnicodeEncodeError as error:
        raise StoreError(f"the part name {key!r} is not valid Unicode: rename the document") from error
    return f"{slug(key, fallback='part')}-{digest[:HASH_DIGITS]}"


def run_folder_name(name: str, config_hash: str) -> str:
    """The folder name of a run: its slug and the first 12 digits of the configuration's hash."""
    return f"{slug(name, fallback='run')}-{config_hash[:HASH_DIGITS]}"
