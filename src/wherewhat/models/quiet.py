"""Keep other libraries' warnings and progress bars off the terminal while a model loads."""

import contextlib
import importlib
import io
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet(*, stderr: bool = False) -> Iterator[None]:
    """Silence transformers and huggingface_hub inside the context, then restore what was set before.

    Args:
        stderr: Also swallow what is written to `sys.stderr`. The GGUF reader of transformers draws a
            progress bar that no setting turns off; nothing else needs this.
    """
    # By name: the functions are there at run time, but the package does not declare them exported.
    hub: Any = importlib.import_module("huggingface_hub.utils")
    from transformers.utils import logging as log

    verbosity = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    hub_bars_off = hub.are_progress_bars_disabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        stack.callback(log.set_verbosity, verbosity)
        if bars:
            # Enabling transformers' bars also enables the hub's, so this callback must run first.
            stack.callback(hub.disable_progress_bars if hub_bars_off else hub.enable_progress_bars)
            stack.callback(log.enable_progress_bar)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield
