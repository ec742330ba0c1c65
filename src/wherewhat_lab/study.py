"""What the studies share: a run with training, records and measurements, a table, and the frame of a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherewhat.files import JSON, make_folder, remove, write_file
from wherewhat.progress import Progress
from wherewhat.runs.directory import Provenance, RunDirectory
from wherewhat.runs.records import RECORDS, RECORDS_FILE, Recorder, StudyRun, TensorTable, save_table, synchronize
from wherewhat_lab.model import LabModel
from wherewhat_lab.training import MODEL_FILE, STATE_FILE, Record

if TYPE_CHECKING:
    from wherewhat.cli.tables import Table


def complete_once(
    run: RunDirectory,
    complete: Callable[[], None],
    *,
    progress: Progress,
    keep: str = "",
    temporary: Sequence[str] = (),
) -> None:
    """Complete a run that is not finished, or lacks a file to keep, while other processes that need it wait.

    Args:
        run: The run directory.
        complete: Function that does what is missing.
        progress: Progress callback.
        keep: A file that has to be there.
        temporary: Names of files and folders to remove at the end, besides the unfinished records.
    """

    def is_missing() -> bool:
        return not run.is_complete or not (run.path / keep).exists()

    if is_missing():
        with run.lock(on_wait=progress.say):
            if is_missing():  # no other process finished it meanwhile
                complete()
            for name in (RECORDS_FILE, *temporary):
                remove(run.path / name)


def complete_run(
    run: RunDirectory,
    recorder: Recorder,
    *,
    train: Callable[[Record | None], LabModel],
    part: str,
    measure: Callable[[LabModel], TensorTable],
    device: str,
    dtype: str = "float32",
    text_hash: str | None = None,
    details: Mapping[str, JSON] | None = None,
    files: Iterable[str] = (),
) -> None:
    """Train a model with records, measure it, and finish the run. Only for the holder of the run's lock.

    Parts that the directory holds already are not computed again.

    Args:
        run: The run directory; its path is the directory of the training.
        recorder: Recorder with the file ``RECORDS_FILE`` of the run directory.
        train: Function that trains a model, or loads the trained one, with a recorder or without.
        part: Name of the part with the measurements after training.
        measure: Function from the trained model to those measurements.
        device: Device of the training.
        dtype: Precision of the training.
        text_hash: Hash of the text; None for a training without text.
        details: Additional provenance.
        files: Files of the training to keep, such as the model.
    """
    if not run.has(RECORDS) and not (run.path / RECORDS_FILE).exists():
        for name in (MODEL_FILE, STATE_FILE):  # without its records a training has to start from step 0
            remove(run.path / name)
    resumed = int(recorder.records.steps.max()) if len(recorder.records) else None
    started = time.perf_counter()
    model = train(None if run.has(RECORDS) else recorder)
    synchronize(model)
    trained = time.perf_counter()
    save_table(run, RECORDS, recorder.records.table(), seconds=trained - started)
    if not run.has(part):
        save_table(run, part, measure(model), seconds=time.perf_counter() - trained)
    own: dict[str, JSON] = {
        # Seconds are those of the last process alone.
        "seconds_training": round(trained - started - recorder.seconds, 3),
        "seconds_recording": round(recorder.seconds, 3),
        "seconds_after": round(time.perf_counter() - trained, 3),
        "seconds_by_record": {str(step): round(seconds, 4) for step, seconds in recorder.seconds_by_step.items()},
        "resumed_after_step": resumed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(device) if model.embedding.is_cuda else "cpu",
    }
    provenance = Provenance(
        model_hash=None,
        tokenizer_hash=None,
        text_hash=text_hash,
        dtype=dtype,
        device=device,
        seed=model.config.seed,
        extra={**own, **(details or {})},
    )
    run.finish([RECORDS, part], provenance=provenance, files=files)


def filled_table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str | None = None,
    left: Container[int] = (0,),
) -> Table:
    """Return a table for the terminal; the columns with indices in ``left`` are aligned left, the others right."""
    from wherewhat.cli.tables import Table

    table = Table(title=title, caption=caption)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def write_study_page(
    file: Path, study: str, *, title: str, data: Mapping[str, Any], runs: Iterable[StudyRun], charts: Any = None
) -> Path:
    """Write the page of a study atomically and return its path.

    Args:
        file: The HTML file.
        study: Package of the study, whose ``assets`` hold the page's HTML, CSS and JavaScript.
        title: Title of the window.
        data: Everything that the page shows but its runs, as plain JSON.
        runs: The runs, whose configuration and provenance the page shows.
        charts: Charts as plain Plotly JSON, if they are not part of the data.
    """
    from wherewhat.report.page import whole_page

    assets = package_files(study) / "assets"
    body, style, script = ((assets / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    listed = [{"name": run.path.name, "config": run.config, "provenance": run.directory.provenance()} for run in runs]
    whole = {**data, "runs": listed}
    html = whole_page(title=title, body=body, style=style, scripts=[script], data=whole, charts=charts)
    make_folder(file.parent)
    write_file(file, html.encode("utf-8"))
    return file
