"""Identity: a finished request is found without the model, and only as long as everything it depends on is the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.models import llama_config, save_model
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, run
from wherewhat.runs.known import KnownRuns
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
    return Request("attention", **{"model": model, "text": text, "tokens": 16, **changes})


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


CHANGES = {
    "text": lambda folder, text: text.write_text(TEXT * 5),
    "weights": lambda folder, text: _touch(folder / "model.safetensors"),
    "config": lambda folder, text: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
}


def _touch(path):
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_input_is_another_request(folder, text, tmp_path, change):
    request = asked(folder, text)
    run(request, out=tmp_path)
    change(folder, text)
    assert KnownRuns(tmp_path).find(request) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"tokens": 17}, {"options": {"sink_tokens": 2}}, {"chunk": 8}, {"model": {"dtype": "float64"}}],
    ids=str,
)
def test_other_options_are_another_request(folder, text, tmp_path, changes):
    run(asked(folder, text), out=tmp_path)
    assert KnownRuns(tmp_path).find(asked(folder, text, **changes)) is None
    same = asked(folder, text, options={"sink_tokens": "1"})  # the default, as text
    assert isinstance(KnownRuns(tmp_path).find(same), RunDirectory)


def test_a_text_that_changes_while_it_is_measured_is_another_request(folder, text, tmp_path, monkeypatch):
    from wherewhat.runs import execution

    measure = execution.measure

    def measure_slowly(*given, **options):
        text.write_text(TEXT * 6)
        return measure(*given, **options)

    monkeypatch.setattr(execution, "measure", measure_slowly)
    first = run(asked(folder, text), out=tmp_path)
    assert KnownRuns(tmp_path).find(asked(folder, text)) is None
    text.write_text(TEXT * 4)
    assert KnownRuns(tmp_path).find(asked(folder, text)).path == first.path


def test_a_damaged_or_removed_run_is_measured_again(folder, text, tmp_path):
    request = asked(folder, text)
    path = run(request, out=tmp_path).path
    (path / "scores.parquet").write_bytes(b"damaged")
    assert KnownRuns(tmp_path).find(request) is None
    assert run(request, out=tmp_path).scores().num_rows > 0


def test_reasons_are_kept_as_well(folder, text, tmp_path):
    KnownRuns(tmp_path).keep(asked(folder, text), "it has no planes")
    assert KnownRuns(tmp_path).find(asked(folder, text)) == "it has no planes"


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
