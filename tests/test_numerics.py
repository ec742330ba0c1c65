"""Identity: results do not depend on what the process did before."""

from __future__ import annotations

import warnings

import pytest
import torch

from helpers.models import save_model
from wherewhat.captures.proof import prove
from wherewhat.numerics import new_process_settings, onednn_for


@pytest.fixture
def changed():
    """A process in which everything was changed."""
    onednn = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.enabled = onednn


def settings():
    return (
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
    )


def test_settings_are_those_of_a_new_process_and_come_back(changed):
    before = settings()
    with torch.autocast("cpu"), torch.device("meta"):
        inside = settings()
        with new_process_settings():
            expected = (torch.backends.mkldnn.is_available(), "highest", torch.float32, torch.device("cpu"), False)
            assert settings() == expected
        assert settings() == inside
    assert settings() == before
    with pytest.raises(KeyError), new_process_settings():
        raise KeyError
    assert settings() == before


def test_half_precision_leaves_no_trace_and_no_change():
    """On CPUs without bfloat16 torch would warn, print a trace and switch oneDNN off for good."""
    from helpers.capture import tiny

    before = torch.backends.mkldnn.enabled
    x = torch.ones(4, 64, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for context in (new_process_settings, onednn_for):
            with context([torch.bfloat16]):
                torch.nn.functional.linear(x, x[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mkldnn.*")
        prove(tiny("llama", dtype=torch.bfloat16))
    assert torch.backends.mkldnn.enabled == before


def _measure_and_train(folder, text, out, first):
    """What a process computes in float32, written to a file; before that it may compute in bfloat16."""
    from wherewhat.report.result import run
    from wherewhat.runs.request import ModelRequest, Request
    from wherewhat_lab.config import LabConfig
    from wherewhat_lab.language import LanguageConfig, train_language

    def measured(dtype, to):
        found = []
        for name in ("axes", "heads", "perturb"):
            options = {"kinds": "words", "rates": "0.2"} if name == "perturb" else {}
            model = ModelRequest(model=folder, dtype=dtype)
            found.append(run(Request(measurement=name, model=model, files=(text,), tokens=32, options=options), out=to))
        return found

    if first == "bfloat16":
        warnings.simplefilter("ignore")
        x = torch.ones(4, 64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(x, x[0])  # a product of the user's own, outside of any run
        measured("bfloat16", out / "half")
    lines = []
    for directory in measured("float32", out / "runs"):
        lines.append(f"{directory.path.name} {(directory.path / 'scores.parquet').read_bytes().hex()}\n")
    bytes_ = torch.arange(600).remainder(251).to(torch.uint8)
    model = LabConfig(layers=2, heads=2, width=32)
    config = LanguageConfig(context=16, batch=4, steps=6, precision="float32", threads=1)
    for name, weight in train_language(model, config, bytes_).state_dict().items():
        lines.append(f"{name} {weight.numpy().tobytes().hex()}\n")
    (out / "lines").write_text("".join(lines))


@pytest.mark.slow
def test_float32_after_bfloat16_gives_the_bytes_of_a_new_process(tmp_path, processes):
    folder = save_model(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran " * 8)
    found = {}
    for first in ("nothing", "bfloat16"):
        out = tmp_path / first
        # The server of processes imports packages and computes nothing.
        process = processes.Process(target=_measure_and_train, args=(str(folder), str(text), out, first))
        process.start()
        process.join()
        assert process.exitcode == 0
        found[first] = (out / "lines").read_text()
    assert found["nothing"].count("\n") > 10
    assert found["nothing"] == found["bfloat16"]
