"""Python calls that cases make in place of commands, and planted faults for the tests of the fuzzer."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _load(model: str) -> None:
    import wherewhat

    wherewhat.load(model, device="cpu")


def _measure(measurement: str, model: str, text: str) -> None:
    import wherewhat

    wherewhat.measure(measurement, model, text=text, tokens=16)


def _run(measurement: str, model: str, out: str) -> None:
    import wherewhat

    request = wherewhat.Request(measurement, model=model, text=("text.txt",), tokens=16)
    wherewhat.run(request, out=out)


def _read_documents(source: str) -> None:
    import wherewhat

    wherewhat.read_documents(source)


def _open_result(run: str) -> None:
    import wherewhat

    found = wherewhat.Result.load(run)
    found.summary()
    found.heads(tidy=True)


def _open_training(run: str) -> None:
    import wherewhat

    wherewhat.TrainingRun.load(run).table()


def _open_plan(path: str) -> None:
    import wherewhat

    wherewhat.Plan.load(path)


def _planted(fault: str) -> None:
    """Break one promise."""
    if fault == "traceback":
        raise KeyError("planted")
    if fault == "exit code":
        sys.exit(3)
    if fault == "hang":
        time.sleep(3600)
    if fault == "abort":
        os.abort()
    if fault == "control character":
        sys.stdout.write("a\x1b[31mb\n")
    if fault == "warning":
        warnings.warn("planted", stacklevel=1)
    if fault == "memory":
        _ = bytearray(os.urandom(1 << 20)) * 1200
    if fault == "unfinished file":
        Path(".tmp-0123").write_text("")
    if fault == "two lines":
        from wherewhat.errors import WherewhatError

        raise WherewhatError("first\nsecond")
    if fault == "process":
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        Path("process").write_text(str(child))


CALLS: dict[str, Callable[..., Any]] = {
    "load": _load,
    "measure": _measure,
    "run": _run,
    "read_documents": _read_documents,
    "Result.load": _open_result,
    "TrainingRun.load": _open_training,
    "Plan.load": _open_plan,
    "planted": _planted,
}
