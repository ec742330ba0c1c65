"""Identity: the same training gives the same bits, whole or killed and resumed; parity: schedule, AdamW, GPU graph."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from helpers.lab import Interrupt, Told, killed, same
from wherewhat.errors import ConfigError, LoadError, MeasureError, StoreError
from wherewhat.options import build_config
from wherewhat_lab.checkpoints import load_model, load_state, read_identity, save_model
from wherewhat_lab.config import LabConfig, TrainConfig
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.study import train
from wherewhat_lab.steps import CpuSteps, batch_order, learning_rates
from wherewhat_lab.tasks.multi_hop import NumberTask
from wherewhat_lab.training import MODEL_FILE, STATE_FILE

TASK = NumberTask(target=3, pretarget=3, hops=2, symbols=5)
MODEL = LabConfig(layers=2, width=16)
TRAIN = TrainConfig(
    steps=40, batch=8, warmup=5, learning_rate=3e-3, sequences=2000, record_every=10, save_every=7, threads=2
)


@pytest.fixture(scope="module")
def whole():
    """The model of the whole training."""
    return train(TASK, MODEL, TRAIN)


def test_same_seed_same_bits():
    config = replace(TRAIN, steps=12, precision="medium")
    before, precision, seen = torch.get_num_threads(), torch.get_float32_matmul_precision(), []
    try:
        torch.set_num_threads(1)
        first = train(TASK, MODEL, config, record=lambda *_: seen.append(torch.get_float32_matmul_precision()))
        torch.set_num_threads(3)
        assert same(first, train(TASK, MODEL, config))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    # The precision is that of products of the training alone.
    assert {*seen, torch.get_float32_matmul_precision()} == {precision}
    assert not same(first, train(TASK, MODEL, replace(config, seed=1)))
    assert not same(first, train(TASK, replace(MODEL, seed=1), config))


def trained(config, model_config, *, threads, dtype=torch.float64):
    """The model after all steps; in float64 AdamW does not divide one rounding error by another."""
    sequences = TASK.splits(config.sequences, config.data_seed)[0]
    model = LabModel(replace(model_config, vocabulary=TASK.vocabulary)).to(dtype)
    steps = CpuSteps(model, sequences.tokens, sequences.answers, config, threads=threads)
    for step in range(config.steps):
        steps.run(step)
    steps.close()
    return model


def test_equals_the_obvious_loop_and_the_sum_of_parts():
    """Without dropout: torch's own loop with AdamW and Hugging Face's schedule gives the same weights."""
    from transformers import get_linear_schedule_with_warmup

    config, model_config = replace(TRAIN, steps=12), replace(MODEL, dropout=0.0)
    sequences = TASK.splits(config.sequences, config.data_seed)[0]
    model = LabModel(replace(model_config, vocabulary=TASK.vocabulary)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.95, 0.999), weight_decay=1e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, config.warmup, config.steps)
    for rows in batch_order(config, len(sequences)):
        loss = functional.cross_entropy(model(sequences.tokens[rows]), sequences.answers[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for threads in (1, 3):
        found = trained(config, model_config, threads=threads).state_dict()
        torch.testing.assert_close(found, model.state_dict(), atol=1e-8, rtol=0)
    # A training is these steps, on float32 weights, with dropout too.
    for one in (model_config, MODEL):
        assert same(train(TASK, one, config), trained(config, one, threads=2, dtype=torch.float32))


@pytest.mark.slow
def test_learns(tmp_path):
    accuracies = {}
    held_out = TASK.splits(20_000)[2]

    def record(step, model):
        assert not torch.is_grad_enabled()
        accuracies[step] = float((model(held_out.tokens).argmax(-1) == held_out.answers).float().mean())

    config = replace(TRAIN, steps=600, batch=32, warmup=50, sequences=20_000, record_every=200)
    model = train(TASK, replace(MODEL, width=32, dropout=0.0), config, record=record, directory=tmp_path / "run")
    assert list(accuracies) == [0, 200, 400, 600]
    assert accuracies[0] < 0.4
    assert accuracies[600] > 0.6
    again = load_model(tmp_path / "run" / MODEL_FILE)
    assert same(model, again)
    assert again.config == model.config
    assert not (tmp_path / "run" / STATE_FILE).exists()


def test_interrupted_and_resumed(tmp_path, whole):
    with pytest.raises(KeyboardInterrupt):
        train(TASK, MODEL, TRAIN, record=Interrupt(30), directory=tmp_path)
    assert load_state(tmp_path / STATE_FILE).step == 28
    seen = []
    assert same(whole, train(TASK, MODEL, TRAIN, record=lambda step, model: seen.append(step), directory=tmp_path))
    assert seen == [30, 40]
    assert same(whole, train(TASK, MODEL, TRAIN, record=Interrupt(0), directory=tmp_path))
    with pytest.raises(ConfigError, match=r"learning_rate=0\.003, not 0\.001"):
        train(TASK, MODEL, replace(TRAIN, learning_rate=1e-3), directory=tmp_path)
    with pytest.raises(ConfigError, match="other sequences"):
        train(TASK, MODEL, TRAIN, sequences=TASK.sample(50, seed=3), directory=tmp_path)
    train(TASK, MODEL, replace(TRAIN, save_every=3), directory=tmp_path)


def _train(directory, connection):
    train(TASK, MODEL, TRAIN, directory=directory, record=Told(connection, last=TRAIN.steps))


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.slow), 20])
def test_killed_and_resumed(tmp_path, processes, whole, after):
    killed(processes, _train, tmp_path, after=after)
    assert same(whole, train(TASK, MODEL, TRAIN, directory=tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [MODEL_FILE]


def test_damaged_files_are_told(tmp_path):
    (tmp_path / STATE_FILE).write_bytes(b"nonsense")
    with pytest.raises(LoadError, match="damaged"):
        train(TASK, MODEL, TRAIN, directory=tmp_path)
    with pytest.raises(LoadError, match="no such file"):
        load_model(tmp_path / "none.safetensors")
    save_model(LabModel(MODEL), tmp_path / STATE_FILE)
    with pytest.raises(LoadError, match="not a wherewhat training state"):
        load_state(tmp_path / STATE_FILE)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        train(TASK, MODEL, TRAIN, directory=tmp_path / "file")


def test_wrong_input_is_told():
    with pytest.raises(ConfigError, match="batch is 0"):
        build_config(TrainConfig, {"batch": "0"})
    with pytest.raises(ConfigError, match="learning_rate"):
        build_config(TrainConfig, {"learning_rate": "-1"})
    sequences = TASK.splits(2000)[0]
    with pytest.raises(ConfigError, match="vocabulary has"):
        train(NumberTask(target=2, pretarget=2, hops=1, symbols=2), MODEL, TRAIN, sequences=sequences)
    with pytest.raises((ConfigError, LoadError)):
        train(TASK, MODEL, TRAIN, device="nowhere")
    with pytest.raises(MeasureError, match="smaller learning_rate"):
        train(TASK, MODEL, replace(TRAIN, learning_rate=1e30))


def test_options_have_help_and_are_the_papers():
    for config in (LabConfig, TrainConfig):
        assert all(field.metadata["help"] for field in fields(config))
    assert build_config(TrainConfig, {"beta1": "0.95", "threads": "none"}) == TrainConfig()
    rates = learning_rates(TrainConfig())
    assert float(rates.max()) == 1e-4
    assert float(rates[0]) == 0
    assert int(rates.argmax()) == 750
    order = batch_order(TrainConfig(), 432_000)
    assert order.shape == (6750, 64)
    assert torch.equal(order.flatten().sort().values, torch.arange(432_000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_graph_equals_kernels_one_by_one():
    from wherewhat_lab.steps import GpuSteps

    sequences = TASK.splits(2000)[0]
    found = []
    for graph in (False, True):
        model = LabModel(replace(MODEL, vocabulary=TASK.vocabulary)).cuda()
        steps = GpuSteps(model, sequences.tokens, sequences.answers, TRAIN, graph=graph)
        for step in range(TRAIN.steps):
            steps.run(step)
        found.append(steps.losses.cpu())
    assert bool((found[0] > 0).all())
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_resumed_on_a_gpu(tmp_path):
    whole = train(TASK, MODEL, TRAIN, device="cuda")
    with pytest.raises(KeyboardInterrupt):
        train(TASK, MODEL, TRAIN, record=Interrupt(30), directory=tmp_path, device="cuda")
    resumed = train(TASK, MODEL, TRAIN, directory=Path(tmp_path), device="cuda")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_model_is_written_with_the_same_bytes_each_time(tmp_path):
    model = LabModel(MODEL)
    for number in range(4):
        save_model(model, tmp_path / str(number), identity={"a": 1})
    assert len({(tmp_path / str(number)).read_bytes() for number in range(4)}) == 1
    assert read_identity(tmp_path / "0") == {"a": 1}
    # Files of earlier versions name their kind in an entry of its own.
    with safe_open(tmp_path / "0", "pt") as file:
        header = json.loads(file.metadata()["header"])
    entries = {"kind": header.pop("kind"), "header": json.dumps(header)}
    save_file(load_file(tmp_path / "0"), tmp_path / "earlier", metadata=entries)
    found = load_model(tmp_path / "earlier").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_a_damaged_model_is_trained_again_with_the_same_bytes(tmp_path):
    config = replace(TRAIN, steps=4)
    train(TASK, MODEL, config, directory=tmp_path)
    file = tmp_path / MODEL_FILE
    whole = file.read_bytes()
    altered = bytearray(whole)
    altered[-5] ^= 1  # one bit of a weight
    for damaged in (bytes(altered), whole[:100], b""):
        file.write_bytes(damaged)
        with pytest.raises(LoadError, match="it is damaged"):
            load_model(file)
        train(TASK, MODEL, config, directory=tmp_path)
        assert file.read_bytes() == whole
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(LoadError, match="is not a wherewhat laboratory model"):
        train(TASK, MODEL, config, directory=tmp_path)
    assert file.exists()
