"""Identity: what a number depends on is measured again when it changes, and nothing else is."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import wherewhat
from helpers.models import llama_config, save_model, save_tokenizer
from wherewhat.errors import LoadError
from wherewhat.measures import measurement as registry
from wherewhat.measures.measurement import find_measurement, measurements, register
from wherewhat.plans.planner import _Planner
from wherewhat.plans.request import PlanRequest
from wherewhat.progress import Silent
from wherewhat.report.excerpt import ExcerptFile
from wherewhat.runs import execution, identity, jobs
from wherewhat.runs.code import DECLARED, code_identity
from wherewhat.runs.execution import LastModel, prepare, run, run_controls
from wherewhat.runs.identity import KnownRuns, is_current, reused_line, versions
from wherewhat.runs.request import MemoryModel, ModelRequest, Request
from wherewhat.sweep.cells import expand
from wherewhat.sweep.file import read_sweep_file
from wherewhat.text.documents import embedded_documents

TEXT = "the cat sat on the mat and the dog ran "

NOTEBOOK = '''
import enum
import functools
from dataclasses import dataclass, field

import numpy as np
import torch
import wherewhat
from wherewhat.options import option

SCALE = 2.0
WEIGHTS = {"first": 1.0, "others": [0.5, 0.25]}
NAMES = frozenset({"alpha", "beta", "gamma"})
TABLE = torch.tensor([1.0, 2.0, 3.0])
GRID = np.array([1.0, 2.0])


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


CHOSEN = Side.LEFT


@dataclass(frozen=True)
class Setting:
    """A setting."""

    power: float = 2.0
    more: tuple = field(default_factory=tuple)

    def applied(self, x):
        return x**self.power


SETTING = Setting(power=3.0)


def times(factor):
    def decorate(function):
        @functools.wraps(function)
        def wrapped(*args):
            return function(*args) * factor

        return wrapped

    return decorate


def power_of(exponent):
    return lambda x: x**exponent


square = power_of(2)


def helper(x):
    """Return the scaled value."""
    return x * SCALE


@times(5.0)
def decorated(x):
    return x


@functools.lru_cache
def cached(x):
    return x + 7.0


def added(x, y=1.0, *, z=4.0):
    return x + y + z


third = functools.partial(added, 3.0, z=6.0)


def nested(x):
    def inner(y):
        return y + 11.0

    return sum(inner(y) for y in (x, 12.0))


@dataclass(frozen=True)
class Options:
    """Options."""

    reach: int = option(8, "how far")


class Base(wherewhat.TextMeasurement):
    """What measurements share."""

    def shifted(self, x):
        return x + 13.0


@wherewhat.register
class Mine(Base):
    """A measurement."""

    name = "mine"
    config = Options
    offset = 14.0
    metrics = (wherewhat.Metric("value", "value", "A number."),)

    @property
    def rest(self):
        return 15.0

    @staticmethod
    def plain(x):
        return x + 16.0

    @classmethod
    def of_class(cls, x):
        return x + 17.0

    @functools.cached_property
    def kept(self):
        return 18.0

    def measure(self, subject, text, config):
        """Return one number."""
        total = helper(config.reach) + WEIGHTS["first"] + len(NAMES) + float(TABLE.sum()) + float(GRID.sum())
        total += CHOSEN.value + SETTING.applied(2.0) + square(3.0) + decorated(1.0) + cached(1.0) + added(1.0)
        total += third(2.0) + nested(1.0) + self.shifted(1.0) + self.offset + self.rest + self.plain(0.0)
        total += self.of_class(0.0) + self.kept
        for name in {"one", "two"}:
            total += len(name)
        return {"value": float(total)}
'''

CODE_CHANGES = {
    "helper function": ("return x * SCALE", "return x * SCALE + 1"),
    "constant": ("SCALE = 2.0", "SCALE = 2.5"),
    "dict constant": ('"first": 1.0', '"first": 1.5'),
    "list in a dict": ("[0.5, 0.25]", "[0.5, 0.26]"),
    "set constant": ('"gamma"}', '"delta"}'),
    "tensor constant": ("[1.0, 2.0, 3.0]", "[1.0, 2.0, 3.5]"),
    "array constant": ("np.array([1.0, 2.0])", "np.array([1.0, 2.5])"),
    "enum": ("LEFT = 1", "LEFT = 3"),
    "member of an enum": ("CHOSEN = Side.LEFT", "CHOSEN = Side.RIGHT"),
    "dataclass instance": ("Setting(power=3.0)", "Setting(power=4.0)"),
    "method of a helper class": ("x**self.power", "x * self.power"),
    "decorator": ("function(*args) * factor", "function(*args) + factor"),
    "argument of a decorator": ("@times(5.0)", "@times(6.0)"),
    "closure": ("power_of(2)", "power_of(3)"),
    "lru_cache": ("x + 7.0", "x + 8.0"),
    "default argument": ("y=1.0", "y=1.5"),
    "keyword default": ("z=4.0", "z=4.5"),
    "partial": ("z=6.0", "z=6.5"),
    "nested function": ("y + 11.0", "y + 11.5"),
    "constant of an expression": ("(x, 12.0)", "(x, 12.5)"),
    "base class": ("x + 13.0", "x + 13.5"),
    "class attribute": ("offset = 14.0", "offset = 14.5"),
    "property": ("return 15.0", "return 15.5"),
    "static method": ("x + 16.0", "x + 16.5"),
    "class method": ("x + 17.0", "x + 17.5"),
    "cached property": ("return 18.0", "return 18.5"),
    "default of an option": ("option(8,", "option(9,"),
    "another attribute": ("GRID.sum()", "GRID.max()"),
    "set in a function": ('{"one", "two"}', '{"one", "three"}'),
}

NO_CODE_CHANGES = {
    "nothing": ("", ""),
    "comment": ("SCALE = 2.0", "# The scale.\nSCALE = 2.0  # as in the paper"),
    "docstring of a function": ("Return the scaled value.", "Return the value, scaled."),
    "docstring removed": ('        """Return one number."""\n', ""),
    "docstring of the class": ('"""A measurement."""', '"""My measurement of nothing."""'),
    "docstring of a module": ("\nimport enum", '"""Notes."""\n\nimport enum'),
    "lines between": ("\n\n\ndef helper", "\n\n\n\n\n\ndef helper"),
}

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_known", dict(measurements()))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def in_notebook(source: str) -> dict:
    """Run the cells of a notebook, which has no file, and return the code of its measurement."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, f"<cell {next(_numbers)}>", "exec"), vars(module))
    return code_identity(find_measurement("mine"))["code"]


PACKAGE = {
    "__init__.py": "",
    "deep.py": "FACTOR = 3.0\n\n\ndef deepest(x):\n    return x * FACTOR\n",
    "near.py": "from . import deep\n\nLIMIT = 5.0\n\n\ndef near(x):\n    return deep.deepest(x) + LIMIT\n",
    "lazy.py": "def late(x):\n    return x + 1.0\n",
    "inside.py": "def within(x):\n    return x + 2.0\n",
    "unrelated.py": "def other(x):\n    return x\n",
    "base.py": """
            import wherewhat

            class Base(wherewhat.TextMeasurement):
                def shifted(self, x):
                    return x + 13.0
            """,
    "keys.py": """
            import numpy as np
            import wherewhat
            from PACKAGE.base import Base
            from .near import near
            from . import inside

            OFFSET = 1.0

            def helper(x):
                return near(x) + OFFSET + inside.within(x)

            @wherewhat.register
            class Mine(Base):
                '''A measurement.'''

                name = "PACKAGE"
                metrics = (wherewhat.Metric("value", "value", "A number."),)

                def measure(self, subject, text, config):
                    from .lazy import late

                    return {"value": float(np.float64(self.shifted(helper(late(1.0)))))}
            """,
}


class Package:
    """A package of a user, in files."""

    def __init__(self, folder: Path) -> None:
        self.name = f"package_of_user_{next(_numbers)}"
        self.folder = folder / self.name
        self.folder.mkdir(parents=True)
        for name, content in PACKAGE.items():
            (self.folder / name).write_text(dedent(content).replace("PACKAGE", self.name))
        self.load()

    def load(self) -> None:
        """Import it as a new process would."""
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]
        importlib.invalidate_caches()
        importlib.import_module(f"{self.name}.keys")

    def module(self, name: str) -> types.ModuleType:
        return sys.modules[f"{self.name}.{name}"]

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        content = path.read_text()
        assert content.count(old) >= 1
        path.write_text(content.replace(old, new))

    def code(self) -> dict:
        return code_identity(find_measurement(self.name))["code"]

    def measured(self, out: Path) -> float:
        """The number, measured or found."""
        made = run(Request(self.name, model=memory_model(), texts=(list(range(8)),)), out=out)
        return made.scores().to_pydict()["value"][0]


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return Package(tmp_path / "code")


_kept: dict[str, MemoryModel] = {}


def memory_model() -> MemoryModel:
    if "model" not in _kept:
        torch.manual_seed(0)
        _kept["model"] = MemoryModel(AutoModelForCausalLM.from_config(llama_config()).eval(), model="tiny")
    return _kept["model"]


# Code


@pytest.mark.parametrize("change", CODE_CHANGES)
def test_changed_code_of_a_notebook_is_other_code(change):
    old, new = CODE_CHANGES[change]
    assert NOTEBOOK.count(old) == 1
    assert in_notebook(NOTEBOOK) != in_notebook(NOTEBOOK.replace(old, new))


@pytest.mark.parametrize("change", NO_CODE_CHANGES)
def test_comments_and_docstrings_are_no_code(change):
    assert in_notebook(NOTEBOOK) == in_notebook(NOTEBOOK.replace(*NO_CODE_CHANGES[change], 1))


STATE = '''
import functools
import re
import wherewhat

calls = 0
PATTERN = re.compile("a+")


class Node:
    def __init__(self):
        self.others = []


NODES = [Node() for _ in range(40)]
for node in NODES:
    node.others = NODES


@functools.lru_cache
def cached(x):
    return x + 1.0


@wherewhat.register
class Mine(wherewhat.TextMeasurement):
    """A measurement."""

    name = "mine"
    metrics = (wherewhat.Metric("value", "value", "A number."),)

    def measure(self, subject, text, config):
        global calls
        calls += 1
        self._last = cached(float(calls))
        return {"value": len(NODES[0].others) + len(PATTERN.pattern)}
'''


def test_state_of_a_measurement_is_no_code():
    before = in_notebook(STATE)
    assert in_notebook(STATE) == before
    measurement = find_measurement("mine")
    for _ in range(3):
        measurement.measure(None, None, None)
        assert code_identity(measurement)["code"] == before
    assert in_notebook(STATE.replace("a+", "b+")) != before


VALUES = {
    "conjugate": ("torch.tensor([1 + 2j]).conj()", "torch.tensor([1 + 3j]).conj()"),
    "one element of a column": ("torch.tensor([[1.0, 2.0]])[:, 0]", "torch.tensor([[3.0, 2.0]])[:, 0]"),
    "attribute of a tensor": ("scaled(torch.ones(1), 1.0)", "scaled(torch.ones(1), 2.0)"),
    "keys of a dict": ("{'a': 1}.keys()", "{'b': 1}.keys()"),
    "class that cannot be copied": ("NoCopy(1.0)", "NoCopy(2.0)"),
    "argument of a decorator that is a class": ("Decorator(str, 1.0)", "Decorator(str, 2.0)"),
}

OF_VALUE = """
import enum
import functools
import os
from os import environ

import torch
import wherewhat

class NoCopy:
    def __init__(self, scale):
        self.scale = scale

    def __reduce_ex__(self, protocol):
        raise TypeError

    @functools.cached_property
    def half(self):
        return self.scale / 2

class Decorator:
    def __init__(self, function, scale):
        functools.update_wrapper(self, function)
        self.scale = scale

    def __call__(self, x):
        return self.__wrapped__(x) * self.scale

class Kept:
    @functools.cached_property
    def half(self):
        return 0.5

class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2
    UP = 3

def scaled(tensor, scale):
    tensor.scale = scale
    return tensor

SIDES, SIDE, KEPT = {Side.LEFT, Side.RIGHT, Side.UP}, Side.LEFT, Kept()
VALUE = 0

@wherewhat.register
class Mine(wherewhat.TextMeasurement):
    'A measurement.'

    name = "mine"
    metrics = (wherewhat.Metric("value", "value", "A number."),)

    def measure(self, subject, text, config):
        return {"value": float(len([VALUE, SIDES, SIDE, environ])) + KEPT.half}
"""


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_all_kinds_are_known_by_content(kind):
    first, second = (
        [in_notebook(OF_VALUE.replace("VALUE = 0", f"VALUE = {value}")) for _ in "12"] for value in VALUES[kind]
    )
    assert first[0] == first[1] != second[0] == second[1]


def test_what_is_set_by_use_or_by_the_process_is_no_code(monkeypatch):
    before = in_notebook(OF_VALUE)
    find_measurement("mine").measure(None, None, None)  # sets a cached property
    assert code_identity(find_measurement("mine"))["code"] == before
    monkeypatch.setenv("UNRELATED", "1")
    assert code_identity(find_measurement("mine"))["code"] == before


def test_sets_of_objects_are_the_same_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    lines = ["from wherewhat.runs.code import code_identity", "print(code_identity(Mine()))"]
    script.write_text("\n".join([OF_VALUE.replace("import torch", ""), *lines]))
    found = set()
    for seed in "0123":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found.add(subprocess.run([sys.executable, script], env=environment, capture_output=True, check=True).stdout)
    assert len(found) == 1


def test_modules_that_import_each_other_are_described_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    name, modules = f"package_of_user_{next(_numbers)}", [f"m{i}" for i in range(12)]
    (tmp_path / name).mkdir()
    lines = [f"from . import {module}" for module in modules]
    for file in ("__init__", *modules):
        (tmp_path / name / f"{file}.py").write_text("\n".join([*lines, "X = 1.0", "def f():", "    return X", ""]))
    module = importlib.import_module(name)
    exec("def total():\n    return " + " + ".join(f"{one}.f()" for one in modules), vars(module))
    before = identity.function_identity(module.total)  # took 12! steps
    for one in modules:
        with monkeypatch.context() as patch:
            patch.setattr(getattr(module, one), "X", 2.0)
            assert identity.function_identity(module.total) != before
    assert identity.function_identity(module.total) == before


def test_a_module_that_ends_the_program_is_not_needed(package):
    package.edit("lazy.py", "def late", "raise SystemExit(3)\n\ndef late")
    package.load()
    assert package.code() == package.code()


def test_files_are_read_as_they_are_now(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "own_measurement.py"
    path.write_text(NOTEBOOK)
    importlib.import_module("own_measurement")
    measurement = find_measurement("mine")
    before = code_identity(measurement)["code"]
    for old, new in CODE_CHANGES.values():
        path.write_text(NOTEBOOK.replace(old, new))
        after = code_identity(measurement)["code"]
        assert (after["loaded"] == before["loaded"], after["sources"] == before["sources"]) == (True, False)
    for old, new in NO_CODE_CHANGES.values():
        path.write_text(NOTEBOOK.replace(old, new, 1))
        assert code_identity(measurement)["code"] == before
    del sys.modules["own_measurement"]


PACKAGE_CHANGES = {
    "beside the class": ("keys.py", "OFFSET = 1.0", "OFFSET = 2.0"),
    "relative import": ("near.py", "LIMIT = 5.0", "LIMIT = 6.0"),
    "import of an import": ("deep.py", "x * FACTOR", "x + FACTOR"),
    "imported module": ("inside.py", "x + 2.0", "x + 3.0"),
    "import inside a function": ("lazy.py", "x + 1.0", "x + 4.0"),
    "base class in another module": ("base.py", "x + 13.0", "x + 14.0"),
}


@pytest.mark.parametrize("change", PACKAGE_CHANGES)
def test_changed_modules_of_the_package_are_other_code(package, change):
    before = package.code()
    assert package.code() == before
    package.edit(*PACKAGE_CHANGES[change])
    assert package.code()["sources"] != before["sources"]  # edited, not loaded: which of both runs is not known
    package.load()
    after = package.code()
    assert after["sources"] != before["sources"]
    assert after["loaded"] != before["loaded"]


def test_what_is_replaced_in_the_process_is_other_code(package, monkeypatch):
    seen = [package.code()]
    for module, name, value in (
        ("deep", "FACTOR", 4.0),
        ("deep", "deepest", lambda x: x),
        ("near", "LIMIT", torch.ones(2)),
        ("lazy", "late", lambda x: 5.0),
        ("inside", "within", lambda x: 6.0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(package.module(module), name, value)
            seen.append(package.code())
    kind = type(find_measurement(package.name))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "shifted", lambda self, x: x)
        seen.append(package.code())
    with monkeypatch.context() as patch:
        patch.setattr(find_measurement(package.name), "width", 3, raising=False)
        seen.append(package.code())
    assert all(seen[0]["sources"].items() <= one["sources"].items() for one in seen)
    assert len({one["loaded"] for one in seen}) == len(seen)
    assert package.code() == seen[0]


def test_reloaded_modules_are_other_code(package):
    before = package.code()
    package.edit("inside.py", "x + 2.0", "x + 3.0")
    edited = package.code()
    importlib.reload(package.module("inside"))
    assert len({package.code()["loaded"], edited["loaded"]}) == 2
    package.edit("inside.py", "x + 3.0", "x + 2.0")
    importlib.reload(package.module("inside"))
    assert package.code() == before
    importlib.reload(package.module("keys"))  # registers the class again
    assert package.code() == before
    with pytest.raises(wherewhat.WherewhatError, match="there is already a measurement"):
        register(type(find_measurement(package.name)))


def test_what_does_not_matter_is_the_same_code(package, tmp_path):
    before = package.code()
    package.edit("unrelated.py", "return x", "return x + 1")
    package.edit("near.py", "LIMIT = 5.0", "LIMIT = 5.0  # not more")
    (package.folder / "notes.py").write_text("raise SystemExit")
    os.utime(package.folder / "keys.py", (0, 0))
    assert package.code() == before
    package.load()
    assert package.code() == before
    moved = shutil.copytree(package.folder, tmp_path / "elsewhere" / package.name)
    sys.path.insert(0, str(moved.parent))
    try:
        package.load()
        assert Path(package.module("keys").__file__).is_relative_to(moved)
        assert package.code() == before
    finally:
        sys.path.remove(str(moved.parent))


def test_versions_of_imported_packages_are_part_of_the_code(package, monkeypatch):
    before = package.code()
    assert before["packages"].keys() == {"numpy"}
    monkeypatch.setattr("wherewhat.runs.code.package_version", lambda name: "99")
    assert package.code()["packages"] == {"numpy": "99"}
    assert package.code()["loaded"] == before["loaded"]


def test_code_is_the_same_in_every_process_and_needs_no_torch(package, tmp_path):
    code = f"""
import json, sys
import {package.name}.base
from wherewhat.measures.measurement import find_measurement
from wherewhat.runs.code import code_identity
import {package.name}.keys
print(json.dumps(code_identity(find_measurement({package.name!r}))))
assert "torch" not in sys.modules
"""
    found = set()
    for seed, folder in (("1", tmp_path), ("2", package.folder)):
        path = os.pathsep.join([*(str(Path(one).absolute()) for one in sys.path if one)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "UNUSED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert json.loads(found.pop())["code"] == package.code()


def test_a_declared_revision_stands_for_the_code_and_says_so(package, tmp_path):
    package.edit("base.py", "def shifted", "revision = 2\n\n    def shifted")
    package.load()
    measurement = find_measurement(package.name)
    assert code_identity(measurement) == {"revision": 2, "code": DECLARED}
    config = {"versions": versions(), "revision": 2, "code": DECLARED}
    assert is_current(config, measurement, code_identity(measurement), versions())
    request = Request(package.name, model=memory_model(), texts=(list(range(8)),))
    first = run(request, out=tmp_path)
    assert (first.config["revision"], first.config["code"]) == (2, DECLARED)
    said = []
    package.edit("deep.py", "x * FACTOR", "x + FACTOR")
    package.load()
    assert run(request, out=tmp_path, progress=Said(said)).path == first.path
    line = f"already measured: {first.path} (revision 2 declared by its author; changes of its code are not noticed)"
    assert said[-1] == line == reused_line(first.path, first.config)
    package.edit("base.py", "revision = 2", "revision = 3")
    package.load()
    assert run(request, out=tmp_path).path != first.path


def test_built_in_measurements_have_their_revision():
    for measurement in measurements().values():
        assert code_identity(measurement) == {"revision": measurement.revision}


class Said(Silent):
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def say(self, line: str) -> None:
        self._lines.append(line)


# Requests


class Asked:
    """A request of files, with a model that is loaded once in each state."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.model = save_model(folder / "models/tiny")
        for name in ("a", "b"):
            (folder / f"{name}.txt").write_text(f"{TEXT * 3}{name} {TEXT}")
        self.out = folder / "runs"
        self.request = Request(
            "attention",
            model=ModelRequest(model=self.model, device="cpu"),
            files=(str(folder / "a.txt"), str(folder / "b.txt")),
            tokens=16,
        )

    def of_model(self, **changes) -> None:
        self.request = replace(self.request, model=replace(self.request.model, **changes))

    def of_request(self, **changes) -> None:
        self.request = replace(self.request, **changes)

    def places(self) -> tuple[str, str | None]:
        """Names of its run directory, which needs the model, and of its outcome, which does not."""
        known = KnownRuns(self.out).path(self.request)
        made = prepare(self.request, out=self.out, progress=Silent(), models=LastModel())
        return made.directory.path.name, None if known is None else known.name


def _version(name, where="wherewhat.runs.identity.package_version"):
    def change(asked):
        asked.patch.setattr(where, lambda one: "99" if one == name else "1")

    return change


def _tokenizer(asked):
    save_tokenizer(asked.model, bos=True)


def _weights(asked):
    save_model(asked.model, seed=8)


def _text(asked):
    (asked.folder / "a.txt").write_text("a dog " + TEXT * 4)


def _default(asked):
    asked.patch.setattr(PreTrainedModel, identity.CHOICE, lambda self, *_, **__: "eager")


def _sdpa(asked):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    asked.patch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *given, **options: own(*given, **options)
    )


def _norm(asked):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    own = LlamaRMSNorm.forward
    asked.patch.setattr(LlamaRMSNorm, "forward", functools.wraps(own)(lambda self, x: own(self, x) * 1.5))


def _rotation(asked):
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    asked.patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **options: own(*given, **options))


def _frequencies(asked):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    asked.patch.setitem(ROPE_INIT_FUNCTIONS, "linear", lambda *given, **options: None)


REQUEST_CHANGES = {
    "option": lambda asked: asked.of_request(options={"sink_tokens": 2}),
    "tokens": lambda asked: asked.of_request(tokens=17),
    "chunk": lambda asked: asked.of_request(chunk=8),
    "measurement": lambda asked: asked.of_request(measurement="heads"),
    "number of documents": lambda asked: asked.of_request(documents=1),
    "order of documents": lambda asked: asked.of_request(files=asked.request.files[::-1]),
    "text": _text,
    "prompts": lambda asked: asked.of_request(files=None, prompts="random", documents=2),
    "tokenizer": _tokenizer,
    "weights": _weights,
    "control": lambda asked: asked.of_model(weights="random"),
    "dtype": lambda asked: asked.of_model(dtype="float64"),
    "attention implementation": lambda asked: asked.of_model(attn_implementation="eager"),
    "default of transformers": _default,
    "replaced attention function": _sdpa,
    "replaced method of a model": _norm,
    "replaced function of a model": _rotation,
    "replaced entry of a table": _frequencies,
    "version of wherewhat": _version("wherewhat"),
    "version of torch": _version("torch"),
    "version of transformers": _version("transformers"),
    "revision": lambda asked: asked.patch.setattr(type(find_measurement("attention")), "revision", 77),
}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    return Asked(tmp_path, monkeypatch)


@pytest.mark.parametrize("change", REQUEST_CHANGES)
def test_a_changed_request_is_measured_again(asked, change):
    if change.startswith("version"):
        _version("none")(asked)
    before = asked.places()
    assert asked.places() == before
    REQUEST_CHANGES[change](asked)
    after = asked.places()
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_the_seed_of_a_control_is_measured_again(asked):
    asked.of_model(weights="random")
    before = asked.places()
    asked.of_model(seed=1)
    assert all(one != other for one, other in zip(asked.places(), before, strict=True))


def test_an_environment_that_changes_attention_is_measured_again(asked, monkeypatch):
    before = KnownRuns(asked.out).path(asked.request)
    with monkeypatch.context() as patch:
        patch.setenv("USE_HUB_KERNELS", "NO")
        assert KnownRuns(asked.out).path(asked.request) != before
    # A choice by another variable is seen once the model is loaded, so the model is loaded.
    choose = lambda self, *_, **__: os.environ.get("MY_ATTENTION", "sdpa")  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, identity.CHOICE, choose)
    name, known = asked.places()
    monkeypatch.setenv("MY_ATTENTION", "eager")
    assert known is None
    assert asked.places()[0] != name


def test_another_library_of_tokenizers_is_noticed(asked, monkeypatch):
    name, known = asked.places()
    installed = versions()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "package_version", lambda one: "99" if one == "tokenizers" else installed.get(one))
        assert KnownRuns(asked.out).path(asked.request).name != known
    encode = execution.LoadedModel.encode
    monkeypatch.setattr(execution.LoadedModel, "encode", lambda self, *a, **k: encode(self, *a, **k).flip(0))
    assert asked.places()[0] != name


def test_the_scale_of_an_adapter_is_measured_again(tmp_path):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_config(llama_config())
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    def config():
        request = Request("attention", model=adapted, texts=(list(range(8)),))
        return prepare(request, out=tmp_path, progress=Silent(), models=LastModel()).directory.config

    before = config()
    assert "peft" in before["versions"]
    for module in adapted.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2
    assert config()["weights_hash"] != before["weights_hash"]


def _moved_model(asked):
    moved = shutil.copytree(asked.model, asked.folder / "other/place" / asked.model.name)
    asked.of_model(model=moved)


def _moved_text(asked):
    moved = asked.folder / "texts"
    moved.mkdir()
    asked.of_request(files=tuple(shutil.copy(file, moved) for file in asked.request.files))


def _touched(asked):
    for file in asked.model.iterdir():
        os.utime(file)


def _relative(asked):
    asked.patch.chdir(asked.folder)
    asked.of_model(model=asked.model.relative_to(asked.folder))
    asked.of_request(files=("a.txt", "./b.txt"))
    asked.out = Path("runs")


SAME = {
    "nothing": lambda asked: None,
    "order of options": lambda asked: asked.of_request(options={"block_mib": 16, "sink_tokens": 1}),
    "default option": lambda asked: asked.of_request(options={"block_mib": "16"}),
    "path of the model": _moved_model,
    "path of the text": _moved_text,
    "time of files": _touched,
    "relative paths": _relative,
    "unused variable": lambda asked: asked.patch.setenv("NOT_USED_BY_ANYTHING", "1"),
    "permission to exceed the trained length": lambda asked: asked.of_request(beyond=True),
    "same implementation by name": lambda asked: asked.of_model(attn_implementation="sdpa"),
    "version of another package": _version("pyarrow"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_matter_is_not_measured_again(asked, change):
    if change.startswith("version"):
        _version("none")(asked)
    asked.of_request(options={"sink_tokens": 1, "block_mib": 16})
    before = asked.places()[0]
    SAME[change](asked)
    assert asked.places()[0] == before


# Reuse


def test_a_changed_helper_gives_the_new_number(package, tmp_path):
    first = package.measured(tmp_path)
    assert package.measured(tmp_path) == first
    package.edit("keys.py", "OFFSET = 1.0", "OFFSET = 10.0")
    package.load()
    assert package.measured(tmp_path) == first + 9


def test_finished_runs_are_those_of_todays_code_and_versions(package, tmp_path, monkeypatch):
    package.measured(tmp_path)
    known = KnownRuns(tmp_path)
    assert [config["measurement"] for _, config in known.finished()] == [package.name]
    path, config = known.finished()[0]
    measurement = find_measurement(package.name)
    code = code_identity(measurement)
    assert is_current(config, measurement, code, versions())
    assert not is_current({**config, "versions": {}}, measurement, code, versions())
    unversioned = {name: value for name, value in config.items() if name != "versions"}
    assert not is_current(unversioned, measurement, code, versions())
    with monkeypatch.context() as patch:
        patch.setattr("wherewhat.runs.identity.package_version", lambda name: "99")
        assert known.finished() == []
    package.edit("deep.py", "FACTOR = 3.0", "FACTOR = 4.0")
    assert known.finished() == []
    package.edit("deep.py", "FACTOR = 4.0", "FACTOR = 3.0")
    assert [found for found, _ in known.finished()] == [path]


def test_config_states_what_the_numbers_depend_on(asked):
    made = prepare(asked.request, out=asked.out, progress=Silent(), models=LastModel())
    config = made.directory.config
    assert config["attention"] == "sdpa"
    assert config["versions"].keys() == {"wherewhat", "torch", "transformers"}
    assert config["revision"] == find_measurement("attention").revision
    assert [document["name"] for document in config["documents"]] == ["a", "b"]
    assert len(config["token_ids"]) == 64


def _plan(asked):
    loaded = LastModel().loaded(asked.request.model)
    documents = [wherewhat.Document(name, TEXT * 3) for name in "ab"]
    request = PlanRequest(choose=1, documents=1, selector="ranks", tokens=24, window=8, sinks=1)
    return _Planner(loaded, request, documents, asked.out, Silent()).directory.path


def _training(asked):
    model = memory_model().module
    return wherewhat.TrainingRecorder(model, [list(range(8))] * 2, measurements="mine", out=asked.out).run().path


def _excerpt(asked):
    return ExcerptFile.of(asked.request.model, embedded_documents(1), tokens=8, out=asked.out).path


def _excerpt_of_memory(asked):
    return ExcerptFile.of(memory_model(), embedded_documents(1), tokens=8, out=asked.out).path


def _cell(asked):
    path = asked.folder / "sweep.json"
    values = {"models": [str(asked.model)], "texts": [asked.request.files[0]], "measurements": ["mine"], "tokens": 16}
    path.write_text(json.dumps(values))
    return expand(read_sweep_file(path))[0].id


@pytest.mark.parametrize("place", [_plan, _training, _excerpt, _excerpt_of_memory, _cell])
def test_everything_that_reuses_results_has_the_same_identity(asked, place, monkeypatch):
    in_notebook(NOTEBOOK)
    before = place(asked)
    assert place(asked) == before
    with monkeypatch.context() as patch:
        patch.setattr(identity, "package_version", lambda name: "99")
        assert place(asked) != before
    if place in (_training, _cell):  # those of a measurement
        in_notebook(NOTEBOOK.replace("SCALE = 2.0", "SCALE = 3.0"))
        assert place(asked) != before


# Measuring anew


def test_again_measures_anew_and_can_be_killed(asked, monkeypatch):
    first = run(asked.request, out=asked.out)
    measure = jobs.Batch.measure
    done = []

    def measured(batch):
        if len(done) == 1 and "killed" not in done:
            done.append("killed")
            raise KeyboardInterrupt
        done.extend(batch.keys[0])
        measure(batch)

    monkeypatch.setattr(jobs.Batch, "measure", measured)
    monkeypatch.setattr(jobs, "texts_at_once", lambda model, tokens: 1)
    assert run(asked.request, out=asked.out).path == first.path
    assert done == []
    with pytest.raises(KeyboardInterrupt):
        run(asked.request, out=asked.out, again=True)
    assert not (first.path / "complete.json").exists()
    resumed = run(asked.request, out=asked.out)
    assert done == ["a", "killed", "b"]
    assert resumed.is_complete
    assert run(asked.request, out=asked.out, again=True).path == first.path
    assert done[3:] == ["a", "b"]
    assert wherewhat.run(asked.request, out=asked.out, again=True).path == first.path
    assert done[5:] == ["a", "b"]


def test_again_tries_again_what_could_not_be_made(asked, monkeypatch):
    load = execution.load_model
    tried = []

    def refuse(*given, **options):
        tried.append(given)
        raise LoadError("no control can be made")

    monkeypatch.setattr(execution, "load_model", refuse)
    control = asked.request.with_weights("shuffled")
    assert run_controls([control], out=asked.out)[0] == "no control can be made"
    assert run_controls([control], out=asked.out)[0] == "no control can be made"
    assert len(tried) == 1
    monkeypatch.setattr(execution, "load_model", load)
    (made,) = run_controls([control], out=asked.out, again=True)
    assert made.is_complete
    assert run_controls([control], out=asked.out)[0].path == made.path


def test_again_on_the_command_line(cli, asked):
    words = ["attention", asked.model, "--text", asked.request.files[0], "--tokens", 16, "--device", "cpu"]
    words += ["--no-control", "--out", asked.out]
    assert cli(*words).code == 0
    stored = next(asked.out.glob("attention-*")) / "provenance.json"
    before = json.loads(stored.read_text())["finished"]
    assert cli(*words).code == 0
    assert json.loads(stored.read_text())["finished"] == before
    assert cli(*words, "--again").code == 0
    assert json.loads(stored.read_text())["finished"] > before


@pytest.mark.slow
def test_reports_claims_and_plans_are_measured_anew(asked):
    def times():
        return {path.parent.name: json.loads(path.read_text())["finished"] for path in asked.out.glob("*/prov*.json")}

    texts = [TEXT * 4, f"a dog {TEXT * 4}"]
    model = asked.request.model
    for make in (
        lambda **again: wherewhat.make_report([model], texts=texts, tokens=16, out=asked.out, **again),
        lambda **again: wherewhat.judge_claims(model, claims=[1], texts=texts, tokens=16, out=asked.out, **again),
        lambda **again: wherewhat.make_plan(
            model, texts=texts, selector="ranks", documents=0, tokens=24, window=8, sinks=1, out=asked.out, **again
        ),
    ):
        earlier = times()
        make()
        before = times()
        make()
        assert times() == before
        make(again=True)
        after = times()
        changed = {name for name in after if after[name] != before[name]}
        assert changed >= before.keys() - earlier.keys()
        assert changed
