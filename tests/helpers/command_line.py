"""The outcome of a call of the command line, and calls in processes that start in milliseconds."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def assert_one_line(outcome, *words):
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("wherewhat: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for word in words:
        assert word in outcome.err, outcome.err


def command_process(processes, arguments, *, out, err, signal_at=None, before="measuring"):
    """Start ``wherewhat`` with arguments as a process of the fork server.

    Args:
        processes: The fixture of that name.
        arguments: Words of the command.
        out: File of its standard output; None for a pipe that nobody reads.
        err: File of its standard error.
        signal_at: Before which batches of texts that it measures, counted from 0, it gets a signal, and which.
        before: ``renaming``, if files are counted that were written under a temporary name and get their own.
    """
    given = ([str(word) for word in arguments], out and str(out), str(err), signal_at, before)
    process = processes.Process(target=_run_command, args=given)
    process.start()
    return process


def _run_command(arguments, out, err, signal_at, before):
    from wherewhat.__main__ import main
    from wherewhat.runs import jobs

    if signal_at is not None:
        module, name = (jobs, "_measured") if before == "measuring" else (os, "replace")
        do, (numbers, which), times = getattr(module, name), signal_at, itertools.count()

        def do_or_stop(*given):
            if next(times) in numbers:
                os.kill(os.getpid(), which)
            return do(*given)

        setattr(module, name, do_or_stop)
    if out is None:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
    else:
        _write_to(out, 1)
    _write_to(err, 2)
    # As in a new process: those of the server belong to its own files.
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    sys.argv = ["wherewhat", *arguments]
    main()


def _write_to(path, descriptor):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
