"""Run directories: results that are computed once, survive interruptions, and can be read by anything."""

from wherewhat.store.hashing import (
    JSON,
    canonical_json,
    config_hash,
    file_sha256,
    text_sha256,
)
from wherewhat.store.parts import PartResult
from wherewhat.store.profiles import Profile, ProfileFile, profile_name
from wherewhat.store.provenance import Provenance, collect_versions
from wherewhat.store.run import RunDirectory
from wherewhat.store.schema import COLUMNS, SCHEMA_VERSION, Column
from wherewhat.store.scores import Score, ScoreSource

__all__ = [
    "COLUMNS",
    "JSON",
    "SCHEMA_VERSION",
    "Column",
    "PartResult",
    "Profile",
    "ProfileFile",
    "Provenance",
    "RunDirectory",
    "Score",
    "ScoreSource",
    "canonical_json",
    "collect_versions",
    "config_hash",
    "file_sha256",
    "profile_name",
    "text_sha256",
]
