"""Check that a model can be measured, before it is loaded and after; untrusted files are read in another process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import torch
from safetensors import safe_open

from wherewhat import errors
from wherewhat.boundary import MOST_LAYERS, read_json, size_in_words
from wherewhat.errors import LoadError, TooLargeError, WherewhatError, as_one_line, one_line
from wherewhat.imports import quiet
from wherewhat.models.loaded import PROBE
from wherewhat.models.source import has_tokenizer

SECONDS = 20
"""Time limit of a trial of small files."""

_SECONDS_PER_MB = 2
_MEMORY = 4 << 30
# What libraries print, from their import on, must not reach the stream of answers.
_START = "import os; n = os.dup(1); os.dup2(2, 1); from wherewhat.models.suitability import serve; serve(n)"


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
        except BaseException:  # interrupted: the next request would get this one's answer
            server.stop()
            raise
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


def serve(descriptor: int) -> None:
    """Answer requests from standard input until it ends; answers go to a file descriptor."""
    answers = os.fdopen(descriptor, "wb")
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


# Words, numbers, repeated letters and other scripts: a pattern of a tokenizer may take exponential time on them.
_LINE = "The quick brown fox, 1234567890 times: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n\n  naïve Ünïcödé 漢字 🙂!"
# Causal language models in which no layer computes a softmax over positions.
_NO_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"})
# Encoders that transformers can also run as decoders, and that are missing from its masked-LM table.
_ENCODERS = frozenset({"bert-generation", "reformer"})

_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?")


def read_config(folder: Path, spec: str, *, trust_remote_code: bool, local_only: bool) -> Any:
    """Return the transformers config of a model folder, if the model can be measured."""
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = read_json(folder / "config.json", name=f"config.json of {spec!r}", error=LoadError)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or not kind:
        raise LoadError(f"config.json of {spec!r} has no 'model_type', so the architecture is unknown")
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        if raw.get("auto_map"):
            raise LoadError(
                f"{spec!r} (model type {kind!r}) has its own Python code: if you trust it, allow it with "
                f"trust_remote_code=True (--trust-remote-code)"
            )
        raise LoadError(f"model type {kind!r} of {spec!r} is not known to the installed transformers: upgrade it")
    with as_one_line(LoadError, f"config.json of {spec!r} is not a valid {kind!r} config"):
        config = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=local_only
        )
    check_config(config, spec)
    config.return_dict = True  # outputs by name; a tuple has the same values
    return config


def describe_folder(folder: str) -> dict[str, int | None]:
    """Read config and tokenizer of a model folder, build the model without weights, and count its parameters.

    Returns:
        The number of ``parameters``; None if something cannot be read, which loading explains better.
    """
    from transformers import AutoConfig, AutoTokenizer

    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, **options)
            if has_tokenizer(Path(folder)):
                tokenizer = AutoTokenizer.from_pretrained(folder, **options)
                for text in (PROBE, _LINE):
                    tokenizer(text)
            parameters = count_parameters(config)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - config classes, tokenizers and models may raise any exception
        return {"parameters": None}
    return {"parameters": parameters}


def count_parameters(config: Any) -> int:
    """Return the number of parameters of a model, built without memory for them."""
    return sum(parameter.numel() for parameter in skeleton(config).parameters())


def skeleton(config: Any) -> Any:
    """Return a model on the meta device, without memory for its weights."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # part of the initialisation
    return model


def check_config(config: Any, spec: str) -> None:
    """Refuse models that are not causal or have no softmax attention."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise LoadError(f"{spec!r} is an encoder-decoder (seq2seq) model ({kind}): only causal language models work")
    if kind in _NO_ATTENTION:
        raise LoadError(f"{spec!r} is a state-space or recurrent model ({kind}): it has no attention to measure")
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise LoadError(f"{spec!r} is not a causal language model (model type {kind}): only those work")
    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if (kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in _ENCODERS) and not decodes:
        raise LoadError(f"{spec!r} is an encoder-only model ({kind}): only causal language models work")


def check_loaded(report: dict[str, Any], spec: str) -> None:
    """Refuse a model with weights that transformers initialised at random, by the loading report of `from_pretrained`.

    transformers itself only logs them.
    """
    problems = {"missing_keys": "has no weights for", "mismatched_keys": "has weights of another shape for"}
    for key, verb in problems.items():
        names = sorted(name if isinstance(name, str) else name[0] for name in report.get(key, ()))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LoadError(f"{spec!r} {verb} {names[0]}{more}: the checkpoint does not fit its config")


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], spec: str, dtype: str) -> None:
    """Refuse NaN and infinity in weights; those that are not :func:`is_readable` are skipped."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not is_readable(tensor):
            continue
        # A finite sum implies finite terms and is ten times faster; only other tensors are searched.
        values = tensor if tensor.element_size() > 1 else tensor.float()
        if bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all()):
            continue
        what = "NaN" if bool(torch.isnan(values).any()) else "infinite"
        raise LoadError(f"{spec!r} has {what} values in weight {name} (as {dtype}): the checkpoint is unusable")


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read: neither offloaded nor in a quantised format of several tensors."""
    return not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def stored_tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of some safetensors files with its name."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def check_layers(settings: Any, spec: str) -> None:
    """Refuse a ``config.json`` with more layers than any model has, since configs make lists of that length."""
    waiting = [settings]
    while waiting:
        table = waiting.pop()
        if isinstance(table, list):
            waiting += table
        if not isinstance(table, dict):
            continue
        waiting += table.values()
        for name, value in table.items():
            if _LAYERS.fullmatch(name) and isinstance(value, int | float) and value > MOST_LAYERS:
                raise LoadError(f"the config of {spec!r} has {name} = {value}: at most {MOST_LAYERS:,} layers work")


def check_stored(parameters: int, files: list[Path], spec: str) -> None:
    """Refuse a model of which the files of weights can hold only a small part, before it is allocated."""
    stored = sum(file.stat().st_size for file in files)
    if parameters > 8 * stored:  # every format of weights has at least one bit for each
        raise LoadError(
            f"config.json of {spec!r} describes {parameters:,} weights, of which {size_in_words(stored)} of files can "
            "hold only a part: the checkpoint does not fit its config"
        )


def check_memory(parameters: int, dtype: torch.dtype, device: torch.device | None, spec: str) -> None:
    """Refuse a model that is larger than the free memory; with a device of None, for several, nothing is checked."""
    if device is None:
        return
    needed = parameters * dtype.itemsize
    free_by_place = {"main memory": free_memory()}
    if device.type == "cuda":
        free_by_place[f"the memory of {device}"] = torch.cuda.mem_get_info(device)[0]
    for place, free in free_by_place.items():
        if free is not None and needed > free:
            raise TooLargeError(
                f"{spec!r} needs {size_in_words(needed)} for its {parameters:,} weights, {size_in_words(free)} of "
                f"{place} are free: use a smaller dtype, or --device-map auto"
            )


def free_memory(*, root: Path = Path("/")) -> int | None:
    """Return the free bytes of main memory, also inside a container; None where the system does not report them.

    Args:
        root: Folder of ``proc`` and ``sys``.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    free = _free_pages() if available is None else available * 1024
    return None if free is None else max(0, min([free, *_left_to_groups(root)]))


def _free_pages() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _left_to_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left to each limited control group of this process, in versions 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mount, limited, used, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limited, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        # Inside a container the group of the process is often the mount itself, under another name.
        inner = PurePosixPath(name.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = root / mount / group
            limit, usage = _number(folder / limited), _number(folder / used)
            if limit is not None and usage is not None:
                # Cached files count as used but can be evicted, as in MemAvailable.
                yield limit - usage + (_number(folder / "memory.stat", cached) or 0)


def _number(path: Path, name: str = "") -> int | None:
    """Return the number after a name in a system file, or the only one in it; None where there is none."""
    try:
        match = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
