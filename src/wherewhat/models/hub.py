"""Hugging Face hub: one place that may open a connection, and never does when offline."""

import re
from pathlib import Path

from wherewhat.errors import LoadError, one_line
from wherewhat.models.adapter import CONFIG, WEIGHTS
from wherewhat.models.quiet import quiet

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

    Raises:
        LoadError: The model does not exist, may not be read, is not cached or cannot be reached.
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
