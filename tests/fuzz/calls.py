"""Python calls that cases make in place of commands, and planted faults for the tests of the fuzzer."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wherewhat
from fuzz.kills import kill


def _run(measurement: str, model: str, out: str) -> None:
    wherewhat.run(wherewhat.Request(measurement, model=model, files=("text.txt",), tokens=16), out=out)


def _open_result(run: str) -> None:
    found = wherewhat.Result.load(run)
    found.summary()
    found.heads(tidy=True)


def _planted(fault: str) -> None:
    """Break one promise."""
    if fault == "traceback":
        raise KeyError("planted")
    if fault == "exit code":
        sys.exit(3)
    if fault == "abort":
        os.abort()
    if fault == "control character":
        sys.stdout.write("a\x1b[31mb\n")
    if fault == "warning":
        warnings.warn("planted", stacklevel=1)
    if fault == "memory":
        _ = bytearray(os.urandom(1 << 20)) * 1200
        raise wherewhat.WherewhatError("planted")
    if fault == "unfinished file":
        Path(".tmp-0123").write_text("")
    if fault == "two lines":
        sys.stderr.write("wherewhat: first\nsecond\n")
        sys.exit(2)
    if fault == "process":
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        Path("process").write_text(str(child))


CALLS: dict[str, Callable[..., Any]] = {
    "load": lambda model: wherewhat.load(model, device="cpu"),
    "measure": lambda name, model, text: wherewhat.measure(name, model, files=text, tokens=16),
    "run": _run,
    "kill": kill,
    "read_documents": lambda source: wherewhat.read_documents(source),
    "Result.load": _open_result,
    "TrainingRun.load": lambda run: wherewhat.TrainingRun.load(run).table(),
    "Plan.load": lambda path: wherewhat.Plan.load(path),
    "planted": _planted,
}
