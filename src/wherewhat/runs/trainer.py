"""A callback for ``transformers.Trainer`` that records measurements during training."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers import TrainerCallback as TransformersCallback
from transformers.trainer_callback import CallbackHandler

from wherewhat.errors import CaptureError, TextError
from wherewhat.numerics import random_states
from wherewhat.options import checked
from wherewhat.runs.records import TrainingRun
from wherewhat.runs.training import MEASUREMENTS, TrainingRecorder, check_positive, choose_measurements, warn
from wherewhat.text.documents import Document, documents_of


class TrainerCallback(TransformersCallback):  # type: ignore[misc] # transformers has no types
    """Record measurements of the model during a training by ``transformers.Trainer``.

    The model is measured before the first step, every ``every`` steps and after the last one, by a
    :class:`~wherewhat.runs.training.TrainingRecorder`: the trained weights are the same, bit for bit, as without the
    callback. The main metrics are logged as ``wherewhat/axes/r`` and the like, to ``log_history`` and to all reporting
    integrations of the trainer; all metrics of all heads are stored in a run directory.

    Wrong arguments raise an error here. Whatever cannot be recorded later (a model that cannot be verified, weights
    sharded by FSDP or DeepSpeed ZeRO-3, texts that are too short) is one line of warning, and training goes on without
    records. With several processes the first one records.

    Args:
        every: Number of steps between two records.
        measurements: Names of measurements.
        texts: Texts to measure the model on: strings, documents, or token ids ``(documents, n)``. By default embedded
            prose in the tokens of the trainer's tokenizer, or without tokenizer the first rows of the training data.
        options: Options of measurements by name, such as ``{"heads": {"queries": 16}}``.
        tokens: Tokens of each text, at most.
        documents: Number of texts, from the first, at most.
        out: Folder of run directories; by default ``wherewhat`` in the trainer's ``output_dir``.
        name: Name of the training; by default the last part of ``output_dir``.

    Attributes:
        recorder: The recorder, from the beginning of training on; None if nothing can be recorded.
        run: The finished run, after training; None before.

    Examples:
        >>> trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer)
        >>> trainer.add_callback(wherewhat.TrainerCallback(every=500, measurements=["axes", "heads"]))
        >>> trainer.train()
    """

    @checked(texts=documents_of)
    def __init__(
        self,
        *,
        every: int = 500,
        measurements: str | Sequence[str] = MEASUREMENTS,
        texts: tuple[Document, ...] | None = None,
        options: Mapping[str, Any] | None = None,
        tokens: int = 128,
        documents: int = 2,
        out: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        _tell_callbacks()
        self._handlers: list[CallbackHandler] = []
        self._handler: CallbackHandler | None = None
        check_positive(every=every, tokens=tokens, documents=documents)
        choose_measurements(measurements, options)
        self.recorder: TrainingRecorder | None = None
        self.run: TrainingRun | None = None
        self._texts, self._out, self._name, self._documents = texts, out, name, documents
        self._options: dict[str, Any] = {
            "every": every,
            "measurements": measurements,
            "options": options,
            "tokens": tokens,
            "documents": documents,
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        """Record the model before the first step."""
        self.recorder = self.run = None
        self._handler = next(
            (handler for handler in reversed(self._handlers) if self._is_called_by(handler, arguments)), None
        )
        if not state.is_world_process_zero:
            return
        try:
            self.recorder = self._start(args, state, **arguments)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever cannot be recorded
            warn(error)
        else:
            if self.recorder.seconds:  # not if a resumed training has this record, which was logged before
                self._log(self.recorder.numbers(), args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the model if this step is due or the last one."""
        if self.recorder is None:
            return
        last = control.should_training_stop or state.global_step >= state.max_steps
        record = self.recorder.record if last else self.recorder
        self._log(record(state.global_step), args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the last step, if training was stopped between two records, and finish the run."""
        if self.recorder is None:
            return
        if not args.load_best_model_at_end:  # otherwise the model is that of another step by now
            self._log(self.recorder.record(state.global_step), args, state, control)
        else:
            self.recorder.active = False
        try:
            self.run = self.recorder.finish()
        except Exception as error:  # noqa: BLE001 - the model is trained; its records are kept as they are
            warn(error)

    def _start(
        self,
        args: Any,
        state: Any,
        *,
        model: Any,
        processing_class: Any = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> TrainingRecorder:
        _check_whole(args, model)
        tokenizer = getattr(processing_class, "tokenizer", processing_class)  # of a processor
        tokenizer = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        texts: Any = self._texts
        if texts is None and tokenizer is None:
            with random_states():
                texts = _first_rows(eval_dataloader or train_dataloader, self._documents)
        output = Path(args.output_dir)
        return TrainingRecorder(
            model,
            texts,
            tokenizer=tokenizer,
            out=output / "wherewhat" if self._out is None else self._out,
            name=self._name or output.resolve().name or "training",
            start=state.global_step,
            **self._options,
        )

    def _log(self, numbers: Mapping[str, float], args: Any, state: Any, control: Any) -> None:
        """Log numbers as ``Trainer.log`` does."""
        if not numbers:
            return
        logs = {**numbers, **({} if state.epoch is None else {"epoch": state.epoch})}
        state.log_history.append({**logs, "step": state.global_step})
        if self._handler is not None:
            # Not handler.on_log, which would cancel the log of the loss that is due at the same step.
            self._handler.call_event("on_log", args, state, control, logs=logs)

    def _is_called_by(self, handler: CallbackHandler, arguments: Mapping[str, Any]) -> bool:
        """Return whether a handler has this callback, and the model and optimizer that an event was given."""
        same = all(getattr(handler, name) is arguments.get(name) for name in ("model", "optimizer"))
        return same and any(callback is self for callback in handler.callbacks)


def _tell_callbacks() -> None:
    """Make handlers tell callbacks of this module that they were added to them.

    A callback is given neither the trainer nor its handler, and the integrations that report logs are before it in the
    handler's list, so that numbers added in its own ``on_log`` would not reach them.
    """
    original = CallbackHandler.add_callback
    if hasattr(original, "tells_wherewhat"):
        return

    @functools.wraps(original)
    def add_callback(handler: Any, callback: Any) -> None:
        original(handler, callback)
        if isinstance(handler.callbacks[-1], TrainerCallback):
            handler.callbacks[-1]._handlers.append(handler)

    add_callback.tells_wherewhat = True  # type: ignore[attr-defined]
    CallbackHandler.add_callback = add_callback


def _check_whole(args: Any, model: Any) -> None:
    """Refuse weights that are sharded over processes, of which one alone cannot run the model."""
    weights = list(model.parameters())
    if any(hasattr(weight, "ds_id") for weight in weights):
        raise CaptureError("DeepSpeed ZeRO-3 shards the weights over processes; ZeRO-1 and ZeRO-2 can be recorded")
    if getattr(args, "fsdp", None) or any(type(weight).__name__ == "DTensor" for weight in weights):
        raise CaptureError("FSDP or tensor parallelism shards the weights over processes")


def _first_rows(loader: Any, count: int) -> list[list[int]]:
    """Return token ids of the first rows of a data loader's data set, without padding.

    The loader itself is not iterated, which would change the order of the training data.
    """
    advice = "give TrainerCallback(texts=…), such as token ids"
    dataset = getattr(loader, "dataset", None)
    try:
        rows = [dataset[index] for index in range(min(count, len(dataset)))]  # type: ignore[index,arg-type]
        batch = loader.collate_fn(rows)
        ids = torch.as_tensor(batch["input_ids"])
        mask = batch.get("attention_mask")
        kept = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    except Exception as error:
        raise TextError(
            f"there is no tokenizer, and the training data have no input_ids that can be read: {advice}"
        ) from error
    return [row[keep.bool()].tolist() for row, keep in zip(ids, kept, strict=True)]
