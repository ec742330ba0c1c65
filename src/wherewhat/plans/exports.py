"""Exports: a plan as the file that an inference engine reads, written after a check that it means the same there.

What each engine accepts, and how its export is checked, is a table of ``docs/plan.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from wherewhat.boundary import MOST_TOKENS, output_file, output_folder, shown, size_in_bytes
from wherewhat.caches.limited_cache import planned
from wherewhat.caches.plan import Plan, Unit
from wherewhat.captures.calls import unobserved
from wherewhat.captures.chunks import CHUNK_TOLERANCE
from wherewhat.captures.layer_proofs import last_logits, random_prompt
from wherewhat.captures.proof import Proof, current_proof
from wherewhat.errors import ConfigError, MeasureError, as_one_line
from wherewhat.files import make_folder, readable_json, write_file
from wherewhat.imports import quiet
from wherewhat.models.loaded import LoadedModel, describe_dtype, evaluation, known_length
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import check_integer, checked, nearest
from wherewhat.plans.memory import cache_use, layer_indices
from wherewhat.progress import Progress, Silent, step
from wherewhat.runs.directory import collect_versions
from wherewhat.runs.request import MemoryModel, ModelRequest, model_request
from wherewhat.runs.subject import load_model

Kind = Literal["transformers", "vllm", "tensorrt-llm", "swaa", "duoattention", "kvpress"]
"""Engines for which a plan can be written."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_FOLDERS: tuple[Kind, ...] = ("duoattention", "kvpress")
"""Engines that read a folder of two files; the others read one file."""
_PATTERN, _SIZES = "full_attention_heads.tsv", "config.json"
_NO_SINKS: tuple[Kind, ...] = ("transformers", "vllm", "tensorrt-llm")
_SWAA_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
_TAIL, _DECODED = 32, 4
"""Last tokens of the prompt whose logits are compared, and how many of them are decoded one at a time."""


def export_paths(
    exports: Mapping[str, str | os.PathLike[str]] | Iterable[str],
    *,
    others: Mapping[str, str | os.PathLike[str] | None] | None = None,
) -> dict[Kind, Path]:
    """Return the paths to write by engine, checked, from a mapping or from words such as ``vllm=overrides.json``.

    No file is written over another one, or over one of ``others``, by the option that names it.
    """
    named: dict[str, str | os.PathLike[str]] = {}
    for word, path in exports.items() if isinstance(exports, Mapping) else (_pair(text) for text in exports):
        if word not in KINDS:
            raise ConfigError(f"--export has no kind '{word}': {nearest(word, KINDS)}")
        if word in named:
            raise ConfigError(f"--export {word} is given twice: give each kind once")
        named[word] = path
    checks = {kind: output_folder if kind in _FOLDERS else output_file for kind in KINDS}
    paths = {kind: checks[kind](named[kind], name=f"--export {kind}") for kind in KINDS if kind in named}
    taken = {os.path.realpath(path): name for name, path in (others or {}).items() if path is not None}
    for kind, path in paths.items():
        for file in (path, *_files(kind, path)):
            name = taken.setdefault(os.path.realpath(file), f"--export {kind}")
            if name != f"--export {kind}":
                raise ConfigError(f"{name} and --export {kind} have the same path {shown(file)}: give each its own")
    return paths


def _files(kind: Kind, path: Path) -> list[Path]:
    """Return the files of an export; the last one is the record of its check."""
    if kind in _FOLDERS:
        return [path / _PATTERN, path / _SIZES, path / "check.json"]
    return [path, path.with_name(f"{path.name}.check.json")]


def _pair(text: str) -> tuple[str, str]:
    kind, equals, path = text.partition("=")
    if not equals:
        raise ConfigError(f"--export is {shown(text)}: give KIND=FILE, such as vllm=overrides.json")
    return kind, path


def check_kinds(kinds: Iterable[Kind], unit: Unit, sinks: int) -> None:
    """Refuse engines that cannot limit such units, or have no sinks."""
    for kind in kinds:
        if kind in _FOLDERS:
            if unit == "head":
                raise ConfigError(
                    f"{kind} limits key heads, and this plan chooses query heads: make it with --unit group or layer"
                )
        elif unit != "layer":
            raise ConfigError(f"{kind} limits whole layers, and this plan chooses {unit}s: make it with --unit layer")
        if kind in _NO_SINKS and sinks:
            raise ConfigError(
                f"{kind} has no sinks, and this plan keeps the first {sinks} keys: make it with --sinks 0"
            )


@checked(model=model_request)
def export_plan(
    plan: Plan | str | os.PathLike[str],
    exports: Mapping[str, str | os.PathLike[str]],
    *,
    model: ModelRequest | MemoryModel,
    context: int | None = None,
    memory: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Write a plan as files of inference engines, each after a check; if one is refused, none is written.

    Args:
        plan: The plan, or its file.
        exports: Path to write by engine: ``transformers``, ``vllm``, ``tensorrt-llm`` or ``swaa`` (a file),
            ``duoattention`` or ``kvpress`` (a folder).
        model: The plan's model: a name, folder or file, a model in memory, or what :func:`wherewhat.load` returned.
        context: Tokens of the texts whose cache is computed; by default the trained length.
        memory: Memory that weights and caches share, such as ``80GB``; by default that of the GPU.
        progress: Progress callback; silent by default.

    Returns:
        The plan, with what its cache needs in ``provenance["cache"]`` and the checks in ``provenance["exports"]``.

    Examples:
        >>> export_plan("plan.json", {"vllm": "overrides.json"}, model="my-model")
    """
    paths = export_paths(exports, others={} if isinstance(plan, Plan) else {"the plan": plan})
    progress = progress or Silent()
    plan = plan if isinstance(plan, Plan) else Plan.load(os.fspath(plan))
    check_kinds(paths, plan.unit, plan.sinks)
    check_integer("context", context, least=1, most=MOST_TOKENS, optional=True)
    bytes_ = None if memory is None else size_in_bytes(memory, name="memory")
    with step(progress, f"loading {model.model}"):
        loaded = load_model(model, say=progress.say, hashed=False)
        with new_process_settings(weight_dtypes(loaded.model)), evaluation(loaded.model):
            proof = current_proof(loaded.model)
            plan.check(loaded.model, dataclasses.replace(proof, name=loaded.name), advice="")
            return finish_plan(loaded, proof, plan, paths, context=context, memory=bytes_)


def finish_plan(
    loaded: LoadedModel,
    proof: Proof,
    plan: Plan,
    paths: Mapping[Kind, Path],
    *,
    context: int | None = None,
    memory: int | None = None,
) -> Plan:
    """Write the exports of a plan, and return it with their checks and what its cache needs."""
    use = cache_use(loaded.model, proof, plan, context=context, memory=memory)
    target = _Target(loaded, proof, plan, use["context"])
    written = {kind: (path, *target.export(kind)) for kind, path in paths.items()}
    for kind, path in paths.items():
        make_folder(path if kind in _FOLDERS else path.parent)
    for kind, (path, files, check) in written.items():
        described: dict[str, Any] = {
            "export": kind,
            "check": check,
            "model": plan.model,
            "fingerprint": plan.fingerprint,
            "plan": {"unit": plan.unit, "window": plan.window, "sinks": plan.sinks, "share": plan.share},
            "versions": collect_versions(),
        }
        for file, content in zip(_files(kind, path), (*files.values(), readable_json(described)), strict=True):
            write_file(file, content)
    checks = [{"export": kind, "check": check} for kind, (_, _, check) in written.items()]
    return dataclasses.replace(plan, provenance={**plan.provenance, "cache": use, "exports": checks})


def probe_exports(loaded: LoadedModel, proof: Proof, kinds: Iterable[Kind], *, plan: Plan) -> None:
    """Refuse engines that cannot run a plan like ``plan`` of this model, before the plan is measured.

    The choice of the plan does not matter: every other layer sees everything here.
    """
    full = {layer: (0,) * (number % 2) for number, layer in enumerate(plan.layers)}
    target = _Target(loaded, proof, dataclasses.replace(plan, full=full), plan.window)
    for kind in kinds:
        target.export(kind)


@dataclass
class _Target:
    """A plan and its model, to be written for engines."""

    loaded: LoadedModel
    proof: Proof
    plan: Plan
    context: int
    check: Check | None = None

    def export(self, kind: Kind) -> tuple[dict[str, bytes], str]:
        """Return the files of an engine by name, empty for the one that the user named, and how they were checked."""
        makers: dict[Kind, Callable[[], tuple[dict[str, bytes], str]]] = {
            "transformers": self._transformers,
            "vllm": self._vllm,
            "tensorrt-llm": self._tensorrt,
            "swaa": self._swaa,
            "duoattention": self._pattern,
            "kvpress": self._pattern,
        }
        return makers[kind]()

    def _transformers(self) -> tuple[dict[str, bytes], str]:
        overrides = self._overrides("transformers")
        check = self._compare(overrides)
        if check.ignored:
            raise MeasureError(
                f"{self._type} ignores layer_types in transformers: its logits are those of full attention, "
                f"{check.difference:.2g} of the largest from those of the plan; use --export vllm, or wherewhat.planned"
            )
        return {"": readable_json(overrides)}, f"{self._equal(check)}: built again with these fields"

    def _vllm(self) -> tuple[dict[str, bytes], str]:
        overrides = self._overrides("vllm")
        check = self._compare(overrides)
        # vLLM's transformers back end takes layer_types for its own attention, also of models that ignore them.
        seen = (
            f"{self._type} ignores these fields in transformers, not in vLLM's back end of that name"
            if check.ignored
            else self._equal(check)
        )
        return {"": readable_json(overrides)}, (
            f"fields of vLLM 0.32, which is not run by this check; {seen}; start vLLM with --model-impl transformers, "
            "since some of its own models ignore layer_types (Qwen3)"
        )

    def _tensorrt(self) -> tuple[dict[str, bytes], str]:
        plan, windows = self.plan, self._own_windows("tensorrt-llm")
        longest = max(self.context, known_length(self.loaded.model) or 0)
        indices = layer_indices(self.loaded.model, self.proof)
        windows |= {indices[layer]: longest if plan.full.get(layer) else plan.window for layer in plan.layers}
        if sorted(windows) != list(range(self._layers)):
            raise ConfigError(
                f"tensorrt-llm needs a window of each layer, and {plan.model} has layers without attention"
            )
        listed = ", ".join(str(windows[layer]) for layer in range(self._layers))
        return {"": f"kv_cache_config:\n  max_attention_window: [{listed}]\n".encode()}, (
            "fields of KvCacheConfig of TensorRT-LLM 1.2, which is not run by this check: compare its output with that "
            "of wherewhat.planned"
        )

    def _swaa(self) -> tuple[dict[str, bytes], str]:
        kind = self._config.model_type
        if kind not in _SWAA_MODELS:
            raise ConfigError(f"swaa runs {', '.join(_SWAA_MODELS)}, and {self.plan.model} is of type {kind}")
        if self._own_windows("swaa"):
            raise ConfigError(f"swaa has one window, and {self.plan.model} has layers with a window of their own")
        indices = layer_indices(self.loaded.model, self.proof)
        fields: dict[str, Any] = {
            "sliding_window_size": self.plan.window,
            "keep_first": self.plan.sinks,
            "force_fa_decode": False,
            "non_sliding_layers": [indices[layer] for layer in sorted(self.plan.layers) if self.plan.full.get(layer)],
        }
        return {"": readable_json(fields)}, "fields of SWAAConfig at 05afcb8, which is not run by this check"

    def _pattern(self) -> tuple[dict[str, bytes], str]:
        rows = self.plan.pattern()
        lines = ["\t".join(f"{x:.6f}" for x in row) for row in rows]
        size = {"sink_size": self.plan.sinks, "recent_size": self.plan.window}
        # As DuoAttention reads them: numbers in half precision, above 0.5.
        read = torch.tensor([[float(x) for x in line.split("\t")] for line in lines], dtype=torch.bfloat16) > 0.5
        for layer, count in self.plan.layers.items():
            heads = self.plan.full_heads(layer)[:: count.heads // count.groups]
            assert tuple(read[layer].tolist()) == heads, "the pattern is not that of the plan"
        files = {
            _PATTERN: ("\n".join(lines) + "\n").encode(),
            _SIZES: readable_json(size),
        }
        return files, "read again by the threshold of DuoAttention (fe93c31): the key heads of the plan"

    @property
    def _config(self) -> Any:
        return self.loaded.model.config.get_text_config()

    @property
    def _layers(self) -> int:
        return int(self._config.num_hidden_layers)

    @property
    def _type(self) -> str:
        return type(self.loaded.model).__name__

    def _compare(self, overrides: Mapping[str, Any]) -> Check:
        """Compare the model with the fields of the plan, once for all engines that read them."""
        if self.check is None:
            self.check = compare_overrides(self.loaded.model, self.proof, self.plan, overrides)
        return self.check

    def _equal(self, check: Check) -> str:
        return (
            f"{self._type} of transformers gives the logits of the plan to {check.difference:.0e} of the largest on "
            f"{check.tokens} tokens, with and without a cache"
        )

    def _own_windows(self, kind: Kind) -> dict[int, int]:
        """Return the windows of layers that are not part of the plan, by their index in the configuration."""
        indices, windows = layer_indices(self.loaded.model, self.proof), {}
        for layer in self.proof.layers:
            number = layer.layout.layer
            if number in self.plan.layers:
                continue
            if layer.window is None:
                raise ConfigError(
                    f"{kind} cannot carry the mask that layer {number} of {self.plan.model} has of its own"
                )
            windows[indices[number]] = layer.window
        return windows

    def _overrides(self, kind: Kind) -> dict[str, Any]:
        """Return the fields of the model's configuration that limit layers as the plan does."""
        plan, config, indices = self.plan, self._config, layer_indices(self.loaded.model, self.proof)
        windows = self._own_windows(kind)
        others = sorted(set(windows.values()) - {plan.window})
        if others and not all(plan.full.get(layer) for layer in plan.layers):
            raise ConfigError(
                f"{kind} has one window for all layers, and {plan.model} has layers with a window of {others[0]}, not "
                f"of {plan.window} as the plan: make it with --window {others[0]}"
            )
        own = getattr(config, "layer_types", None)
        if windows and own is None:
            raise ConfigError(
                f"{plan.model} has layers with a window that its configuration does not list as layer_types"
            )
        types = list(own or ["full_attention"] * self._layers)
        for layer in plan.layers:
            types[indices[layer]] = "full_attention" if plan.full.get(layer) else "sliding_attention"
        fields: dict[str, Any] = {"layer_types": types, "sliding_window": others[0] if others else plan.window}
        # Of Qwen2 and Qwen3; vLLM asserts the second.
        fields |= {
            name: value
            for name, value in (("use_sliding_window", True), ("max_window_layers", self._layers))
            if hasattr(config, name)
        }
        outer = self.loaded.model.config
        name = next((x for x in getattr(outer, "sub_configs", ()) if getattr(outer, x, None) is config), None)
        return fields if name is None else {name: fields}


@dataclass(frozen=True)
class Check:
    """How the logits of a model with other fields of its configuration compare with those of a plan.

    Attributes:
        difference: Largest difference from the plan, relative to the largest logit; from full attention if ``ignored``.
        ignored: Whether the fields have no effect.
        tokens: Tokens of the prompt.
    """

    difference: float
    ignored: bool
    tokens: int


def compare_overrides(model: Any, proof: Proof, plan: Plan, overrides: Mapping[str, Any]) -> Check:
    """Build a model again with other fields of its configuration, and compare its logits with those under a plan.

    The prompt is longer than the plan's window. Passes of the new model without a cache, and with its own one, token
    by token at the end, have to give the same logits; fields that change something else are refused.
    """
    ids = random_prompt(model, plan.window + plan.sinks + _TAIL)
    tokens = ids.shape[1]
    if tokens <= plan.window + plan.sinks:
        raise MeasureError(
            f"a window of {plan.window} is as long as the longest text of {plan.model}: give a smaller one"
        )
    other = _rebuilt(model, overrides)
    message = f"{type(model).__name__} with layer_types does not run, so that the export cannot be checked"
    with torch.no_grad(), unobserved():
        plain = _tail(model, ids)
        with planned(model, plan, proof=proof, small_cache=False):
            expected = _tail(model, ids)
        with as_one_line(MeasureError, message):
            whole, decoded = _tail(other, ids), _decoded(other, ids)
    scale = float(expected.abs().max())

    def apart(logits: Tensor, reference: Tensor) -> float:
        return float((logits.float() - reference.float()).abs().max()) / scale

    allowed = CHUNK_TOLERANCE.get(expected.dtype, 1e-1)
    difference, effect = max(apart(whole, expected), apart(decoded, expected)), apart(plain, expected)
    limited = not all(plan.full.get(layer) for layer in plan.layers)
    if limited and not effect > 2 * allowed:
        raise MeasureError(
            f"the plan changes the logits of {plan.model} by {effect:.2g} of the largest, which "
            f"{describe_dtype(model)} cannot tell from rounding: load it with --dtype float32"
        )
    if difference <= allowed:
        return Check(difference, False, tokens)
    if apart(whole, plain) <= allowed:
        return Check(apart(whole, expected), True, tokens)
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    by_type = isinstance(rope, Mapping) and {"full_attention", "sliding_attention"} <= set(rope)
    reason = "; its sliding layers also have another rotation" if by_type else ""
    raise MeasureError(
        f"with layer_types {type(model).__name__} differs from the plan by {difference:.2g} of the largest logit "
        f"(allowed {allowed:g}){reason}: this plan cannot be run by its configuration; use wherewhat.planned"
    )


def _tail(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of the last tokens, from a pass without a cache."""
    logits: Tensor = model(input_ids=ids, use_cache=False, **last_logits(model, _TAIL)).logits
    return logits[:, -_TAIL:]


def _decoded(model: Any, ids: Tensor) -> Tensor:
    """Return the same from passes with the model's own cache, the last of which are over single tokens."""
    tokens, cache, parts = ids.shape[1], None, []
    for start, end in itertools.pairwise([0, *range(tokens - _DECODED, tokens), tokens]):
        cached: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        output = model(input_ids=ids[:, start:end], use_cache=True, **cached, **last_logits(model, _TAIL))
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)[:, -_TAIL:]


def _rebuilt(model: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a model with the same weights and other fields of its configuration, as if they were in its file."""
    fields = model.config.to_dict()
    for name, value in overrides.items():
        fields[name] = {**fields[name], **value} if isinstance(value, Mapping) else value
    message = f"{type(model).__name__} cannot be built again with layer_types, so that the export cannot be checked"
    with as_one_line(MeasureError, message), quiet():
        config = type(model.config).from_dict(fields)
        other = type(model).from_pretrained(
            None,
            config=config,
            state_dict=model.state_dict(),
            dtype=next(model.parameters()).dtype,
            attn_implementation=model.config._attn_implementation,
        )
    return other.to(next(model.parameters()).device).eval()
