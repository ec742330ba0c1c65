"""End-to-end: every notebook runs from the first cell to the last; its stored outputs are small and have no error."""

from __future__ import annotations

import os

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000

# In place of the values of the cell tagged `parameters`: the same code on less text.
SMALL = {
    "first_look": "TOKENS = 40",
    "lesson": "TOKENS = 48",
    "own_measurement": "DOCUMENTS, TOKENS = 2, 40",
    "watching_a_fine_tune": "STEPS, EVERY, TOKENS, FIRST = 2, 1, 24, 28",
    "which_heads_to_keep": "TOKENS, CHOOSING, TESTING, DRAWS, WINDOW = 64, 1, 2, 1, 16",
}

# One kernel runs all notebooks, each in a new namespace, and reads the embedded model from its file once.
PREPARED = """
def load_once():
    from copy import deepcopy
    from wherewhat.runs import subject
    loaded = subject.load("smollm2", device="cpu")
    subject.load = lambda spec: deepcopy(loaded)  # a copy, which a notebook may train
load_once()
"""


def read(path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, smollm2):
    """A kernel with the embedded model, and its client."""
    manager = pytest.importorskip("jupyter_client.manager", reason="ipykernel is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    environment = os.environ | {"PLOTLY_RENDERER": "json"}
    started, client = manager.start_new_kernel(env=environment, cwd=str(tmp_path_factory.mktemp("notebooks")))
    execute(client, PREPARED)
    yield client
    client.stop_channels()
    started.shutdown_kernel(now=True)


def execute(client, code: str) -> None:
    """Run a cell; raise its error."""
    found = []
    reply = client.execute_interactive(code, output_hook=found.append, timeout=300, stop_on_error=True)
    content = reply["content"]
    assert content["status"] == "ok", "\n".join(content.get("traceback", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, kernel):
    execute(kernel, "%reset -f")
    for cell in read(path).cells:
        if cell.cell_type == "code":
            execute(kernel, cell.source)
            if "parameters" in cell.metadata.get("tags", ()):
                execute(kernel, SMALL[path.stem])


def test_stored_outputs_are_complete_and_small():
    assert sorted(SMALL) == [path.stem for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
        assert all(cell.execution_count == number for number, cell in enumerate(cells, 1)), path.stem
        kinds = {kind for cell in cells for output in cell.outputs for kind in output.get("data", {})}
        assert "image/png" in kinds, path.stem
        assert kinds <= {"image/png", "text/html", "text/plain"}, path.stem
        assert [output for cell in cells for output in cell.outputs if output.output_type == "error"] == [], path.stem
        assert path.stat().st_size < MOST_BYTES, path.stem
