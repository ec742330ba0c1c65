"""Check that a model can be measured: causal, with softmax attention, within its files and memory, and complete."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open

from wherewhat.boundary import MOST_LAYERS, read_json, size_in_words
from wherewhat.errors import LoadError, TooLargeError, as_one_line
from wherewhat.imports import quiet
from wherewhat.models.folder import has_tokenizer
from wherewhat.models.loaded import PROBE

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
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


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
    found = {"main memory": free_memory()}
    if device.type == "cuda":
        found[f"the memory of {device}"] = torch.cuda.mem_get_info(device)[0]
    for place, free in found.items():
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
        found = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
