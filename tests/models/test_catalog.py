"""Identity: the list of verified model types in the package says what the page in the documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import wherewhat
from wherewhat.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text("utf-8")


def cells(model: wherewhat.SupportedModel) -> list[str]:
    """The columns of the page."""
    status = "proved" if model.verified else "not yet" if model.attention else "not applicable"
    name = model.model_type if model.variant is None else f"{model.model_type}:{model.variant}"
    remarks = model.reason or ", ".join(model.features)
    return [name, status, model.route or "", ", ".join(model.position), ", ".join(model.dtypes), remarks]


def page_rows() -> list[list[str]]:
    tables = PAGE[PAGE.index("## Types") : PAGE.index("## Hard weights")]
    lines = [line for line in tables.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]


def test_list_and_page_agree():
    assert [cells(model) for model in wherewhat.supported_models(variants=True)] == page_rows()
    version = json.loads((files("wherewhat.models") / "data" / "catalog.json").read_text("utf-8"))["transformers"]
    assert f"of transformers {version}," in PAGE
    verified = sum(model.verified for model in wherewhat.supported_models())
    softmax = sum(model.attention for model in wherewhat.supported_models())
    assert f"**{verified} of {softmax}** types" in PAGE


def test_every_entry_is_verified_or_has_a_reason():
    models = wherewhat.supported_models(variants=True)
    assert len(models) > 200
    for model in models:
        assert model.verified == (model.reason is None) == (model.route is not None) == bool(model.position)
        assert model.attention or not model.verified
    types = [model.model_type for model in wherewhat.supported_models()]
    assert types == sorted(set(types))
    variants = [model for model in models if model.variant is not None]
    assert {"yarn", "llama3"} <= {model.variant for model in variants if model.model_type == "llama"}
    assert {model.model_type for model in variants} <= set(types)
    found = [model.model_type for model in wherewhat.supported_models() if "sinks" in model.features]
    assert "gpt_oss" in found
    assert repr(found) in (wherewhat.supported_models.__doc__ or "")  # its example
    with pytest.raises(ConfigError, match="variants is 'yes'"):
        wherewhat.supported_models(variants="yes")


def test_it_imports_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers'} & {*sys.modules}"
    code = f"import sys, wherewhat; dir(wherewhat); wherewhat.supported_models(); sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
