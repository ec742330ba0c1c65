"""Laboratory models and trainings too small to learn anything."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from wherewhat.options import build_recipe
from wherewhat_lab.encoding_study.recipe import EncodingRecipe

VALUES = {
    "encodings": ["rope", "alibi", "learned"],
    "seeds": [0],
    "held_out": 0.2,
    "model": {"layers": 2, "heads": 2, "width": 32},
    "training": {
        "context": 64,
        "batch": 4,
        "steps": 20,
        "warmup": 2,
        "save_every": 7,
        "threads": 1,
        "precision": "float32",
    },
    "watch": {"records": 6, "loss_windows": 3, "documents": 2, "queries": 2, "repeats": 1},
    "after": {
        "times": 4,
        "length_documents": 2,
        "perturb_documents": 2,
        "residual_documents": 2,
        "draws": 1,
        "rates": [0.0, 0.1, 0.5],
        "strengths": [0.0, 1.0],
        "methods": ["none", "sliding-window", "yarn"],
    },
}

RECIPE = build_recipe(EncodingRecipe, VALUES)


def write_recipe(path: Path, *, encodings: tuple[str, ...] = (), **training) -> Path:
    """The same as a file, with other encodings or options of training."""
    values = VALUES | ({"encodings": list(encodings)} if encodings else {})
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            own = table | (training if name == "training" else {})
            lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in own.items())]
    path.write_text("\n".join(lines), "utf-8")
    return path


def _toml(value) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def spread(model):
    """The model with larger weights, and biases that are not zero: initial ones hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def draw(n=17, batch=4, vocabulary=40):
    return torch.randint(vocabulary, (batch, n), generator=torch.Generator().manual_seed(0))


def same(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@dataclass
class Interrupt:
    """Stops training as a user would."""

    at: int

    def __call__(self, step, model):
        if step == self.at:
            raise KeyboardInterrupt


@dataclass
class Told:
    """Tells the steps of a training, and waits for the end of its process at the last one."""

    connection: Connection
    last: int

    def __call__(self, step, model):
        self.connection.send(step)
        if step == self.last:
            signal.pause()


def killed(processes, work, directory, *, after):
    """A process that trains in a directory and tells its steps is killed when it has told one of them."""
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=work, args=(directory, theirs), daemon=True)
    child.start()
    theirs.close()
    while ours.recv() != after:
        pass
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
