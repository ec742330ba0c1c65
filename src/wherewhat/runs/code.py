"""Code that a number depends on: files of the user's own modules, and functions, hashed without comments."""

from __future__ import annotations

import ast
import copyreg
import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Collection, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from wherewhat.files import HASH_DIGITS, JSON, text_sha256
from wherewhat.imports import package_version
from wherewhat.measures.measurement import Measurement

NOT_LISTED = frozenset({"wherewhat", "torch", "transformers"}) | sys.stdlib_module_names
"""Modules whose versions are not listed: those of three packages are in the identity anyway."""

_NOT_FOLLOWED = frozenset({"wherewhat", "torch", "transformers", "numpy", *sys.builtin_module_names})
"""Modules whose code is never followed, wherever they are installed."""


class OwnModules:
    """Decides which modules are the user's own code: the rest has a version.

    Own are ``__main__``, the package of the measurement, and all modules outside the folders of installed packages.
    """

    def __init__(self, module: str) -> None:
        self._top = module.partition(".")[0]
        self._known: dict[str, bool] = {}

    def __contains__(self, module: str) -> bool:
        top = module.partition(".")[0]
        if top not in self._known:
            self._known[top] = self._is_own(top)
        return self._known[top]

    def _is_own(self, top: str) -> bool:
        if top in _NOT_FOLLOWED:
            return False
        if top in (self._top, "__main__"):
            return True
        if top in sys.stdlib_module_names:
            return False
        file = _top_file(top)
        installed = file is None or {"site-packages", "dist-packages"} & set(file.parts)
        return not installed or (file is not None and package_version(distribution(top)) is None)


def _top_file(top: str) -> Path | None:
    """Return a file or folder of a top-level module, without importing it; None if it has none."""
    loaded = sys.modules.get(top)
    file = getattr(loaded, "__file__", None)
    if file is None:
        spec = None
        with suppress(ImportError, ValueError, AttributeError):
            spec = find_spec(top)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
        file = spec.origin if spec.has_location else folders[0] if folders else None
    return None if file is None else Path(file)


@functools.cache
def distribution(top: str) -> str:
    """Return the name of the installed package that a top-level module belongs to; its own if there is none."""
    if package_version(top) is not None:
        return top
    from importlib.metadata import packages_distributions

    return next(iter(packages_distributions().get(top, ())), top)


def read_sources(modules: Iterable[str], own: OwnModules) -> tuple[dict[str, str], set[str]]:
    """Return the hash of each own module that these modules need, by name, and the other packages that they import.

    Modules that are imported inside functions are included; nothing is imported to find them.
    """
    hashes: dict[str, str] = {}
    packages: set[str] = set()
    left = [name for module in modules for name in _with_parents(module)]
    while left:
        module = left.pop()
        if module in hashes:
            continue
        file = _file_of(module)
        if file is None:
            continue
        try:
            data = file.read_bytes()
        except OSError:
            continue
        digest, imports = _parsed(data, is_source=file.suffix == ".py")
        hashes[module] = digest[:HASH_DIGITS]
        inside = module if file.name == "__init__.py" else module.rpartition(".")[0]
        package = getattr(sys.modules.get(module), "__package__", None) or inside
        for level, name, members in imports:
            try:
                base = resolve_name("." * level + name, package) if level else name
            except ImportError:  # beyond the top-level package
                continue
            if base not in own:
                if base.partition(".")[0] not in NOT_LISTED:
                    packages.add(base.partition(".")[0])
                continue
            left += _with_parents(base)
            left += [f"{base}.{member}" for member in members if member != "*"]
    return dict(sorted(hashes.items())), packages


def _with_parents(module: str) -> list[str]:
    """Return a module and the packages that it is in, whose code is run as well."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _file_of(module: str) -> Path | None:
    """Return the file of a module, loaded or not, without importing it."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None:
        return Path(file)
    parent, _, _ = module.rpartition(".")
    spec = None
    with suppress(ImportError, ValueError, AttributeError):
        if not parent:
            spec = find_spec(module)
        else:
            folders = getattr(sys.modules.get(parent), "__path__", None)
            if folders is None:
                package = _file_of(parent)
                folders = None if package is None or package.name != "__init__.py" else [str(package.parent)]
            spec = None if folders is None else PathFinder.find_spec(module, list(folders))
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


@functools.lru_cache(maxsize=1024)
def _parsed(data: bytes, *, is_source: bool) -> tuple[str, list[tuple[int, str, list[str]]]]:
    """Return the hash of a file without comments and docstrings, and its imports: level, module and names."""
    try:
        tree = ast.parse(data) if is_source else None
    except (SyntaxError, ValueError, RecursionError):
        tree = None
    if tree is None:
        return hashlib.sha256(data).hexdigest(), []
    imports: list[tuple[int, str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del node.body[: isinstance(first.value.value, str)]
    return text_sha256(ast.dump(tree)), imports


DECLARED = "revision declared by its author"
"""Stands for the code of a measurement outside this package whose class has a ``revision``."""

_NO_CODE = frozenset(
    {
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
"""Attributes of classes on which no number depends."""

_SCALARS = (type(None), bool, int, complex, str, bytes, type(Ellipsis), type(NotImplemented), range)
_DEEPEST = 100
"""Values that are nested deeper are not looked at."""

_WALKS = 5
"""Largest number of walks until no new module is imported."""

_HAS_DOCSTRING = 0x4000000
"""Flag of functions with a docstring, from Python 3.13."""


def code_identity(measurement: Measurement, config: Any = None) -> dict[str, JSON]:
    """Return what stands for the code of a measurement, and of what its options name, in the identity of its runs.

    Built-in measurements have their ``revision`` alone. One outside this package that declares it itself has ``code``
    say that changes of its code are not noticed. Any other has hashes of its code there:

    * ``sources``: hash of every file of its own package that it needs, by module, without comments and docstrings;
    * ``loaded``: hash of the functions, classes and constants that it reaches in this process;
    * ``packages``: versions of other packages that these modules import.
    """
    return {**_measurement_code(measurement), **options_code(config)}


def options_code(config: Any) -> dict[str, JSON]:
    """Return hashes of code outside the package that options name, such as registered length methods; usually none.

    A config names it by its property ``code``, a mapping of classes or functions.
    """
    named = getattr(config, "code", None) or {}
    return {"options_code": {name: function_identity(kind) for name, kind in sorted(named.items())}} if named else {}


def _measurement_code(measurement: Measurement) -> dict[str, JSON]:
    kind = type(measurement)
    tops = {base: base.__module__.partition(".")[0] for base in kind.__mro__}
    outside = [base for base, top in tops.items() if top not in ("wherewhat", "builtins", "abc", "typing")]
    if kind not in outside:
        return {"revision": measurement.revision}
    if any("revision" in vars(base) for base in outside):
        return {"revision": measurement.revision, "code": DECLARED}
    # Private attributes are set while it measures.
    state = {name: value for name, value in _lasting(kind, vars(measurement)).items() if not name.startswith("_")}
    return {"revision": measurement.revision, "code": _identity(kind, state)}


def function_identity(function: Any) -> str:
    """Return a hash of a function as it is loaded, and of the files of the modules that it reaches."""
    identity = _identity(function, {})
    return _digest("function", str(identity["loaded"]), repr(identity["sources"]), repr(identity["packages"]))


def _identity(root: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    own = OwnModules(code_module(root))
    for _ in range(_WALKS):
        before = len(sys.modules)
        loaded = _LoadedCode(own)
        digest = loaded.hash(root, state)
        if len(sys.modules) == before:  # else modules that were imported on the way may be attributes of others now
            break
    sources, packages = read_sources(sorted(loaded.modules), own)
    packages |= loaded.packages
    versions = {name: package_version(name) for name in sorted(map(distribution, packages))}
    return {"sources": sources, "loaded": digest, "packages": {n: v for n, v in versions.items() if v is not None}}


def code_module(value: Any) -> str:
    """Return the name of the module with the code of a function or class; ``__module__`` of a wrapper is another's."""
    space = getattr(value, "__globals__", {})
    return str(space.get("__name__", getattr(value, "__module__", None)))


def _lasting(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object without its cached properties, which are set when they are used."""
    return {n: v for n, v in state.items() if not isinstance(getattr(kind, n, None), functools.cached_property)}


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


# Loaded code


class _LoadedCode:
    """Hashes a class or function with everything of the user's code that it reaches.

    Functions, classes and objects are numbered in the order in which they are reached, so that they may refer to each
    other; constants are described by content. Nothing depends on addresses or on the order of sets.

    Attributes:
        modules: Own modules that were reached.
        packages: Top-level names of other packages that were reached, beyond those in the identity anyway.
    """

    def __init__(self, own: OwnModules) -> None:
        self._own = own
        self.modules: set[str] = set()
        self.packages: set[str] = set()
        self._numbered: dict[int, str] = {}
        self._alive: list[Any] = []  # an address is not reused as long as its object lives
        self._left: list[Any] = []
        self._open: set[int] = set()
        self._seen: set[tuple[str, str, frozenset[str]]] = set()

    def hash(self, root: Any, state: Mapping[str, Any]) -> str:
        """Return the hash of a class or function, with values that belong to it."""
        parts = [self._value(root), self._value(dict(state))]
        while self._left:
            item = self._left.pop(0)
            parts.append(self._class(item) if isinstance(item, type) else self._function(item))
        return _digest(*parts)

    def _value(self, value: Any, names: Collection[str] = ()) -> str:
        """Return the description of any value; of a module, its attributes among ``names``."""
        kind = type(value)
        if kind is float:
            return f"float {value.hex()}"
        if kind in _SCALARS:
            return _digest(kind.__name__, repr(value)) if kind in (str, bytes) else f"{kind.__name__} {value!r}"
        if id(value) in self._open or len(self._open) > _DEEPEST:
            return "cycle"
        self._open.add(id(value))
        try:
            return self._described(value, kind, names)
        except Exception:  # noqa: BLE001 - objects of other packages may refuse anything; their class is known
            return _digest("object", kind.__module__, kind.__qualname__)
        finally:
            self._open.discard(id(value))

    def _described(self, value: Any, kind: type, names: Collection[str]) -> str:
        if kind is types.CodeType:
            return self._code(value)
        original = _compiled(value)
        if original is not None:
            return self._parts("compiled", original)
        if kind in (bytearray, memoryview):
            return self._parts(kind.__name__, bytes(value))
        if isinstance(value, types.FunctionType | type):
            return self._reference(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, names)
        if kind in (tuple, list):
            return _digest(kind.__name__, *(self._value(item, names) for item in value))
        if kind in (set, frozenset):
            return _digest(kind.__name__, *sorted(self._value(item) for item in sorted(value, key=self._order)))
        if isinstance(value, KeysView | ValuesView | ItemsView):
            return self._parts(kind.__name__, list(value))
        if kind in (dict, types.MappingProxyType):
            items = sorted(value.items(), key=lambda item: _order(item[0]))
            return _digest("dict", *sorted(_digest(self._value(k), self._value(v, names)) for k, v in items))
        if isinstance(value, property):
            return self._parts("property", value.fget, value.fset, value.fdel)
        if isinstance(value, staticmethod | classmethod):
            return self._parts(kind.__name__, value.__func__)
        if isinstance(value, functools.partial | functools.partialmethod):
            return self._parts(kind.__name__, value.func, value.args, value.keywords)
        if isinstance(value, functools.cached_property):
            return self._parts("cached_property", value.func)
        if isinstance(value, types.MethodType):
            return self._parts("method", value.__func__, value.__self__)
        if self._named(value):
            return self._name(value)
        if value is os.environ:  # as when it is reached by its module
            return _digest("name", "os", "environ")
        if hasattr(value, "__wrapped__") and callable(value) and kind.__module__ not in self._own:
            # Such as lru_cache, without what it has cached.
            return self._parts(f"{kind.__module__}.{kind.__qualname__}", value.__wrapped__)
        if isinstance(value, types.BuiltinFunctionType):
            return self._parts("builtin", value.__qualname__, value.__self__)
        if id(value) not in self._numbered and (array := _array(value)) is not None:
            self._number(value, "array")
            return _digest(array, self._value(getattr(value, "__dict__", {})))
        return self._object(value)

    def _order(self, value: Any) -> tuple[str, str]:
        """Return the key by which elements of a set are sorted: by content, never by address or hash."""
        if type(value) in (*_SCALARS, float):
            return _order(value), ""
        alone = _LoadedCode(self._own)
        alone._open = self._open
        return _order(value), alone._value(value.__code__ if isinstance(value, types.FunctionType) else value)

    def _parts(self, *parts: Any) -> str:
        return _digest(*map(self._value, parts))

    def _object(self, value: Any) -> str:
        """Return the description of an object by its class and state, as it would be copied; later its number."""
        if id(value) in self._numbered:
            return self._numbered[id(value)]
        kind = type(value)
        self._number(value, kind.__qualname__)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
        except Exception:  # noqa: BLE001 - a class may refuse in any way
            known = getattr(value, "__dict__", {}) if kind.__module__ in self._own else {}
            return _digest("object", self._value(kind), self._value(known))
        if isinstance(reduced, str):
            return _digest("object", self._value(kind), reduced)
        make, arguments, *more = reduced
        if more and isinstance(more[0], dict):
            more[0] = _lasting(kind, more[0]) or None
        state = [list(part) if index and part is not None else part for index, part in enumerate(more[:3])]
        return _digest("object", self._value(kind), self._parts(make, arguments, *state))

    def _named(self, value: Any) -> bool:
        """Return whether a value that is not the user's code can be found by its name."""
        module, name = code_module(value), getattr(value, "__qualname__", None)
        if not isinstance(name, str) or module in self._own:
            return False
        target: Any = sys.modules.get(module)
        for part in name.split("."):
            target = getattr(target, part, None)
        return target is value

    def _name(self, value: Any) -> str:
        top = value.__module__.partition(".")[0]
        if top not in NOT_LISTED:
            self.packages.add(top)
        return _digest("name", value.__module__, value.__qualname__)

    def _reference(self, value: Any) -> str:
        """Return the number of a function or class, whose description comes later; the name of others' code."""
        if self._named(value) or (isinstance(value, type) and value.__module__ not in self._own):
            return self._name(value)
        if id(value) not in self._numbered:
            self._number(value, value.__qualname__)
            self._left.append(value)
        return self._numbered[id(value)]

    def _number(self, value: Any, name: str) -> None:
        self._numbered[id(value)] = f"{len(self._numbered)} {name}"
        self._alive.append(value)

    def _class(self, kind: type) -> str:
        self.modules.add(kind.__module__)
        attributes = {
            name: value
            for name, value in vars(kind).items()
            # The summary of a measurement is the first line of its docstring.
            if name not in _NO_CODE and not (name == "summary" and isinstance(value, str))
        }
        described = (part for name in sorted(attributes) for part in (name, self._value(attributes[name])))
        return _digest("class", self._value(type(kind)), *map(self._value, kind.__bases__), *described)

    def _function(self, function: types.FunctionType) -> str:
        code, module = function.__code__, str(function.__globals__.get("__name__"))
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        parts = [self._value(code), self._value(function.__defaults__), self._value(function.__kwdefaults__)]
        parts += [part for name in sorted(cells) for part in (name, self._cell(cells[name]))]
        parts.append(self._value({k: v for k, v in vars(function).items() if k != "__doc__"}))
        if module in self._own:  # what others' code refers to, such as a decorator's, belongs to its package
            self.modules.add(module)
            parts += self._referred(function, code)
        return _digest("function", *parts)

    def _cell(self, cell: types.CellType) -> str:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty"
        return self._value(content)

    def _referred(self, function: types.FunctionType, code: types.CodeType) -> list[str]:
        """Return the names that a function takes from its module or imports, and the descriptions of their values."""
        read, written, imported, names = _names(code)
        space = function.__globals__
        descriptions = []
        for name in sorted(read - written):  # what the function itself sets is its state, such as a counter
            if name in space:
                descriptions += [name, self._value(space[name], names)]
        package = space.get("__package__") or str(space.get("__name__")).rpartition(".")[0]
        for level, name, members in sorted(imported):
            descriptions += [name, *self._imported(level, name, members, package, names)]
        return descriptions

    def _imported(
        self, level: int, name: str, members: tuple[str, ...], package: str, names: Collection[str]
    ) -> list[str]:
        """Return the description of a module that is imported when the function runs; it is imported now."""
        try:
            module = resolve_name("." * level + name, package) if level else name
            if module not in self._own:
                return [module]
            loaded_module = import_module(module)
        except (Exception, SystemExit):  # noqa: BLE001 - the function itself will raise it, or has another way
            return ["missing"]
        for member in members:
            if member != "*" and not hasattr(loaded_module, member):
                with suppress(Exception, SystemExit):
                    import_module(f"{module}.{member}")
        return [self._value(loaded_module, names)]

    def _module(self, module: types.ModuleType, names: Collection[str]) -> str:
        """Return the description of the attributes of an own module that code refers to; the name of another one."""
        if module.__name__ not in self._own:
            top = module.__name__.partition(".")[0]
            if top not in NOT_LISTED:
                self.packages.add(top)
            return _digest("module", module.__name__)
        self.modules.add(module.__name__)
        # Each once for the same names: modules refer to each other.
        among = frozenset(names)
        keys = [(module.__name__, name, among) for name in sorted(names) if name in vars(module)]
        used = [key[1] for key in keys if key not in self._seen]
        self._seen.update(keys)
        return _digest("module", module.__name__, *(p for n in used for p in (n, self._value(vars(module)[n], names))))

    def _code(self, code: types.CodeType) -> str:
        """Return the description of compiled code: its instructions with constants and names, without places."""
        parts = [code.co_name, f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"]
        parts += [str(code.co_flags & ~_HAS_DOCSTRING), code.co_exceptiontable.hex(), *code.co_varnames]
        for step in dis.get_instructions(code):
            if step.opname == "EXTENDED_ARG":
                continue
            if step.opcode in dis.hasconst:
                argument = self._value(step.argval)
            elif step.opcode in (*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hascompare):
                argument = str(step.argval)
            else:  # a count or a distance; a target of a jump would be a place
                argument = str(step.arg)
            parts += [step.opname, argument]
        return _digest("code", *parts)


def _compiled(value: Any) -> Any:
    """Return what torch.compile has compiled, since the rest of its result is its state; None for other values."""
    state = getattr(value, "__dict__", {})
    modules = state.get("_modules")
    return state.get("_torchdynamo_orig_callable") or (modules.get("_orig_mod") if isinstance(modules, dict) else None)


def _order(value: Any) -> str:
    """Return the key by which elements of a set are sorted: never an address."""
    if type(value) in (*_SCALARS, float):
        return f"{type(value).__name__} {value!r}"
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _names(code: types.CodeType) -> tuple[set[str], set[str], set[tuple[int, str, tuple[str, ...]]], set[str]]:
    """Return the names of globals that code reads and writes, its imports, and all names in it; of nested code too."""
    read, written, imported, names = set[str](), set[str](), set[tuple[int, str, tuple[str, ...]]](), set(code.co_names)
    before: list[Any] = [None, None]
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, members = before
            imported.add((level if isinstance(level, int) else 0, step.argval, tuple(members or ())))
        before = [before[1], step.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for whole, part in zip((read, written, imported, names), _names(constant), strict=True):
                whole |= part  # type: ignore[operator]
    return read, written, imported, names


def _array(value: Any) -> str | None:
    """Return the description of a tensor or array by its bytes; None for other values."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided:
        data = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A contiguous tensor of one element may have any stride.
        raw = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy() if data.numel() else b""
        return _digest("tensor", str(data.dtype), str(tuple(data.shape)), hashlib.sha256(raw).hexdigest())
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return _digest("array", value.dtype.str, str(value.shape), content)
    return None
