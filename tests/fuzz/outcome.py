"""Outcome of a case, and the promises that it is checked against."""

from __future__ import annotations

import re
import shlex
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_NOISE = re.compile(
    r"\.py:\d+: |Warning: |^[WEI]\d{4} \d\d:|terminate called|panicked at|Fatal Python error|^\[W\d", re.M
)
"""Output of other libraries: warnings, logs and native messages."""
_TAIL = 15


@dataclass
class Step:
    """One command of a case.

    Attributes:
        words: ``wherewhat`` and its arguments, or ``python``, a name of ``calls.CALLS`` and its arguments.
        code: Exit code; None if the process ended before.
        error: Type of an exception that left the command, and the innermost frame of the product.
        out: Standard output.
        err: Standard error.
    """

    words: list[str]
    code: int | None = None
    error: str = ""
    out: str = ""
    err: str = ""

    @property
    def shown(self) -> str:
        """The command as it is typed in a shell."""
        if self.words[0] != "python":
            return shlex.join(self.words)
        return f"wherewhat.{self.words[1]}({', '.join(map(repr, self.words[2:]))})  # in Python"


@dataclass
class Outcome:
    """One case after it ran.

    Attributes:
        name: ``KIND:INDEX``.
        seed: Seed of the generator.
        notes: How the input was made.
        steps: Commands in order.
        problems: Broken promises, as (class, description).
        seconds: Wall time.
        memory: Peak memory above that of an idle process, in bytes.
        folder: The case's files, if they were kept.
    """

    name: str
    seed: int
    notes: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    memory: int = 0
    folder: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Outcome:
        """Return the outcome that :meth:`plain` wrote."""
        steps = [Step(**step) for step in values.pop("steps")]
        problems = [(kind, text) for kind, text in values.pop("problems")]
        return cls(**values, steps=steps, problems=problems)

    @property
    def repeat(self) -> str:
        """The command that runs this case alone."""
        return f"make fuzz SEED={self.seed} CASE={self.name}"

    def __str__(self) -> str:
        """Return the reproduction, the broken promises and the end of the output."""
        lines = [f"{self.name} (seed {self.seed}): {'; '.join(text for _, text in self.problems) or 'passed'}"]
        lines += [f"  input: {escaped(note)}" for note in self.notes]
        for step in self.steps:
            code = "unfinished" if step.code is None else f"exit code {step.code}"
            lines.append(f"  {escaped(step.shown)}  → {code}")
        last = next((step for step in reversed(self.steps) if step.out or step.err), None)
        if last is not None:
            lines += [f"  | {escaped(line)}" for line in f"{last.out}{last.err}".splitlines()[-_TAIL:]]
        if self.folder:
            lines.append(f"  files: {self.folder}")
        lines.append(f"  repeat: {self.repeat}")
        return "\n".join(lines)


def escaped(text: str) -> str:
    """Return a text of at most 400 characters without control characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return shown if len(shown) <= 400 else f"{shown[:200]} … {shown[-190:]}"


def check(outcome: Outcome, *, ended: int, hung: str, folder: Path, most_memory: int, limit: float) -> None:
    """Add the broken promises of an outcome.

    Args:
        outcome: The outcome, with its steps.
        ended: Status of the process as ``os.waitstatus_to_exitcode`` returns it.
        hung: Frame in which the process was when the time ran out; empty if it ended.
        folder: Working directory of the case.
        most_memory: Largest memory above that of an idle process, in bytes.
        limit: Seconds that a case may take.
    """
    problems = outcome.problems
    last = next((step for step in outcome.steps if step.code is None), None)
    if hung:
        problems.append((f"hang in {hung}", f"still running after {limit:g} s, in {hung}"))
    elif ended < 0:
        name = signal.Signals(-ended).name
        frame = _native_frame(last.err if last else "")
        problems.append((f"{name} in {frame}", f"ended by {name} in {frame}"))
    elif ended > 0:
        problems.append(("fuzzer", f"the fuzzer itself failed with code {ended}"))
    for step in outcome.steps:
        for what, text in _wrong(step):
            problems.append((what, f"{text} ({escaped(step.shown)[:80]})" if len(outcome.steps) > 1 else text))
    worked = bool(outcome.steps) and all(step.code == 0 for step in outcome.steps)
    if outcome.memory > most_memory and not worked:  # what is refused must need little memory
        used = f"{outcome.memory / 2**30:.1f} GiB"
        problems.append(("memory", f"used {used} more than an idle process"))
    leftovers = sorted(str(path.relative_to(folder)) for path in folder.rglob(".tmp-*"))
    if outcome.name.startswith("kill:"):  # notes have no lock: what a killed process left is removed after an hour
        leftovers = [name for name in leftovers if ".requests" not in name]
    if leftovers and not hung and ended == 0:
        problems.append(("unfinished file", f"left {leftovers[0]} behind"))


def _wrong(step: Step) -> list[tuple[str, str]]:
    """Return the promises that one command has broken."""
    if step.code is None:
        return []
    if step.error:
        return [(step.error, f"raised {step.error}")]
    found = []
    # A sweep of which cells failed has its own documented code.
    allowed = (0, 1, 2) if step.words[:2] == ["wherewhat", "sweep"] else (0, 2)
    if step.code not in allowed:
        found.append((f"exit code {step.code}", f"exit code {step.code}"))
    if "Traceback" in step.err + step.out:
        found.append(("printed traceback", "printed a traceback"))
    elif match := _NOISE.search(step.err):
        line = step.err[step.err.rfind("\n", 0, match.start()) + 1 :].splitlines()[0]
        found.append((f"noise {escaped(line)[:60]}", f"printed by a library: {escaped(line)[:160]}"))
    if step.code == 2:
        lines = step.err.splitlines()
        said = [line for line in lines if line.startswith("wherewhat: ")]
        if len(said) != 1 or lines[-1] != said[0]:
            found.append(("not one line", f"{len(said)} lines of {len(lines)} begin with 'wherewhat: '"))
    for name, text in (("stdout", step.out), ("stderr", step.err)):
        control = next((c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)), None)
        if control is not None:
            at = text.index(control)
            shown = escaped(text[max(0, at - 40) : at + 20])
            found.append(("control character", f"control character {control!a} on {name}: {shown}"))
    return found


def _native_frame(err: str) -> str:
    """Return the innermost Python frame in the trace that ``faulthandler`` wrote."""
    frames = re.findall(r'File "(?:[^"]*/)?([^"/]+/[^"/]+)", line \d+ in (\S+)', err)
    return " ".join(frames[0]) if frames else "native code"
