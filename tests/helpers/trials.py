"""Trials of models in forks of a process that has imported what they need, in place of new processes.

Importing transformers takes a trial process longer than most tests take. `models/test_suitability.py` has the test of
the real process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from wherewhat.models import suitability

_CONNECT = socket.socket.connect


def fork_trials(start: Callable[[], Any]) -> None:
    """Let ``start``, which returns an object with the interface of ``subprocess.Popen``, start trial processes."""
    suitability.subprocess = SimpleNamespace(PIPE=None, DEVNULL=None, Popen=lambda *words, **options: start())


@contextlib.contextmanager
def exit_after() -> Iterator[None]:
    """End the process at the end of the context, without the clean-up that belongs to its parent."""
    code = 70
    try:
        yield
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Forked:
    """A trial process that is a fork of this process."""

    def __init__(self) -> None:
        (requests, stdin), (stdout, answers) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with exit_after():
                os.dup2(requests, 0)
                os.dup2(answers, 1)
                os.closerange(3, max(stdin, stdout, requests, answers) + 1)
                _serve()
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self._code: int | None = None

    def poll(self, how: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self) -> int | None:
        """Wait for the end and return the exit code."""
        return self.poll(0)

    def kill(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGKILL)


class ForkedByServer:
    """A trial process that is a fork of the fork server: this process may have threads."""

    def __init__(self, processes: Any) -> None:
        ours, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve_over, args=(theirs,), daemon=True)
        with mock.patch.object(socket.socket, "connect", _CONNECT):  # the server is on this machine, not in a network
            self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self.stdin, self.stdout = (os.fdopen(os.dup(ours.fileno()), mode) for mode in ("wb", "rb"))

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """Wait for the end, close the streams and return the exit code."""
        self._process.join()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.stdout.close()
        return self._process.exitcode

    returncode = property(poll)


def _serve_over(connection: Any) -> None:
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    _serve()


def _serve() -> None:
    os.setsid()
    sys.stdin = os.fdopen(0, closefd=False)
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    suitability.serve(answers)
