"""Identity: a finished request is found without the model, and only as long as everything it depends on is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from helpers.models import llama_config, save_model
from wherewhat.runs import execution
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, run
from wherewhat.runs.identity import KnownRuns
from wherewhat.runs.request import ModelRequest, Request

TEXT = "the cat sat on the mat and the dog ran "


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "tiny", llama_config())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 4)
    return path


def asked(folder, text, **changes):
    model = ModelRequest(**{"model": folder, "device": "cpu", **changes.pop("model", {})})
    return Request("attention", **{"model": model, "files": text, "tokens": 16, **changes})


class Unloadable(LastModel):
    """Refuses to load a model."""

    def loaded(self, *_, **__):
        raise AssertionError("the model is not needed")


def test_a_finished_request_needs_no_model(folder, text, tmp_path):
    request = asked(folder, text)
    assert KnownRuns(tmp_path).find(request) is None
    first = run(request, out=tmp_path)
    again = run(request, out=tmp_path, models=Unloadable())
    assert again.path == first.path
    known = KnownRuns(tmp_path).find_all(request, ("random",))
    assert known is None
    run(request.with_weights("random"), out=tmp_path)
    known = KnownRuns(tmp_path).find_all(request, ("random",))
    assert list(known.runs) == ["trained", "random"]


def test_random_runs_of_another_draw_are_not_reused(folder, text, tmp_path, monkeypatch):
    request = asked(folder, text, model={"weights": "random"})
    trained = KnownRuns(tmp_path).path(asked(folder, text))
    path, name = KnownRuns(tmp_path).path(request), run(request, out=tmp_path).path.name
    monkeypatch.setattr("wherewhat.runs.identity.DRAW", 1)
    monkeypatch.setattr("wherewhat.models.loader.DRAW", 1)
    assert KnownRuns(tmp_path).path(asked(folder, text)) == trained
    assert KnownRuns(tmp_path).path(request) != path
    assert run(request, out=tmp_path).path.name != name


CHANGES = {
    "text": lambda folder, text: text.write_text(TEXT * 5),
    "weights": lambda folder, text: _touch(folder / "model.safetensors"),
    "config": lambda folder, text: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
}


def _touch(path):
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_other_inputs_options_and_damaged_runs_are_not_known(folder, text, tmp_path):
    request = asked(folder, text)
    path = run(request, out=tmp_path).path
    same = asked(folder, text, options={"sink_tokens": "1"})  # the default, as text
    assert isinstance(KnownRuns(tmp_path).find(same), RunDirectory)
    for changes in ({"tokens": 17}, {"options": {"sink_tokens": 2}}, {"chunk": 8}, {"model": {"dtype": "float64"}}):
        assert KnownRuns(tmp_path).find(asked(folder, text, **changes)) is None, changes
    for name, change in CHANGES.items():
        kept = {file: (file.read_bytes(), file.stat()) for file in (*folder.iterdir(), text)}
        change(folder, text)
        assert KnownRuns(tmp_path).find(request) is None, name
        for file, (content, status) in kept.items():
            file.write_bytes(content)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert KnownRuns(tmp_path).find(request).path == path
    (path / "scores.parquet").write_bytes(b"damaged")
    assert KnownRuns(tmp_path).find(request) is None
    assert run(request, out=tmp_path).scores().num_rows > 0
    KnownRuns(tmp_path).keep(request, "it has no planes")  # reasons are kept as well
    assert KnownRuns(tmp_path).find(request) == "it has no planes"


def test_a_text_that_changes_while_it_is_measured_is_another_request(folder, text, tmp_path, monkeypatch):
    measure = execution.measure_together

    def measure_slowly(*given, **options):
        text.write_text(TEXT * 6)
        return measure(*given, **options)

    monkeypatch.setattr(execution, "measure_together", measure_slowly)
    first = run(asked(folder, text), out=tmp_path)
    assert KnownRuns(tmp_path).find(asked(folder, text)) is None
    text.write_text(TEXT * 4)
    assert KnownRuns(tmp_path).find(asked(folder, text)).path == first.path


@pytest.mark.slow
def test_a_kept_model_is_loaded_once_and_measures_the_same(folder, text, tmp_path, monkeypatch):
    loads = []
    load = execution.load_model
    monkeypatch.setattr(execution, "load_model", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))
    plain = asked(folder, text)
    requests = [
        replace(plain.with_weights(w), measurement=m) for w in ("trained", "random") for m in ("heads", "residual")
    ]
    models = LastModel()
    kept = [run(one, out=tmp_path / "kept", models=models) for one in requests]
    assert len(loads) == 2
    for one, directory in zip(requests, kept, strict=True):
        fresh = run(one, out=tmp_path / "fresh")
        for name in ("scores.parquet", "profiles.safetensors", "config.json"):
            assert (fresh.path / name).read_bytes() == (directory.path / name).read_bytes()


@pytest.mark.slow
def test_a_finished_command_imports_no_torch(cli, folder, text, tmp_path):
    words = ["attention", str(folder), "--text", str(text), "--tokens", "16", "--device", "cpu", "--out", str(tmp_path)]
    code = f"import sys; from wherewhat.cli.main import run_cli; code = run_cli({words!r}); "
    first = cli(*words)
    assert first.code == 0
    again = subprocess.run(
        [sys.executable, "-c", code + "assert 'torch' not in sys.modules; sys.exit(code)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.out
