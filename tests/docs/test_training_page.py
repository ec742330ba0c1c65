"""End-to-end: the code of the page on trainings runs as it is written."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from helpers.pages import ROOT, run_page

pytestmark = pytest.mark.slow


def stub_lightning() -> ModuleType:
    """The part of Lightning that the page uses, where the package is not installed."""
    module = ModuleType("lightning")
    module.Callback = type("Callback", (), {})
    return module


def test_the_code_runs(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lightning", sys.modules.get("lightning") or stub_lightning())
    names = vars(run_page(ROOT / "docs" / "training.md"))
    assert names["callback"].run.records.steps.tolist() == [0, 10, 20]
    assert names["r"].shape == (3, 8)
    assert names["run"].records.steps.tolist() == [0, 10, 20, 30, 32]
    assert len(list(tmp_path.glob("output/wherewhat/training-*"))) == 1
    logged = []
    module = SimpleNamespace(model=names["model"], log_dict=logged.append)
    watch, trainer = names["Watch"](), SimpleNamespace(global_step=0)
    watch.on_train_start(trainer, module)
    for trainer.global_step in (49, 50, 50):
        watch.on_train_batch_end(trainer, module, None, None, 0)
    watch.on_train_end(trainer, module)
    assert [bool(logs) for logs in logged] == [False, True, False]
    assert watch.run.records.steps.tolist() == [0, 50]
