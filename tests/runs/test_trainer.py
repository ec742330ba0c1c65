"""End-to-end: the callback in a real ``transformers.Trainer``, whose training it does not change."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

import wherewhat
from helpers.capture import tiny, tokens
from helpers.training import Rows, same_weights, trainee
from wherewhat.errors import ConfigError
from wherewhat.runs.records import TrainingRun
from wherewhat.runs.trainer import TrainerCallback

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

IDS = tokens(20, batch=2, seed=5)


class Recording(transformers.TrainerCallback):
    """Keeps all logs, as an integration such as TensorBoard's does."""

    def __init__(self) -> None:
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append((state.global_step, dict(logs)))


def trainer(folder, *callbacks, model=None, data=None, held_out=None, processing_class=None, **options) -> Trainer:
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **options})
    return Trainer(
        trainee() if model is None else model,
        arguments,
        train_dataset=Rows() if data is None else data,
        eval_dataset=held_out,
        callbacks=list(callbacks),
        processing_class=processing_class,
    )


def callback(**options) -> TrainerCallback:
    return TrainerCallback(**{"every": 2, "measurements": "axes", "texts": IDS, **options})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("llama", {}, id="plain"),
        pytest.param("gpt2", {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow, id="accumulation"),
        pytest.param("llama", {"gradient_checkpointing": True}, marks=pytest.mark.slow, id="checkpointing"),
        pytest.param("gpt2", {"bf16": True, "per_device_train_batch_size": 1}, marks=pytest.mark.slow, id="bf16"),
    ],
)
def test_weights_are_those_of_a_training_without_it(tmp_path, kind, options):
    settings = {"max_steps": 8, **options}
    settings["logging_steps"] = every = 2
    without = trainer(tmp_path / "without", model=trainee(kind), **settings)
    without.train()
    added = callback(every=every, measurements=["axes", "heads"], texts=None)
    beside = trainer(tmp_path / "with", added, model=trainee(kind), **settings)
    beside.train()
    assert same_weights(without.model, beside.model)
    assert added.run.records.steps.tolist() == [0, every, 2 * every, 3 * every, 4 * every]
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (without, beside)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_mixed_precision_does_not_change_the_records(tmp_path):
    first, second = callback(), callback()
    trainer(tmp_path / "a", first, max_steps=1).train()
    made = trainer(tmp_path / "b", second, max_steps=1, bf16=True)
    made.train()
    assert torch.equal(first.run.records["axes.r"][0], second.run.records["axes.r"][0])
    assert not torch.equal(first.run.records["axes.r"][1], second.run.records["axes.r"][1])
    assert made.model.forward.__name__ == made.model.forward.__wrapped__.__name__  # still wrapped in autocast


def test_logs_reach_callbacks_before_it_without_looking_at_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "currentframe", lambda: None)
    before, added, model = Recording(), callback(out=tmp_path), trainee()
    other, own = (CallbackHandler([before], model, None, None, None) for _ in range(2))
    own.add_callback(added)
    other.add_callback(added)
    other.remove_callback(added)
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    state, control = TrainerState(max_steps=2), TrainerControl()
    own.on_train_begin(args, state, control)
    assert [step for step, logs in before.logs if "wherewhat/axes/r" in logs] == [0]
    state.global_step = 2
    own.on_step_end(args, state, control)
    assert [step for step, logs in before.logs if "wherewhat/axes/r" in logs] == [0, 2]
    assert [log["step"] for log in state.log_history] == [0, 2]


@pytest.mark.slow
def test_logs_reach_callbacks_before_it_and_the_history(tmp_path):
    before, added = Recording(), callback()
    made = trainer(tmp_path, before, added)
    made.add_callback(after := Recording2())
    made.train()
    seen = [(step, logs) for step, logs in before.logs if "wherewhat/axes/r" in logs]
    assert [step for step, _ in seen] == [0, 2, 4, 6]
    assert after.logs[:-1] == before.logs[:-1]  # of the last log the printer removes an entry
    assert all(isinstance(value, float | int) for _, logs in seen for value in logs.values())
    kept = [log for log in made.state.log_history if "wherewhat/axes/r" in log]
    assert [log["step"] for log in kept] == [0, 2, 4, 6]
    assert kept[1] == {**seen[1][1], "step": 2}
    # The loss is logged at the same steps as without the callback.
    assert [log["step"] for log in made.state.log_history if "loss" in log] == [2, 4, 6]
    assert len(added.run.table()) > 0
    assert TrainingRun.load(added.run.path).records.steps.tolist() == [0, 2, 4, 6]
    assert added.run.path.parent == tmp_path / "wherewhat"
    assert added.run.name == tmp_path.name


class Recording2(Recording):
    """Another class, since a trainer warns of two callbacks of one."""


@pytest.mark.slow
def test_tensorboard(tmp_path):
    pytest.importorskip("torch.utils.tensorboard", reason="TensorBoard is not installed")
    trainer(tmp_path, callback(), report_to=["tensorboard"]).train()
    content = b"".join(file.read_bytes() for file in tmp_path.rglob("events.*"))
    assert b"wherewhat/axes/r" in content


@pytest.mark.slow
def test_resuming_from_a_checkpoint(tmp_path):
    whole = callback()
    trainer(tmp_path / "a", whole, max_steps=8, save_strategy="steps", save_steps=4).train()
    first, second, recording = callback(name="a"), callback(name="a"), Recording()
    trainer(tmp_path / "b", first, max_steps=8, save_strategy="steps", save_steps=4).train()
    resumed = trainer(tmp_path / "b", recording, second, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    assert second.run.records.steps.tolist() == [0, 2, 4, 6, 8]
    assert [step for step, logs in recording.logs if "wherewhat/axes/r" in logs] == [6, 8]
    assert torch.equal(second.run.records["axes.r"], whole.run.records["axes.r"])
    assert [log["step"] for log in resumed.state.log_history if "wherewhat/axes/r" in log] == [0, 2, 4, 6, 8]


@pytest.mark.slow
def test_training_again_begins_a_new_record(tmp_path):
    added = callback()
    made = trainer(tmp_path, added, max_steps=2)
    made.train()
    first = added.run.records["axes.r"][0]
    made.train()
    assert added.run.records.steps.tolist() == [0, 2]
    assert not torch.equal(added.run.records["axes.r"][0], first)  # of the model as the first training left it


@pytest.mark.slow
def test_the_last_step_of_a_training_that_is_stopped(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    added = callback()
    trainer(tmp_path, added, Stop()).train()
    assert added.run.records.steps.tolist() == [0, 2, 3]


@pytest.mark.slow
def test_the_best_model_is_not_recorded_as_the_last_one(tmp_path):
    added = callback(every=100)
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(tmp_path, added, held_out=Rows(4), load_best_model_at_end=True, **options).train()
    assert added.run.records.steps.tolist() == [0, 4]


@pytest.mark.slow
def test_embedded_text_in_the_tokens_of_the_trainer(tmp_path, build):
    loaded = wherewhat.load(build.model(tmp_path / "model"))
    model, added, data = loaded.model.requires_grad_(True).train(), callback(texts=None, tokens=16), Rows(8, 12)
    data.ids %= 13
    loaded.tokenizer.pad_token = "</s>"
    options = {"data": data, "processing_class": loaded.tokenizer, "max_steps": 2}
    trainer(tmp_path / "out", added, model=model, **options).train()
    assert added.run.config["documents"][0]["name"] == wherewhat.embedded_documents(1)[0].name
    assert added.run.config["tokens"] == 16


class Padded(Rows):
    """Rows with padding at their ends."""

    def __getitem__(self, index):
        mask = torch.ones(len(self.ids[index]), dtype=torch.long)
        mask[18:] = 0
        return {**super().__getitem__(index), "attention_mask": mask}


@pytest.mark.slow
def test_without_a_tokenizer_the_first_rows_are_measured(tmp_path):
    added = callback(texts=None)
    trainer(tmp_path, added, data=Padded(), max_steps=2).train()
    assert added.run.config["tokens"] == 18
    expected = [wherewhat.Document("x", "", ids=tuple(row[:18].tolist())).sha256 for row in Rows().ids[:2]]
    assert [document["sha256"] for document in added.run.config["documents"]] == expected


def one_warning(caplog) -> str:
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("wherewhat")]
    return line


class Stream(torch.utils.data.IterableDataset):
    """Rows without an index."""

    def __iter__(self):
        return iter(Rows())


@pytest.mark.slow
def test_what_cannot_be_recorded_is_one_warning(tmp_path, caplog, subtests):
    for options, data, problem in (
        ({"texts": [[1, 2, 3]]}, None, "the shortest text has 3 tokens"),
        ({"texts": [[900] * 20]}, None, "token id 900 is not in the vocabulary"),
        ({"texts": ["a text"]}, None, "the model has no tokenizer"),
        ({"texts": None}, Stream(), "there is no tokenizer, and the training data have no input_ids"),
        ({"measurements": "split", "documents": 1}, None, "split needs"),
        ({"out": "/proc/nothing"}, None, "cannot"),
    ):
        with subtests.test(problem=problem):
            added = callback(**options)
            made = trainer(tmp_path, added, data=data, max_steps=2)
            caplog.clear()
            made.train()
            assert made.state.global_step == 2
            assert problem in one_warning(caplog)
            assert one_warning(caplog).startswith("wherewhat records nothing, training goes on: ")
            assert added.recorder is None
            assert added.run is None


@pytest.mark.slow
def test_a_model_that_cannot_be_verified(tmp_path, caplog):
    added = callback()
    made = trainer(tmp_path, added, model=tiny("mamba").train(), max_steps=2)
    made.train()
    assert made.state.global_step == 2
    assert "training goes on" in one_warning(caplog)
    assert added.run is None


def test_sharded_weights_and_other_processes_record_nothing(tmp_path, caplog):
    def shard(model):
        model.lm_head.weight.__class__ = type("DTensor", (torch.nn.Parameter,), {})

    sharded = SimpleNamespace(fsdp=["full_shard"], output_dir=str(tmp_path))
    for arguments, change in (
        (sharded, lambda model: None),
        (None, lambda model: setattr(model.lm_head.weight, "ds_id", 0)),
        (None, shard),
    ):
        added, made = callback(), trainer(tmp_path)
        change(made.model)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            added.on_train_begin(arguments or made.args, made.state, made.control, model=made.model)
        assert "over processes" in one_warning(caplog)
        assert added.recorder is None
    added, made = callback(), trainer(tmp_path)
    made.state.is_world_process_zero = False
    added.on_train_begin(made.args, made.state, made.control, model=made.model)
    added.on_step_end(made.args, made.state, made.control)
    added.on_train_end(made.args, made.state, made.control)
    assert added.recorder is None
    assert not (tmp_path / "wherewhat").exists()
    added, made = callback(), trainer(tmp_path)  # without a handler the history has the logs
    added.on_train_begin(made.args, made.state, made.control, model=made.model)
    assert [log["step"] for log in made.state.log_history] == [0]


@pytest.mark.slow
def test_an_error_at_one_record(tmp_path, caplog, monkeypatch):
    added = callback()
    made = trainer(tmp_path, added)

    class Break(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                monkeypatch.setattr("wherewhat.runs.training.measure_texts", lambda *_: 1 / 0)

    made.callback_handler.callbacks.insert(0, Break())
    made.train()
    assert made.state.global_step == 6
    assert one_warning(caplog).startswith("wherewhat records nothing from step 4 on, training goes on: division")
    assert added.run.records.steps.tolist() == [0, 2]


def test_wrong_arguments_raise_at_once():
    assert issubclass(wherewhat.TrainerCallback, transformers.TrainerCallback)
    for options, problem in [
        ({"measurements": ["axis"]}, "there is no measurement 'axis'"),
        ({"options": {"axes": {"skips": 1}}}, "there is no option 'skips'"),
        ({"every": 0}, "every is 0"),
        ({"evry": 1}, "TrainerCallback has no argument 'evry'"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            callback(**options)
