"""Identity: a model spread over devices gives the numbers of one that is not, and no measurement mixes its layers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._tensor import _convert
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_map

from conformance.overrides import FULL, SLIDING
from helpers.capture import tiny, tokens
from helpers.models import on_disk, save_model
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.measures.measurement import DocumentsMeasurement, Spans, Text, find_measurement, measure_text
from wherewhat.report.result import run
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.subject import ModelSubject

DEVICES = 2


def marked_tensors(values):
    """The mock's tensors in arguments or a result; ``tree_flatten`` takes several times as long as most operations."""
    found = []
    for x in values:
        if isinstance(x, OnDevice):
            found.append(x)
        elif isinstance(x, tuple | list):
            found += marked_tensors(x)
        elif isinstance(x, dict):
            found += marked_tensors(x.values())
    return found


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device of its own, and refuses to meet those of another one.

    Moving it anywhere takes the mark away, as far as this can be told on a machine without such devices.
    """

    @staticmethod
    def of(x, mark):
        marked = x.as_subclass(OnDevice)
        marked.mark = mark
        return marked

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        marks = {x.mark for x in marked_tensors((args, kwargs)) if "mark" in x.__dict__}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if len(marks) > 1:
            name = getattr(func, "__name__", func)
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {sorted(marks)}")
        if not isinstance(result, torch.Tensor | tuple | list) or func in get_default_nowrap_functions():
            return result
        moved = func in (torch.Tensor.cpu, torch.Tensor.tolist) or (
            func is torch.Tensor.to and any(isinstance(x, torch.device | str | torch.Tensor) for x in args[1:])
        )
        if moved or not marks:  # plain tensors, which take a tenth of the time, or the arguments themselves
            for x in marked_tensors([result]):
                x.__dict__.pop("mark", None)
            return result
        result = _convert(result, cls)
        for x in marked_tensors([result]):
            x.mark = next(iter(marks))
        return result


def on_device(attention, mark):
    def put(x):
        if isinstance(x, torch.Tensor):
            return OnDevice.of(x, mark)
        if isinstance(x, tuple):
            return tuple(map(put, x))
        return replace(x, **{name: put(value) for name, value in vars(x).items()}) if isinstance(x, Mask) else x

    return LayerAttention(**{name: put(getattr(attention, name)) for name in attention.__dataclass_fields__})


class Spread(ModelSubject):
    """A subject whose layers come from devices in turn."""

    def run(self, ids, reducer, **options):
        logits = super().run(ids, lambda a: reducer(on_device(a, a.layer % DEVICES)), **options)
        return None if logits is None else OnDevice.of(logits, DEVICES - 1)

    def edited(self, ids, editor, **options):
        def edit(attention):
            output = editor(on_device(attention, attention.layer % DEVICES))
            return None if output is None else output.as_subclass(torch.Tensor)

        return super().edited(ids, edit, **options)


WORDS = tuple((i, i + 1 + i % 2) for i in range(2, 40, 3))
TEXT = Text(tokens(48), 1, lambda: Spans(WORDS, ((2, 9), (11, 40)), tuple((30, 40) for _ in WORDS)))
GIVEN = {
    **dict.fromkeys(
        ["axes", "attention", "planes", "heads", "distance", "frequencies", "residual", "removal"], Text(tokens(48))
    ),
    "perturb": TEXT,
    "extend": Text(tokens(130)),
    "split": [Text(tokens(24, seed=seed)) for seed in range(3)],
}
FEW = {"perturb": {"rates": (0.0, 0.2), "seeds": 1}, "extend": {"depths": (50,)}}
"""Options that repeat a measurement less often: the mock is slow, and every repetition does the same."""
ONE_OF_EACH = ("none", "yarn", "dynamic-ntk", "streaming-llm", "self-extend", "infllm")
"""Length methods that differ in more than a formula; the other family has all methods."""


def measured(measurement, subject, config):
    given = GIVEN[measurement.name]
    if isinstance(measurement, DocumentsMeasurement):
        return measurement.measure(subject, given, config)
    return measure_text(measurement, subject, given, config)


LAYERS = {"llama": {"num_hidden_layers": 3}}
LAYERS["gemma3_text:window"] = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
"""Three layers: two of them on one device, and windows on both."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("axes", "llama"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name in GIVEN
            for kind in LAYERS
            if (name, kind) != ("axes", "llama")
        ),
    ],
)
def test_no_measurement_mixes_tensors_of_layers_on_different_devices(name, kind):
    measurement = find_measurement(name)
    config = measurement.config(**FEW.get(name, {}))
    if (name, kind) == ("extend", "gemma3_text:window"):
        config = replace(config, methods=ONE_OF_EACH)
    model = tiny(kind, changes=LAYERS[kind])
    if name == "extend":
        model.config.max_position_embeddings = 60
    plain = ModelSubject(SimpleNamespace(model=model))
    spread = Spread(SimpleNamespace(model=model), plain.proof)
    expected, found = (measured(measurement, subject, config) for subject in (plain, spread))
    assert len(found.layers) == len(expected.layers)
    assert {k: float(v) for k, v in found.whole.items()} == pytest.approx(expected.whole, nan_ok=True, abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
def test_layers_that_accelerate_keeps_on_disk(folder, tmp_path):
    plain, spread = on_disk(folder, tmp_path)
    text, seen = Text(tokens(32) % 8 + 3), []
    for name, chunk in (("axes", None), ("axes", 8), ("heads", None), ("residual", None)):
        measurement = find_measurement(name)
        expected = measure_text(measurement, ModelSubject(plain), text, measurement.config())
        found = measure_text(measurement, ModelSubject(spread, chunk=chunk), text, measurement.config())
        for a, b in zip(found.layers, expected.layers, strict=True):
            for metric in b.heads:
                assert not a.heads[metric].is_meta
                torch.testing.assert_close(a.heads[metric], b.heads[metric], atol=1e-5, rtol=1e-5, equal_nan=True)
        assert found.whole == pytest.approx(expected.whole, abs=1e-5, rel=1e-5, nan_ok=True)
    expected, found = (ModelSubject(it).continued(text.ids[:, :16], [(4,), (5, 6)])[0] for it in (plain, spread))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ModelSubject(spread).run(text.ids, lambda a: seen.extend((a.rot_q.device, a.rot_k.device, a.output.device)))
    assert set(seen) == {torch.device("cpu")}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GIVEN if name != "extend"])
def test_layers_on_a_gpu_and_on_the_cpu_in_turn(name):
    measurement = find_measurement(name)
    expected = measured(measurement, ModelSubject(SimpleNamespace(model=tiny("llama"))), measurement.config())
    model = tiny("llama")
    places = {layer: "cuda" if index % 2 else "cpu" for index, layer in enumerate(model.model.layers)}
    for module, place in [*places.items(), (model.model.norm, "cuda"), (model.lm_head, "cuda")]:
        module.to(place).register_forward_pre_hook(
            lambda _, args, kwargs, place=place: tree_map(
                lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, (args, kwargs)
            ),
            with_kwargs=True,
        )
    for chunk in (None, 32):
        found = measured(measurement, ModelSubject(SimpleNamespace(model=model), chunk=chunk), measurement.config())
        for a, b in zip(found.layers, expected.layers, strict=True):
            for metric in b.heads:
                assert a.heads[metric].shape == b.heads[metric].shape
        if name == "axes":
            assert found.whole == pytest.approx(expected.whole, abs=1e-3)


@pytest.mark.slow
def test_a_run_with_a_device_map(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran " * 4)

    def scores(**options):
        request = Request(
            measurement="axes", model=ModelRequest(model=folder, **options), files=(str(text),), tokens=24
        )
        return run(request, out=tmp_path / "runs").scores()

    assert scores(device_map="auto").equals(scores(device="auto"))
