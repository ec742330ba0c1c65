"""Trials: run a step of loading in another process first, which a damaged or hostile model may stop or never end.

Libraries that read models contain native code that can end a process, and loops whose length a file decides. One
process per caller imports them once; each trial runs in a fork of it, so that a trial takes a fraction of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO, cast

from wherewhat import errors
from wherewhat.errors import LoadError, WherewhatError, one_line

SECONDS = 20
"""Time limit of a trial of small files."""

_SECONDS_PER_MB = 2
_MEMORY = 4 << 30
_START = "from wherewhat.models.trial import serve; serve()"


def time_limit(size: int) -> int:
    """Return the time limit in seconds of a trial that reads `size` bytes."""
    return SECONDS + size * _SECONDS_PER_MB // 1_000_000


def attempt(step: Callable[..., Any], *, spec: str, seconds: int, limit_memory: bool, **arguments: Any) -> Any:
    """Run a step in another process and return what it returns; its exceptions are raised here.

    Args:
        step: A function at the top level of a module, with arguments and result that JSON can store.
        spec: Model name for error messages.
        seconds: Time limit.
        limit_memory: Whether the step may use 4 GiB at most, where the system can limit it.
        arguments: Arguments of the step.
    """
    with _lock:
        server = _running()
        if server is None:  # no other process can be started here
            return step(**arguments)
        request = {"step": f"{step.__module__}:{step.__name__}", "arguments": arguments, "limited": limit_memory}
        try:
            answer = server.ask(request, seconds)
        except TimeoutError:
            server.stop()
            raise LoadError(
                f"{spec!r} could not be loaded: reading it did not end within {seconds} s; its files are damaged, or "
                "describe a model that is too large"
            ) from None
        except EOFError:
            server.stop()
            raise LoadError(f"{spec!r} could not be loaded: {_died(None)}") from None
    if "died" in answer:
        raise LoadError(f"{spec!r} could not be loaded: {_died(answer['died'])}")
    if "raised" in answer:
        raise _as_error(answer, spec)
    return answer["result"]


def prepare() -> None:
    """Start the process for trials, which takes seconds, while the caller goes on."""
    with _lock:
        _running()


def _died(number: int | None) -> str:
    by = "" if number is None else f" by signal {number} ({signal.strsignal(number)})"
    return f"a library that read it was stopped{by}; its files are damaged, or need too much memory"


def _as_error(answer: dict[str, Any], spec: str) -> Exception:
    """Return an exception of the other process: the same class for errors of this package and of the system."""
    kind = getattr(errors, answer["raised"], None)
    if isinstance(kind, type) and issubclass(kind, WherewhatError):
        return kind(answer["message"])
    if answer["raised"] == "MemoryError":
        return LoadError(f"{spec!r} could not be loaded: reading it needs more than {_MEMORY >> 30} GiB of memory")
    if answer["errno"] is not None:
        return OSError(answer["errno"], answer["message"])
    return LoadError(f"{spec!r} could not be loaded: {answer['raised']}: {answer['message']}")


class _Server:
    """A process that runs trials, one at a time."""

    def __init__(self) -> None:
        paths = [path for path in sys.path if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.owner = os.getpid()
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard ends the caller, which then stops this one
        )
        self._ready = False

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to one request, within a time limit that begins when the process is ready."""
        if not self._ready:  # until it has imported its libraries
            self._read(None)
            self._ready = True
        stream = cast("BinaryIO", self.process.stdin)
        try:
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
        except OSError:
            raise EOFError from None
        return self._read(seconds)

    def _read(self, seconds: float | None) -> dict[str, Any]:
        stream = cast("BinaryIO", self.process.stdout)
        if seconds is not None and os.name != "nt" and not select.select([stream], [], [], seconds)[0]:
            raise TimeoutError
        line = stream.readline()
        if not line:
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End the process with what it started."""
        if self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        self.process.wait()


_lock = threading.RLock()
_server: _Server | None = None


def _running() -> _Server | None:
    """Return the server of this process, started if necessary; None if none can be started."""
    global _server
    if _server is not None and _server.owner == os.getpid() and _server.process.poll() is None:
        return _server
    if not sys.executable:
        return None
    try:
        _server = _Server()
    except OSError:
        return None
    atexit.register(_server.stop)
    return _server


def serve() -> None:
    """Answer requests from standard input until it ends."""
    # What libraries print must not reach the stream of answers.
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for module in ("wherewhat.models.gguf", "wherewhat.models.loader", "transformers.modeling_utils"):
        import_module(module)
    _answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if not hasattr(os, "fork"):
            _answer(answers, _run(request))
            continue
        child = os.fork()
        if child == 0:
            _answer(answers, _run(request))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status != 0:
            _answer(answers, {"died": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None})


def _answer(stream: BinaryIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


def _run(request: dict[str, Any]) -> dict[str, Any]:
    if request["limited"]:
        with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    module, _, name = request["step"].partition(":")
    try:
        return {"result": getattr(import_module(module), name)(**request["arguments"])}
    except BaseException as error:  # noqa: BLE001 - libraries and their native parts raise any exception
        number = error.errno if isinstance(error, OSError) else None
        return {"raised": type(error).__name__, "message": one_line(error, most=2000), "errno": number}
