"""Identity: a model that is kept for the next request gives the bytes of one that is loaded for it."""

from __future__ import annotations

from helpers.models import save_model
from wherewhat.runs import execution as running
from wherewhat.runs.execution import LastModel, run
from wherewhat.runs.request import ModelRequest, Request


def test_a_kept_model_is_loaded_once_and_measures_the_same(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran " * 4)
    loads = []
    load = running.load_model
    monkeypatch.setattr(running, "load_model", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))

    def request(measurement, weights):
        model = ModelRequest(model=folder, weights=weights)
        return Request(measurement=measurement, model=model, text=(str(text),), tokens=24)

    requests = [request(m, w) for w in ("trained", "random") for m in ("heads", "residual", "attention")]
    models = LastModel()
    kept = [run(one, out=tmp_path / "kept", models=models) for one in requests]
    assert len(loads) == 2
    for one, directory in zip(requests, kept, strict=True):
        fresh = run(one, out=tmp_path / "fresh")
        for name in ("scores.parquet", "profiles.safetensors", "config.json"):
            assert (fresh.path / name).read_bytes() == (directory.path / name).read_bytes()
