"""Fixtures of the store's tests."""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

import pytest

from runs.tiny_run import KEYS, complete_run, result_bytes

# There is one server in a test process, so it imports for all tests, with what their processes import.
_PRELOADED = ["torch", "pyarrow.parquet", "pyarrow.compute", "filelock", "gguf", "transformers"]
_PRELOADED += ["transformers.models.llama.modeling_llama", "wherewhat.cli.main", "wherewhat.runs.execution"]
_PRELOADED += ["store.test_processes", "multihop.test_trainer", "multihop.test_language"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing ever disturbed."""
    run, computed = complete_run(tmp_path_factory.mktemp("reference"))
    assert computed == KEYS
    return result_bytes(run)


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Real processes that start in milliseconds: forks of a server that has imported the heavy packages."""
    if os.name == "nt":
        pytest.skip("needs signals and fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
