"""Cases by kind: each is made from a seed and an index, in the working directory of its process."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz import kills, materials, models, mutations
from fuzz.outcome import Step

LONG_WORK = {"steps", "sequences", "seeds", "count", "longest", "batch", "record_every", "extra"}
"""Options by which long work may be asked for: they get numbers that are small, or too large for anything."""
_SMALL = ["--text", "text.txt", "--tokens", "16", "--no-control", "--device", "cpu"]


@dataclass
class Case:
    """Commands on the files of the working directory.

    Attributes:
        steps: Commands: ``wherewhat`` or ``python`` and words, see :class:`fuzz.outcome.Step`.
        notes: How the input was made.
        stdin: File that standard input reads; by default an empty one.
        verify: Returns broken promises that the output alone does not show.
    """

    steps: list[list[str]]
    notes: list[str] = field(default_factory=list)
    stdin: str = ""
    verify: Callable[[list[Step]], list[str]] | None = None


def build(kind: str, index: int, seed: int, folder: Path) -> Case:
    """Make the files of a case in the working directory and return its commands.

    Args:
        kind: Name in :data:`KINDS`.
        index: Number of the case.
        seed: Seed of all cases; known and planted cases do not depend on it.
        folder: The materials.
    """
    for name in ("tiny", "text.txt"):
        take(folder, name)
    return KINDS[kind](Random(f"{seed} {kind} {index}"), index, folder)


def take(folder: Path, *names: str) -> None:
    """Copy materials to the working directory."""
    for name in names:
        source = folder / name
        if source.is_dir():
            shutil.copytree(source, name, symlinks=True)
        else:
            shutil.copy2(source, name)


def finished_run(store: str = "runs") -> Path:
    """Return the run directory of :data:`materials.RUN`, or that of the training in ``lab``."""
    return next(path.parent for path in sorted(Path(store).glob("*/config.json")))


# Command lines


@functools.cache
def _commands() -> dict[tuple[str, ...], Any]:
    """Every command of the application by its words."""
    import typer

    from wherewhat.cli.main import build as application

    found = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*path, name))
        if not hasattr(command, "commands"):
            found[path] = command

    walk(typer.main.get_command(application()), ())
    return found


def _settings(path: tuple[str, ...]) -> list[str]:
    """The names for ``--set`` of a command."""
    from wherewhat.measures.measurement import measurements

    if path == ("multihop", "train"):
        return [
            *materials.SMALL_TRAINING,
            "dropout",
            "context",
            "learning_rate",
            "seed",
            "hops",
            "encoding",
            "vocabulary",
        ]
    declared = measurements().get(path[0])
    return [f.name for f in dataclasses.fields(declared.config)] if declared else []


def _plausible(name: str, random: Random) -> str:
    """Return a value that an option may have."""
    known: dict[str, list[str]] = {
        "--text": ["text.txt", "lines.jsonl", "empty-folder", "more.txt"],
        "--tokens": ["2", "8", "16", "30"],
        "--documents": ["1", "2"],
        "--weights": ["trained", "random", "shuffled"],
        "--dtype": ["float32", "bfloat16", "float16", "float64"],
        "--device": ["cpu", "auto", "cuda", "cuda:0", "cuda:99", "meta", "mps", "cpu:3"],
        "--device-map": ["auto", "cpu", "cuda:0", "balanced", "sequential", "disk", "meta", "0", "{}"],
        "--attn-implementation": ["sdpa", "eager", "flash_attention_2", "flex_attention", "paged|sdpa", "x"],
        "--prompts": ["binding", "numbers", "letters", "random"],
        "--items": ["items.jsonl", "arc_easy", "lines.jsonl"],
        "--out": ["runs", "other/deep", "empty"],
        "--chunk": ["8", "16"],
        "--revision": ["main", "0" * 40],
        "--config": ["deep.toml", "deep.json", "text.txt"],
        "--figure": ["map", "plane", "distance", "rates", "positions"],
        "--by": ["model", "model,weights", "step", "size"],
        "--engine": ["local"],
        "--workers": ["1"],
        "--selector": ["ranks", "symbolic", "random", "costs", "greedy"],
        "--unit": ["group", "head"],
    }
    return random.choice(known.get(name, ["0", "1", "2", "0.5", "out.csv", "x"]))


def _command_line(random: Random, index: int, folder: Path) -> Case:
    """A command with options of the application and plausible or hostile values."""
    mutations.props()
    take(folder, "more.txt", "lines.jsonl", "items.jsonl", "runs", "tiny.gguf", "adapter", "plan.json")
    paths = sorted(_commands())
    path = random.choice(paths)
    words, given = _arguments(path, random)
    options = [p for p in _commands()[path].params if p.param_type_name == "option"]
    for option in random.sample(options, min(len(options), random.choice([0, 1, 1, 2, 2, 3, 5]))):
        name = random.choice([*option.opts, *option.secondary_opts])
        if option.is_flag:
            words.append(name)
        elif name == "--set":
            settings = _settings(path)
            some = random.sample(settings, min(len(settings), random.choice([1, 1, 2])))
            given |= {key: _number(key, random) for key in some}
        elif random.random() < 0.5:
            words += [name, _plausible(name, random)]
        else:
            words += [name, _number(name, random) if name[2:] in LONG_WORK else mutations.word(random)]
    for key, text in given.items():
        words += ["--set", f"{key}={text}"]
    if random.random() < 0.15:
        at = random.randrange(len(path) + 1, len(words) + 1)
        words[at : at + random.randrange(2)] = [mutations.word(random)]
    return Case([["wherewhat", *words]])


def _arguments(path: tuple[str, ...], random: Random) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command that make its work small, some of them hostile, and its settings."""
    model = (
        mutations.word(random) if random.random() < 0.25 else random.choice(["tiny", "tiny", "tiny.gguf", "adapter"])
    )
    run = mutations.word(random) if random.random() < 0.4 else str(finished_run())
    plan = materials.PLAN[2:]
    small: dict[str, list[str]] = {
        "report": [model, "--text", "text.txt", "--tokens", "16", "--device", "cpu"],
        "check": [model, "--device", "cpu"],
        "plan": [model, *plan],
        "compare": ["runs" if random.random() < 0.6 else mutations.word(random)],
        "export": [run, random.choice(["x.csv", "x.parquet", "x.html", "x", "", "locked/x.csv", "empty-folder"])],
        "sweep": [random.choice(["deep.toml", "text.txt", mutations.word(random)])],
        "encodings": ["empty-folder"]
        if path[-1] == "report"
        else ["--recipe", random.choice(["deep.toml", mutations.word(random)])],
        "prompts": [model, "--tokens", "16", "--device", "cpu", "--no-control"],
        "choices": [model, "--items", "items.jsonl", "--device", "cpu", "--no-control"],
    }
    words = small.get(path[0], [model, *_SMALL])
    given = {}
    if path[0] == "multihop":
        runs = [run]
        words = {"train": [random.choice(["number", "letter", "index", mutations.word(random)])], "construct": []}.get(
            path[1], runs
        )
        given = dict(materials.SMALL_TRAINING) if path[1] == "train" else {}
    return [*path, *words], given


def _number(name: str, random: Random) -> str:
    """Return a hostile value of an option with a number."""
    long = name.lstrip("-") in LONG_WORK
    pool = [n for n in mutations.NUMBERS if not long or n in ("0", "-1", "1", "nan", "", "many") or len(n) > 15]
    return random.choice(pool) if random.random() < 0.8 else random.choice(mutations.WORDS)


# Names as paths


def _name(random: Random, index: int, folder: Path) -> Case:
    """A hostile name wherever a name or path is given."""
    mutations.props()
    take(folder, "runs", "items.jsonl")
    pool = mutations.NAMES + mutations.PROPS + mutations.WORDS
    name = pool[index] if index < len(pool) else "/".join(random.sample(pool, 2))
    if name.startswith("/"):
        name = f".{name}"
    run = str(finished_run())
    commands: list[list[str]] = [
        ["check", name],
        ["attention", name, *_SMALL],
        ["attention", "tiny", *_SMALL, "--out", name],
        ["attention", "tiny", "--text", name, *_SMALL[2:]],
        ["attention", "tiny", *_SMALL, "--config", name],
        ["choices", "tiny", "--items", name, "--device", "cpu", "--no-control"],
        ["extend", "tiny", *_SMALL, "--set", f"plan={name}"],
        ["check", "nobody/nothing", "--revision", name],
        ["report", name, "--tokens", "16"],
        ["plan", name],
        ["compare", name],
        ["compare", "runs", "--csv", name],
        ["compare", "runs", "--html", name],
        ["compare", "runs", "--parquet", name],
        ["export", name, "x.csv"],
        ["export", run, name],
        ["export", run, f"{name}.csv"],
        ["sweep", name],
        ["sweep", "--status", "--store", name],
        ["encodings", "report", name],
        ["encodings", "run", "--recipe", name],
        ["multihop", "run", name],
        ["multihop", "roles", name],
        ["multihop", "dynamics", name],
        ["report", "tiny", *_SMALL[:4], "--device", "cpu", "--training", name],
    ]
    calls = [[call, name] for call in ("load", "read_documents", "Result.load", "TrainingRun.load", "Plan.load")]
    calls += [
        ["measure", "attention", "tiny", name],
        ["measure", "attention", name, "text.txt"],
        ["run", "attention", "tiny", name],
    ]
    steps = [["wherewhat", *words] for words in random.sample(commands, 2)]
    return Case([*steps, ["python", *random.choice(calls)]])


# Config, sweep, recipe, plan and item files


_CONFIG = {"model": "tiny", "text": ["text.txt"], "tokens": 16, "device": "cpu", "control": False, "set": {"skip": 1}}
_SWEEP = {
    "store": "store",
    "tokens": 16,
    "weights": ["trained"],
    "seeds": [0],
    "models": [{"model": "tiny", "dtype": "float32"}],
    "texts": {"a": "text.txt"},
    "measurements": {"attention": {"set": {"sink_tokens": 1}}},
    "resources": {"cpus": 1, "retries": 0},
    "device": "cpu",
}
_MULTIHOP = {
    "tasks": ["number"],
    "seeds": [0],
    "extra": [3],
    "extra_count": 2,
    "options": {k: int(v) for k, v in materials.SMALL_TRAINING.items()},
}
_ENCODINGS = {
    "encodings": ["rope"],
    "seeds": [0],
    "held_out": 0.2,
    "model": {"layers": 1, "heads": 2, "width": 16},
    "training": {"context": 32, "batch": 2, "steps": 2, "warmup": 1, "save_every": 1, "threads": 1},
    "watch": {"records": 2, "loss_windows": 1, "documents": 1, "queries": 2, "repeats": 1},
    "after": {"times": 2, "length_documents": 1, "perturb_documents": 1, "residual_documents": 1, "draws": 1},
}
_FILES: dict[str, tuple[Any, list[str]]] = {
    "config": (_CONFIG, ["axes", "--config"]),
    "sweep": (_SWEEP, ["sweep", "--workers", "1"]),
    "status": (_SWEEP, ["sweep", "--status"]),
    "multihop": (_MULTIHOP, ["multihop", "run"]),
    "encodings": (_ENCODINGS, ["encodings", "run", "--recipe"]),
    "plan": (None, ["extend", "tiny", *_SMALL]),
}
_LAUGHS = "a: &a [x]\n" + "".join(f"{n}: &{n} [{', '.join([f'*{chr(ord(n) - 1)}'] * 9)}]\n" for n in "bcdefghij")
_YAML = [
    _LAUGHS, "!!python/object/apply:os.system ['true']", "tokens: 2020-01-01", "? [1]\n: 2", "<<: 1", "&a [*a]",
    "{" * 3000, "- " * 3000, "tokens: 0o17\ntext: ~", "1: 2\ntrue: 3", "tokens: !!float x", "a: !!binary x",
    "%YAML 9.9\n---\na: 1", "\ta: 1",
]  # fmt: skip


def _file(random: Random, index: int, folder: Path) -> Case:
    """A config, sweep, recipe or plan file with changes; as TOML, JSON or YAML."""
    take(folder, "plan.json")
    kind = random.choice(sorted(_FILES))
    tree, words = _FILES[kind]
    if tree is None:
        tree = json.loads(Path("plan.json").read_text())
    notes = []
    # An unchanged sweep or study runs for long.
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        tree, note = mutations.changed(tree, random, kept={*LONG_WORK, "options", "task_options", "training"})
        notes.append(note)
    ending = "json" if kind == "plan" else random.choice(["toml", "toml", "json", "yaml"])
    path = Path(f"file.{ending}")
    text = _toml(tree) if ending == "toml" else json.dumps(tree)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if ending == "yaml" and random.random() < 0.4:
        text = random.choice(_YAML)
        path.write_text(text)
    elif random.random() < 0.25:
        notes.append(mutations.change_file(path, random))
    if kind == "plan":
        return Case([["wherewhat", *words, "--set", f"plan={path}"], ["python", "Plan.load", str(path)]], notes)
    return Case([["wherewhat", *words, str(path)]], notes)


def _toml(tree: Any) -> str:
    """Return a JSON value as TOML, as far as TOML can say it."""
    if isinstance(tree, dict):
        return "".join(f"{json.dumps(key)} = {_inline(entry)}\n" for key, entry in tree.items())
    return f"x = {_inline(tree)}"


def _inline(entry: Any) -> str:
    if isinstance(entry, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(inner)}" for key, inner in entry.items()) + "}"
    if isinstance(entry, list):
        return f"[{', '.join(map(_inline, entry))}]"
    if isinstance(entry, float):
        return repr(entry)
    return json.dumps(entry)


# Texts


def _text(random: Random, index: int, folder: Path) -> Case:
    """A text, file of JSON lines or file of items with changes."""
    mutations.props()
    take(folder, "lines.jsonl", "items.jsonl", "more.txt")
    source = random.choice(["text.txt", "lines.jsonl", "items.jsonl", "folder", "made.txt"])
    path = Path(source)
    notes = []
    if source == "folder":
        path.mkdir()
        for name in random.sample([*mutations.PROPS, *mutations.WORDS], 3):
            if "/" not in name and 0 < len(name) < 200 and name not in ("-", "."):
                shutil.copy("text.txt", path / f"{name}.txt")
                notes.append(f"folder/{name}.txt")
        victim = random.choice(sorted(path.iterdir()) or [Path("more.txt")])
        notes.append(mutations.change_file(victim, random))
    elif source == "made.txt":
        text = random.choice(
            ["the cat ", "\x1b[31m", "é", "\u202e", "\ufeff", "\r\n", "\x85", "\ud7ff", "🙂", "\x07", "<s>", "</s>"]
        )
        path.write_bytes((text * random.choice([1, 30, 100, 500_000])).encode())
        notes.append(f"{text!a} repeated")
    elif source.endswith("l") and random.random() < 0.7:
        lines = path.read_text().splitlines()
        tree, note = mutations.changed(json.loads(lines[0]), random)
        lines[random.randrange(len(lines))] = random.choice(
            [json.dumps(tree), json.dumps(tree)[:-1], "[" * mutations.DEEP]
        )
        path.write_text("\n".join(lines))
        notes.append(note)
    else:
        notes.append(mutations.change_file(path, random))
    words = ["attention", "tiny", "--text", source, *_SMALL[2:]]
    if source == "items.jsonl":
        words = ["choices", "tiny", "--items", source, "--device", "cpu", "--no-control"]
    elif path.is_file() and not path.is_symlink() and random.random() < 0.2 and path.stat().st_mode & 0o400:
        return Case([["wherewhat", "attention", "tiny", "--text", "-", *_SMALL[2:]]], notes, stdin=source)
    return Case([["wherewhat", *words], ["python", "read_documents", source]], notes)


# Run directories


def _run_directory(random: Random, index: int, folder: Path) -> Case:
    """A finished run with changes: it is refused or gives the same numbers; the same command makes it again."""
    store = random.choice(["runs", "runs", "runs", "lab"])
    take(folder, store)
    run = finished_run(store)
    notes = []
    for _ in range(random.choice([1, 1, 2])):
        files = [path for path in sorted(Path(store).rglob("*")) if _usual(path)]
        path, other = random.choice(files), random.choice(files)
        kind = random.random()
        if kind < 0.1:
            path.write_bytes(other.read_bytes())
            notes.append(f"{path} is a copy of {other}")
        elif kind < 0.4 and path.suffix == ".json" and path.stat().st_size:
            notes += mutations.change_json(path, random)
        else:
            notes.append(mutations.change_file(path, random))
            break
    export = ["export", str(run), "again.csv"]
    steps = [["export", str(run), "export.csv"], ["compare", "runs", "--csv", "compare.csv"], materials.RUN, export]
    if store == "lab":
        command = random.choice([["dynamics"], ["roles"], ["lengths", "--extra", "3", "--count", "2"]])
        steps = [["multihop", *command, str(run)], materials.TRAIN]
    elif random.random() < 0.1:
        steps.insert(2, ["report", "tiny", "--text", "text.txt", "--tokens", "16", "--device", "cpu"])

    def verify(done: list[Step]) -> list[str]:
        made = [name for name in ("export.csv", "again.csv", "compare.csv") if Path(name).is_file()]
        kept = {name: folder / name.replace("again", "export") for name in made}
        if next(step.code for step in done if step.words[1:] in (materials.RUN, materials.TRAIN)) == 0:
            files = [path for path in (folder / run).iterdir() if path.name in kills.RESULTS]
            kept |= {str(path.relative_to(folder)): path for path in files}
            if store == "runs" and "again.csv" not in made:
                return ["the run cannot be exported after the same command"]
        changed = [name for name, path in kept.items() if not _same(Path(name), path)]
        return [f"{name} has other bytes than before the run was changed" for name in changed]

    return Case([["wherewhat", *words] for words in steps], notes, verify=verify)


def _killed(random: Random, index: int, folder: Path) -> Case:
    """A command that is killed, alone or beside others on the same run; the same command ends as undisturbed."""
    take(folder, "speller", "more.txt", "items.jsonl", "lines.jsonl")
    Path("sweep.json").write_text(json.dumps(kills.SWEEP))
    words = kills.COMMANDS[index % len(kills.COMMANDS)]
    steps = [["python", "kill", str(random.random()), *words], ["wherewhat", *words]]
    return Case(steps, verify=lambda done: kills.differences())


def _usual(path: Path) -> bool:
    """Return whether a path is a file that can be read."""
    return path.is_file() and not path.is_symlink() and bool(path.stat().st_mode & 0o400)


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and path.read_bytes() == other.read_bytes()


def _planted(random: Random, index: int, folder: Path) -> Case:
    """A broken promise, for the tests of the fuzzer."""
    verify = (lambda steps: ["planted"]) if PLANTED[index] == "silent use" else None
    return Case([["python", "planted", PLANTED[index]]], verify=verify)


def _model(random: Random, index: int, folder: Path) -> Case:
    """A model folder with changes."""
    spec, notes = models.change_folder(random, folder, take)
    return Case(_loading(spec, random), notes)


def _gguf(random: Random, index: int, folder: Path) -> Case:
    """A GGUF file with changes."""
    name = random.choice(["tiny.gguf", "pieces.gguf"])
    take(folder, name)
    return Case(_loading(name, random), models.change_gguf(Path(name), random))


def _safetensors(random: Random, index: int, folder: Path) -> Case:
    """A model folder whose weights have another header or other values."""
    spec = random.choice(["tiny", "tiny", "sharded", "adapter"])
    if spec != "tiny":
        take(folder, spec)
    return Case(_loading(spec, random), models.change_safetensors(sorted(Path(spec).glob("*.safetensors")), random))


def _loading(spec: str, random: Random) -> list[list[str]]:
    """Return commands that load a model."""
    kind = random.random()
    if kind < 0.3:
        return [["python", "load", spec]]
    if kind < 0.7:
        return [["wherewhat", "check", spec, "--device", "cpu"]]
    weights = random.choice([[], [], ["--weights", "random"], ["--weights", "shuffled"]])
    return [["wherewhat", "attention", spec, *_SMALL, *weights]]


def _known(random: Random, index: int, folder: Path) -> Case:
    """An input that broke a promise once."""
    from fuzz.known import KNOWN

    mutations.props()
    return KNOWN[index](folder)


PLANTED = [
    "traceback", "exit code", "abort", "control character", "warning", "memory", "unfinished file", "two lines",
    "silent use", "process", "nothing",
]  # fmt: skip
KINDS: dict[str, Callable[[Random, int, Path], Case]] = {
    "known": _known,
    "command": _command_line,
    "name": _name,
    "file": _file,
    "text": _text,
    "model": _model,
    "gguf": _gguf,
    "safetensors": _safetensors,
    "run": _run_directory,
    "kill": _killed,
    "planted": _planted,
}
GENERATED = [kind for kind in KINDS if kind not in ("known", "planted")]
"""Kinds with as many cases as are asked for."""
