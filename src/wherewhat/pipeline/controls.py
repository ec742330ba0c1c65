"""A model beside its controls; a control model that cannot be made or measured is left out, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wherewhat.errors import CaptureError, LoadError, MeasureError
from wherewhat.pipeline.progress import Progress
from wherewhat.pipeline.request import Request
from wherewhat.pipeline.running import run
from wherewhat.store import RunDirectory

if TYPE_CHECKING:
    from wherewhat.models import Weights
    from wherewhat.pipeline.keeping import LastModel


@dataclass(frozen=True)
class Controlled:
    """Finished runs of a model and its controls.

    Attributes:
        runs: Run directory by weights, the model itself first.
        left_out: Why a control is missing, by its weights.
    """

    runs: dict[str, RunDirectory]
    left_out: dict[str, str]


def run_with_controls(
    request: Request, controls: Iterable[Weights], *, out: Path, progress: Progress | None = None
) -> Controlled:
    """Measure a model, and as controls the same model with other weights.

    Args:
        request: What to measure.
        controls: Weights of the controls, such as ``("random", "shuffled")``.
        out: Folder that holds run directories.
        progress: Where to tell how far it is; silent by default.

    Raises:
        WherewhatError: If the model itself cannot be measured, or the disk cannot be written.
    """
    runs = {str(request.model.weights): run(request, out=out, progress=progress)}
    left_out: dict[str, str] = {}
    for weights in controls:
        outcome = run_control(request.twin(weights), out=out, progress=progress)
        if isinstance(outcome, str):
            left_out[weights] = outcome
        else:
            runs[weights] = outcome
    return Controlled(runs, left_out)


def run_control(
    request: Request, *, out: Path, progress: Progress | None = None, models: LastModel | None = None
) -> RunDirectory | str:
    """The finished run of a control, or in one line why there is none.

    Some models have no such control: the entries of quantised weights, for example, cannot be permuted.

    Raises:
        WherewhatError: If the disk cannot be written.
    """
    try:
        return run(request, out=out, progress=progress, models=models)
    except (LoadError, CaptureError, MeasureError) as error:
        return str(error)
