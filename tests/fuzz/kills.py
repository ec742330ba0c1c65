"""Commands that are killed at random moments, some beside others on the same run, and then end as undisturbed ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzz import materials

_SMALL = ["--text", "text.txt", "--text", "more.txt", "--tokens", "16", "--device", "cpu"]
_NAMES = ("axes", "distance", "planes", "residual", "heads", "perturb", "attention")
COMMANDS: list[list[str]] = [
    *([name, "tiny", *_SMALL] for name in _NAMES),
    ["frequencies", "tiny", *_SMALL, "--set", "bands=2"],
    ["choices", "tiny", "--items", "items.jsonl", "--device", "cpu"],
    ["split", "tiny", *_SMALL, "--text", "lines.jsonl"],
    ["extend", "speller", *_SMALL[:4], "--tokens", "96", "--device", "cpu", "--set", "trained=90", "--set", "run=4"],
    ["prompts", "speller", "--beyond", "--no-control", "--device", "cpu", "--set", "count=4"],
    ["report", "tiny", *_SMALL],
    materials.PLAN,
    ["sweep", "sweep.json", "--workers", "2"],
    [word.replace("lab", "runs") for word in materials.TRAIN],
]
"""Commands that write results to ``runs``."""

RESULTS = ("scores.parquet", "profiles.safetensors", "config.json", "model.safetensors")
"""Files of a run that hold results, without times."""

SWEEP = {
    "store": "runs",
    "tokens": 16,
    "models": [{"model": "tiny"}],
    "texts": {"a": "text.txt", "b": "more.txt"},
    "measurements": {"axes": {}, "attention": {}},
    "device": "cpu",
}
"""Content of ``sweep.json``."""


def kill(seed: str, *words: str) -> None:
    """Run a command undisturbed, move its results to ``whole``, and run it several times more, killed."""
    random = Random(seed)
    start = time.monotonic()
    if (code := _wait(_start(words))) != 0:
        raise RuntimeError(f"the undisturbed command ended with code {code}")
    seconds = time.monotonic() - start
    Path("runs").rename("whole")
    for _ in range(random.choice([1, 2, 4])):
        running = [_start(words) for _ in range(random.choice([1, 1, 2, 3]))]
        spared = running.pop() if len(running) > 1 and random.random() < 0.5 else None
        for process in running:
            time.sleep(random.uniform(0, seconds / len(running)))
            _end(process)
        if spared is not None and (code := _wait(spared)) != 0:
            raise RuntimeError(f"a command beside killed ones ended with code {code}")


def differences() -> list[str]:
    """Return what differs between the results in ``whole`` and ``runs``."""
    found, again = (
        {path.relative_to(out): path.read_bytes() for path in Path(out).rglob("*") if _is_result(path)}
        for out in ("whole", "runs")
    )
    if not found:
        return ["the undisturbed command has no results"]
    changed = sorted(str(path) for path in found.keys() | again.keys() if found.get(path) != again.get(path))
    return [f"{path} differs from that of an undisturbed command" for path in changed]


def _is_result(path: Path) -> bool:
    return path.name in RESULTS or path.match("plan-*.json")  # a report holds times


def _start(words: Sequence[str]) -> int:
    from wherewhat.cli.main import run_cli

    process = os.fork()
    if process == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            code = run_cli(list(words))
        finally:
            os._exit(code)
    return process


def _end(process: int) -> None:
    """Kill a command with the workers that it started."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)  # not yet the leader of a group, or ended and waited for
    _wait(process)


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
