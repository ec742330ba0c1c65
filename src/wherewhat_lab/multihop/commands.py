"""``wherewhat multihop``: train, measure and construct models of multi-hop tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from wherewhat.boundary import MOST_DOCUMENTS, MOST_TOKENS, check_at_most, check_whole_number
from wherewhat.cli.claims import Details, print_claims, print_details
from wherewhat.cli.options import Out, file_to_write
from wherewhat.cli.tables import print_line
from wherewhat.errors import ConfigError
from wherewhat.options import parse_assignments, read_recipe
from wherewhat.progress import TerminalProgress

if TYPE_CHECKING:
    from wherewhat_lab.multihop.figures import RunFigures
    from wherewhat_lab.multihop.study import Checkpoint, MultihopRun, Setup


app = typer.Typer(
    name="multihop",
    help="Train small models on multi-hop tasks and measure the purity of heads and accuracy on longer inputs.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of task, model or training; can be repeated."),
]
Seeds = Annotated[str, typer.Option(help="Comma-separated seeds of weights, order and dropout.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories that 'train' made.")]
Extra = Annotated[str, typer.Option(help="Comma-separated numbers of tokens added to those of the task.")]
_DEFAULT_OUT = Path("runs")
_DEFAULT_PAGE = Path("multihop.html")
_DEFAULT_CLAIMS = Path("claims-multihop.json")
_DEFAULT_EXTRA = "0,30,40,50,60,80,100,200,300,400,500,700,800,1000,1500,2000,3000,5000"


@app.command()
def train(
    task: Annotated[str, typer.Argument(help="number, letter, index, retrieval or partial-induction.")] = "number",
    seeds: Seeds = "0",
    out: Out = _DEFAULT_OUT,
    device: Device = "auto",
    set_: Set = None,
) -> None:
    """Train models on a task and record accuracy and every head's scores during training.

    An interrupted training is resumed; a finished one is shown.
    """
    from wherewhat_lab.multihop.study import Setup

    setup = Setup.of(task, parse_assignments(set_ or ()))
    _show(_train([setup], _whole(seeds, "--seeds"), out, device))


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file such as recipes/paper.toml.")],
    out: Out = _DEFAULT_OUT,
    device: Device = "auto",
) -> None:
    """Run a whole study: all tasks and seeds, the dynamics, and accuracy by number of extra tokens."""
    from wherewhat_lab.multihop.study import MultihopRecipe

    study = read_recipe(recipe, MultihopRecipe)
    runs = _train(study.setups, study.seeds, out, device)
    _show(runs)
    _show_extra(runs, study.extra, study.extra_count, device)


@app.command()
def dynamics(runs: Runs) -> None:
    """Show scores, pure heads and accuracy by training step, and every head at the end."""
    from wherewhat_lab.multihop.study import open_run
    from wherewhat_lab.multihop.tables import dynamics_table, heads_table

    opened = [open_run(path) for path in runs]
    console = Console()
    for run in opened:
        console.print(dynamics_table(run))
        console.print(heads_table(run))
    _show(opened)


@app.command()
def lengths(
    runs: Runs,
    extra: Extra = _DEFAULT_EXTRA,
    count: Annotated[int, typer.Option(help="Sequences of each.")] = 1000,
    checkpoint: Annotated[str, typer.Option(help="last, best (by held-out accuracy), or both.")] = "both",
    device: Device = "auto",
) -> None:
    """Test trained models on longer inputs with the same questions."""
    from wherewhat_lab.multihop.study import open_run

    tokens = _checked_extra(extra, count)
    if checkpoint not in ("last", "best", "both"):
        raise ConfigError(f"--checkpoint is {checkpoint!r}: give last, best or both")
    _show_extra([open_run(path) for path in runs], tokens, count, device, checkpoint=checkpoint)


@app.command()
def roles(
    runs: Runs,
    count: Annotated[int, typer.Option(help="Number of test sequences.")] = 400,
) -> None:
    """Show which function each head implements, and the effects of its ablation and patching."""
    from wherewhat_lab.multihop.study import open_run
    from wherewhat_lab.multihop.tables import roles_table

    if count < 8:
        raise ConfigError(f"--count is {count}: at least 8 sequences are needed")
    check_at_most(MOST_DOCUMENTS, **{"--count": count})
    console = Console()
    for path in runs:
        console.print(roles_table(open_run(path), count))


@app.command()
def report(
    runs: Runs,
    file: Annotated[
        Path, typer.Option(metavar="FILE", parser=file_to_write("--file"), help="HTML file to write.")
    ] = _DEFAULT_PAGE,
    extra: Extra = _DEFAULT_EXTRA,
    count: Annotated[int, typer.Option(help="Sequences of each.")] = 1000,
    device: Device = "auto",
) -> None:
    """Write the figures of arXiv 2605.31558 from trained models, beside the paper's values, as one HTML page.

    Give runs of the number and the letter task with several seeds: values are means with 95 % intervals over seeds.
    What the run directories do not hold yet is measured, and kept in them.
    """
    from wherewhat_lab.multihop.page import write_page

    print_line(Console(), write_page(file, _figures(_grouped(runs), _checked_extra(extra, count), count, device)))


@app.command()
def claims(
    runs: Runs,
    file: Annotated[
        Path, typer.Option(metavar="FILE", parser=file_to_write("--file"), help="JSON file to write.")
    ] = _DEFAULT_CLAIMS,
    count: Annotated[int, typer.Option(help="Sequences of each number of extra tokens.")] = 1000,
    device: Device = "auto",
    details: Details = False,
) -> None:
    """Judge the claims of arXiv 2605.31558 about trained small models, over seeds.

    Give three or more runs of the number and of the letter task. Writes a file like that of `wherewhat claims`.
    """
    from wherewhat_lab.multihop.claims import LONGER, check_seeds, judge_runs, judgement

    grouped = _grouped(runs)
    check_seeds(grouped)
    figures = _figures(grouped, _checked_extra(f"0,{LONGER}", count), count, device)
    result = judgement(figures, judge_runs(figures))
    path, console = result.save(file), Console()
    title = f"claims judged on {sum(map(len, figures.values()))} trained models"
    print_claims(console, result.data["claims"], title=title)
    if details:
        print_details(console, result.data["claims"])
    print_line(console, path)


@app.command()
def construct(
    kind: Annotated[str, typer.Argument(help="index, retrieval or fourier.")] = "index",
    longest: Annotated[int, typer.Option(help="Longest input to construct it for, up to 4096 tokens.")] = 32,
) -> None:
    """Construct the weights of an Index or Retrieval transformer, or of a head whose logits are not additive.

    Index and Retrieval are checked and shown with their discrepancy by length; fourier with r of the additive fit.
    """
    from wherewhat_lab.multihop.tables import construction_tables

    console = Console()
    for table in construction_tables(kind, longest, progress=TerminalProgress()):
        console.print(table)


def _figures(
    grouped: dict[str, list[MultihopRun]], extra: tuple[int, ...], count: int, device: str
) -> dict[str, list[RunFigures]]:
    """Return the numbers of runs by task; those that the run directories do not hold are measured."""
    from wherewhat_lab.multihop.figures import measure_figures

    on, progress = _device(device), TerminalProgress()
    return {
        task: [measure_figures(run, extra, count=count, device=on) for run in progress.track(same, f"{task} task")]
        for task, same in grouped.items()
    }


def _grouped(runs: list[Path]) -> dict[str, list[MultihopRun]]:
    from wherewhat_lab.multihop.figures import runs_by_task
    from wherewhat_lab.multihop.study import open_run

    return runs_by_task([open_run(path) for path in runs])


def _train(setups: Any, seeds: tuple[int, ...], out: Path, device: str) -> list[MultihopRun]:
    from wherewhat_lab.multihop.study import train_and_record

    progress = TerminalProgress()
    trained = []
    # All setups first, so that an invalid seed is refused before the first training.
    seeded: list[tuple[int, Setup]] = [(seed, setup.seeded(seed)) for setup in setups for seed in seeds]
    for seed, setup in seeded:
        progress.say(f"{setup.name} task, seed {seed}: {setup.training.steps:,} steps")
        trained.append(train_and_record(setup, out=out, device=_device(device), progress=progress))
    return trained


def _show(runs: list[MultihopRun]) -> None:
    from wherewhat_lab.multihop.tables import alignment_table, purity_table, summary_table

    console = Console()
    console.print(summary_table(runs))
    console.print(purity_table(runs))
    for name in dict.fromkeys(run.setup.name for run in runs):
        same = [run for run in runs if run.setup.name == name]
        if len(same) > 1:
            console.print(alignment_table(name, same))
    for run in runs:
        print_line(console, run.path)


def _show_extra(
    runs: list[MultihopRun], extra: tuple[int, ...], count: int, device: str, *, checkpoint: str = "both"
) -> None:
    from wherewhat_lab.constructions.discrepancy import predict_hop_heads
    from wherewhat_lab.multihop.study import measure_extra
    from wherewhat_lab.multihop.tables import extra_table, prediction_table

    progress = TerminalProgress()
    columns, last, heads = {}, [], []
    for run in progress.track(runs, "longer inputs"):
        task, on = run.setup.task, _device(device)
        chosen = run.checkpoints if checkpoint == "both" else (cast("Checkpoint", checkpoint),)
        accuracies = {name: measure_extra(run, extra, count=count, checkpoint=name, device=on) for name in chosen}
        for name, accuracy in accuracies.items():
            columns[f"{run.setup.name} {run.seed} {name}"] = accuracy
        if "last" in accuracies:
            last.append(accuracies["last"])
            rotated = run.setup.model.encoding not in ("alibi", "learned", "nope")
            lengths = [task.length + added for added in extra]
            heads.append(predict_hop_heads(run.model(device=on), task, lengths) if rotated else [])
    console = Console()
    console.print(extra_table(columns))
    if any(heads):
        console.print(prediction_table(runs, last, heads))


def _device(name: str) -> str:
    from wherewhat.models.loaded import resolve_device

    return str(resolve_device(name))


def _checked_extra(extra: str, count: int) -> tuple[int, ...]:
    """Return the numbers of extra tokens, after a check of both options."""
    if count < 1:
        raise ConfigError(f"--count is {count}: at least 1 sequence is needed")
    check_at_most(MOST_DOCUMENTS, **{"--count": count})
    tokens = _whole(extra, "--extra")
    check_at_most(MOST_TOKENS, **{"--extra": tokens})
    return tokens


def _whole(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}: give whole numbers with commas between them") from None
    if min(numbers) < 0:
        raise ConfigError(f"{option} holds {min(numbers)}: give numbers from 0 on")
    check_whole_number(option, numbers)
    return numbers
