"""Fixtures of all tests. Heavy packages are imported by the fixtures that need them, not when tests are collected."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("helpers")
gc.disable()  # until all tests are collected, see pytest_collection_finish

_HOSTILE_NAME = "<img src=x onerror=alert(4)>.jsonl"

# A test process has one fork server. It imports what the processes of all tests need.
_PRELOADED = ["torch", "pyarrow.parquet", "pyarrow.compute", "filelock", "gguf", "transformers"]
_PRELOADED += ["transformers.models.llama.modeling_llama", "wherewhat.cli.main", "wherewhat.runs.execution"]
_PRELOADED += ["transformers.models.auto.tokenization_auto", "pandas", "pydantic", "platformdirs", "plotly.offline"]
_PRELOADED += ["wherewhat.cli.tables", "wherewhat.report.report", "wherewhat_lab.encoding_study.commands"]
_PRELOADED += ["wherewhat_lab.multihop.commands", "helpers.command_line"]
_PRELOADED += ["runs.test_processes", "lab.test_training", "lab.test_language", "helpers.fork_server"]

_LONGEST = ["report/test_unfinished.py", "models/test_gguf.py", "real/test_real_models.py", "fuzz/test_fuzz.py"]
_LONGEST += ["report/test_accessibility.py", "conformance/test_proof.py", "sweep/test_scaling.py"]
_LONGEST += ["sweep/test_engines.py", "measures/test_batches.py", "docs/test_code_blocks.py", "docs/test_notebooks.py"]
_LONGEST += ["report/test_reader.py", "test_ledger.py", "report/test_roles_browser.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that leaves room for other CPUs."""
    help = "divide the tolerances of comparisons by this number: what passes has room for the rounding of other CPUs"
    parser.addoption("--tighten", type=float, default=1.0, metavar="FACTOR", help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Tighten tolerances if asked to."""
    if config.getoption("tighten") != 1:
        from helpers.tolerance import tighten

        tighten(config.getoption("tighten"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests are all left out: some import large packages."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text("utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take longest: test processes take whole modules, and none is to end long before."""
    rank = {Path(__file__).parent / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Exclude imported packages and collected tests, millions of objects, from all later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


# Models, texts and the command line


@pytest.fixture
def cli(capfd, monkeypatch, tmp_path):
    """Call ``wherewhat`` with arguments; its output is 100 columns wide and goes to no terminal."""
    from helpers.command_line import Outcome
    from wherewhat.cli.main import run_cli

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments) -> Outcome:
        capfd.readouterr()
        code = run_cli([str(a) for a in arguments])
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a two-layer Llama with 32 positions and ten words."""
    from helpers.models import save_model

    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def speller(tmp_path_factory):
    """Folder of a tiny Llama with 512 positions and a byte-level tokenizer, which can spell anything."""
    from helpers.models import save_speller

    return save_speller(tmp_path_factory.mktemp("speller") / "tiny")


@pytest.fixture
def text(tmp_path):
    """A file with one document of 30 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on a mat and the dog ran " * 3)
    return path


@pytest.fixture
def build():
    """The functions that write models, tokenizers and GGUF files."""
    from helpers.models import llama_config, save_model, save_tokenizer, write_gguf

    return SimpleNamespace(config=llama_config, model=save_model, tokenizer=save_tokenizer, gguf=write_gguf)


@pytest.fixture
def no_network(monkeypatch):
    """Fail on any attempt to open a connection."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("network is blocked in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return attempts


# Run directories


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that was never interrupted."""
    from helpers.runs import KEYS, complete_run, result_bytes

    run, computed = complete_run(tmp_path_factory.mktemp("reference"))
    assert computed == KEYS
    return result_bytes(run)


@pytest.fixture(scope="session")
def processes():
    """Real processes that start in milliseconds: forks of a server that has imported the heavy packages."""
    if os.name == "nt":
        pytest.skip("needs signals and fork")
    return _fork_server()


def _fork_server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # Before Python 3.13 the server does not search the folders of this process.
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks():
    """Files are not forced onto the disk: tests kill processes, but none cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_trials():
    """Models are tried in forks of the same server, which the first test that loads one starts."""
    if os.name == "nt":
        return
    from helpers.trials import ForkedByServer, fork_trials

    fork_trials(lambda: ForkedByServer(_fork_server()))


# Reports


@pytest.fixture(scope="session")
def hostile_model(tmp_path_factory) -> Path:
    """Folder of the same model as ``model``, trained on as many tokens as a report's; its name is HTML."""
    from helpers.models import llama_config, save_model
    from helpers.report import TOKENS

    config = llama_config(max_position_embeddings=TOKENS)
    return save_model(tmp_path_factory.mktemp("model") / "<b onclick=alert(3)>tiny", config)


@pytest.fixture(scope="session")
def made(hostile_model, tmp_path_factory):
    """The report of the model on two hostile documents with a hostile name."""
    from helpers.report import HOSTILE, TOKENS, Made
    from wherewhat.report.report import make_report
    from wherewhat.runs.request import ModelRequest

    folder = tmp_path_factory.mktemp("report")
    text = folder / _HOSTILE_NAME
    lines = [{"name": f"<i>{number}", "text": HOSTILE * (3 + number)} for number in range(2)]
    text.write_text("\n".join(map(json.dumps, lines)))
    out = folder / "runs"
    report = make_report(ModelRequest(model=hostile_model, device="cpu"), out=out, files=[str(text)], tokens=TOKENS)
    return Made(report, report.write(out / f"{report.name}.html"), out, text)


@pytest.fixture(scope="session")
def beside(made, hostile_model, tmp_path_factory):
    """The report of the trained model, its random control model, and a model without rotation."""
    from transformers import GPT2Config

    from helpers.models import save_model
    from helpers.report import TOKENS
    from wherewhat.report.report import make_report
    from wherewhat.runs.request import ModelRequest

    other = save_model(
        tmp_path_factory.mktemp("gpt2") / "other",
        GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=3, n_head=2),
    )
    models = [
        ModelRequest(model=hostile_model, device="cpu"),
        ModelRequest(model=hostile_model, device="cpu", weights="random"),
        ModelRequest(model=other, device="cpu"),
    ]
    report = make_report(models, out=made.out, files=[str(made.text)], tokens=TOKENS)
    return report, report.write(made.out / "beside.html")


@pytest.fixture(scope="session")
def tuned(made, hostile_model, tmp_path_factory):
    """The report of the model and of one trained from it: the same weights with small changes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from helpers.report import TOKENS
    from wherewhat.report.report import make_report
    from wherewhat.runs.request import ModelRequest

    folder = tmp_path_factory.mktemp("model") / "<i>tuned"
    changed = AutoModelForCausalLM.from_pretrained(hostile_model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(hostile_model).save_pretrained(folder)
    models = [ModelRequest(model=model, device="cpu") for model in (hostile_model, folder)]
    report = make_report(models, out=made.out, files=[str(made.text)], tokens=TOKENS)
    return report, report.write(made.out / "tuned.html")


@pytest.fixture(scope="session")
def told(made, tmp_path_factory):
    """Data and page of the model as if its heads, which are all uniform, had other scores."""
    import copy

    from helpers.report import excerpt_of_report, scores
    from wherewhat.report.page import Report
    from wherewhat.report.telling import telling_heads

    data = copy.deepcopy(made.report.data)
    (model,) = data["models"]
    heads = [(0.9, 0.1, "positional"), (0.1, 0.9, "symbolic"), (0.4, 0.6, "mixed"), *[(0.3, 0.8, "sink")] * 5]
    model["swaps"] |= scores(*reversed(heads))
    listed, missing = telling_heads(model["swaps"], excerpt_of_report(made), model["model"]["layers"])
    model["telling"] = {"heads": listed, "missing": missing}
    return model, Report("told", data).write(tmp_path_factory.mktemp("told") / "told.html")


@pytest.fixture(scope="module")
def browser():
    """Chromium, or a skip."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    installed = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium can be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def shots(tmp_path):
    """Folder of screenshots: that of WHEREWHAT_SCREENSHOTS, else pytest's temporary folder."""
    folder = Path(os.environ.get("WHEREWHAT_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# Sweeps


@pytest.fixture(scope="session")
def sweep_home(tmp_path_factory) -> Path:
    """A folder with a tiny model, two checkpoints of another one, and two texts."""
    from helpers.models import llama_config, save_model

    folder = tmp_path_factory.mktemp("sweep")
    save_model(folder / "tiny")
    save_model(folder / "grown/step-9")
    save_model(folder / "grown/step-10", llama_config(hidden_size=32))
    (folder / "a.txt").write_text("the cat sat on a mat and the dog ran " * 3)
    (folder / "b.txt").write_text("a dog and a cat ran on the mat . " * 4)
    return folder


@pytest.fixture
def sweep_file(tmp_path, sweep_home, monkeypatch):
    """Write a sweep file beside the models and read it."""
    from wherewhat.sweep.file import SweepFile, read_sweep_file

    monkeypatch.chdir(sweep_home)

    def write(values, name="sweep.json") -> SweepFile:
        path = tmp_path / name
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return read_sweep_file(path)

    return write


@pytest.fixture
def forked(processes, monkeypatch):
    """Local workers are forks of a server that has imported torch: a worker that is replaced starts at once."""
    from wherewhat.sweep import local_engine

    monkeypatch.setattr(local_engine, "multiprocessing", SimpleNamespace(get_context=lambda kind: processes))


@pytest.fixture(scope="session")
def ray_cluster():
    """Two workers with one CPU each."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    # Workers find the tests' own modules where this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    # Without "local", Ray would connect to the cluster of another process, if there is one. It starts its workers at
    # the lowest priority, where they would wait for all other tests.
    ray.init(address="local", num_cpus=2, _system_config={"worker_niceness": 0}, **quiet)
    yield ray
    ray.shutdown()


# Trained models


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """The trained models that tests asked for, with their proofs and runs."""
    from helpers.trained import Kept

    return Kept(tmp_path_factory.mktemp("real"))


def _fetched(name: str) -> str:
    from real_models import UnavailableError, fetch

    try:
        return fetch(name)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma() -> str:
    """Path of Gemma-3-270M as a GGUF file; tests of it are skipped where it cannot be downloaded."""
    from real_models import GEMMA

    return _fetched(GEMMA.name)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Name of the embedded model; tests of it are skipped where it is not installed."""
    from real_models import SMOLLM2

    return _fetched(SMOLLM2)


# The laboratory


@pytest.fixture(scope="session")
def encoding_study(tmp_path_factory):
    """Folder with finished runs of three encodings, and the lines that reported them."""
    from helpers.lab import RECIPE
    from wherewhat_lab.encoding_study.study import run_study

    out, lines = tmp_path_factory.mktemp("study"), []
    run_study(RECIPE, out=out, finished=lines.append)
    return out, lines


@pytest.fixture(scope="session")
def multihop_study(tmp_path_factory):
    """A finished multi-hop training, too small to learn anything."""
    from wherewhat_lab.multihop.study import Setup, train_and_record

    tiny = {"layers": 2, "heads": 2, "width": 16, "steps": 6, "record_every": 2, "batch": 4, "sequences": 800}
    return train_and_record(Setup.of("number", tiny), out=tmp_path_factory.mktemp("study"), scored=6, tested=12)
