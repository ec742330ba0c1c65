"""Stores of run directories: a folder, or any address that fsspec opens (``s3://``, ``gs://``, ``memory://``, …)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from wherewhat.boundary import user_path
from wherewhat.errors import StoreError, one_line
from wherewhat.files import ABSENT, explain, make_folder, read_regular, write_file
from wherewhat.imports import require

_PREFIX = ".tmp-"
_ATTEMPTS = 5


class Folder:
    """A store in a folder of this machine or of a shared file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def address(self) -> str:
        """Absolute path of the folder."""
        return str(self.path.absolute())

    def check(self) -> None:
        """Create the folder if it does not exist, and raise if it cannot be written."""
        make_folder(self.path)
        probe = self.path / f"{_PREFIX}{secrets.token_hex(8)}"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"cannot write to the store {self.path}: {explain(error)}") from error

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none where there is no such folder."""
        try:
            return sorted(entry.name for entry in (self.path / folder).iterdir() if not entry.name.startswith(_PREFIX))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"cannot read the store {self.path}: {explain(error)}") from error

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is no such file."""
        try:
            return read_regular(self.path / name)
        except ABSENT:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self.path / name}: {explain(error)}") from error

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of the files that exist."""
        return {name: content for name in names if (content := self.read(name)) is not None}

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        path = self.path / name
        make_folder(path.parent)
        write_file(path, content)


class Remote:
    """A store behind an address that fsspec opens."""

    def __init__(self, address: str) -> None:
        fsspec = require("fsspec", why=f"the store {address}")
        self.address = address
        with _as_store_error(address):
            self._system, root = fsspec.core.url_to_fs(address, skip_instance_cache=False)
        self._root = root.rstrip("/")

    def check(self) -> None:
        """Raise if a small file cannot be written and removed."""
        name = f"{_PREFIX}{secrets.token_hex(8)}"
        with _as_store_error(self.address):
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(self._path(name), b"wherewhat")
            self._system.rm_file(self._path(name))

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none where there is no such folder."""
        with _as_store_error(self.address):
            self._system.invalidate_cache(self._path(folder))
            try:
                paths = self._system.ls(self._path(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {PurePosixPath(path.rstrip("/")).name for path in paths} - {PurePosixPath(folder).name}
        return sorted(name for name in names if not name.startswith(_PREFIX))

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is no such file."""
        return self.read_many([name]).get(name)

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of the files that exist, in one request."""
        paths = {self._path(name): name for name in names}
        if not paths:
            return {}
        with _as_store_error(self.address):
            response = self._system.cat(list(paths), on_error="return", recursive=False)
            contents = response if isinstance(response, dict) else {next(iter(paths)): response}
            by_name = {paths[self._own(path)]: content for path, content in contents.items()}
            for content in by_name.values():
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return {name: content for name, content in by_name.items() if not isinstance(content, Exception)}

    def write(self, name: str, content: bytes) -> None:
        """Write a file under a temporary name and rename it, for file systems that write in pieces."""
        path = self._path(name)
        parent = path.rpartition("/")[0]
        temporary = f"{parent}/{_PREFIX}{secrets.token_hex(8)}"
        with _as_store_error(self.address):
            self._system.makedirs(parent, exist_ok=True)
            self._system.pipe_file(temporary, content)
            self._system.mv(temporary, path)

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of a finished run directory, in this order: the last one marks it complete.

        Another worker may upload the same run with other times at the same moment. The files must all come from one
        of them, so they are read back and compared.
        """
        listed = list(names)
        contents = {f"{folder.name}/{name}": (folder / name).read_bytes() for name in listed}
        for attempt in range(_ATTEMPTS):
            for name, content in contents.items():
                self.write(name, content)
            if self.read_many(contents) == contents:
                return
            time.sleep(secrets.randbelow(1000) / 1000 * (attempt + 1))
        raise StoreError(f"{folder.name} in {self.address} differs from what was uploaded: start again")

    def remove(self, folder: str) -> None:
        """Remove a folder with all its files; do nothing where there is none."""
        with _as_store_error(self.address), suppress(FileNotFoundError):
            self._system.rm(self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _own(self, path: str) -> str:
        # Some file systems return paths with their protocol or a leading slash.
        return str(self._system._strip_protocol(path))


Place = Folder | Remote


def open_place(address: str) -> Place:
    """Return the store at an address."""
    return Remote(address) if "://" in address else Folder(user_path(address, name="the store", error=StoreError))


@contextmanager
def _as_store_error(address: str) -> Iterator[None]:
    """Turn any error of a file system into one line that names the store."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # each file system raises its own errors
        raise StoreError(f"the store {address} cannot be reached: {one_line(error)}") from error
