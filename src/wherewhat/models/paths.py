"""Where converted models and remembered digests are kept."""

import os
from pathlib import Path


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
