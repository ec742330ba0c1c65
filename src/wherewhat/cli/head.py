"""``wherewhat head``: what one head does, and its attention on a prompt."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape

from wherewhat.cli import options
from wherewhat.cli.options import with_fields
from wherewhat.cli.tables import Table, print_line
from wherewhat.errors import ConfigError, MeasureError, TextError, printable
from wherewhat.progress import Progress, TerminalProgress
from wherewhat.runs.request import ModelRequest, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from wherewhat.report.attention_view import AttentionView, Portraits
    from wherewhat.runs.execution import LastModel
    from wherewhat.text.documents import Document

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="smollm2 (embedded), a Hugging Face id, a folder (model or LoRA adapter), or a .gguf file.",
    ),
]
_Head = Annotated[str, typer.Argument(metavar="HEAD", help="Layer and head, such as L17H3.")]
_Prompt = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Text to show its attention on (default: embedded prose, and random tokens that come twice).",
    ),
]
_File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=options.file_to_write("--file"),
        help="The page's file (default: head-MODEL-HEAD.html in --out).",
    ),
]

_MEASURED = {"queries": 8, "taus": (), "blocks": ()}
"""Options of the short measurement of ``heads``: a portrait needs no sensitivity curves."""

_MEASURED_TOKENS = 256
"""Tokens of prose of the short measurement."""

_SHADES, _PLAIN_SHADES = " ░▒▓█", " .:*#"
"""Characters of the pattern, for equal steps of the square root of the weight, so that small weights are seen."""

_LABEL = 12
"""Columns of the token in front of a row of the pattern."""

_QUERIES, _KEYS = 10, 3
"""Queries of the table of attended tokens, and keys of each."""


@with_fields(ModelRequest, leave_out=("model",))
def head(
    model: _Model,
    head: _Head,
    prompt: _Prompt = None,
    file: _File = None,
    out: options.Out = options.DEFAULT_OUT,
    **fields: Any,
) -> None:
    """Show what one head does: a sentence with its numbers, its attention on a prompt, and an interactive page.

    $ wherewhat head smollm2 L17H3
    $ wherewhat head ./my-model L5H1 --prompt "The cat sat on the mat, and the cat"

    The numbers are those of the largest finished run of `wherewhat heads` of the same model in --out; without one the
    prompt, or 256 tokens of embedded prose, are measured now. The page has all heads of the model and opens offline.
    """
    from wherewhat.files import config_hash, run_folder_name
    from wherewhat.report import attention_view as view
    from wherewhat.runs.execution import LastModel
    from wherewhat.runs.request import document_length
    from wherewhat.text.documents import Document, clean

    progress, place = TerminalProgress(), view.parse_head(head)
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt is empty: give a text, or leave it out for embedded prose")
    given = None if prompt is None else Document("prompt", clean(prompt, where="--prompt"))
    request, models = ModelRequest(model=model, **fields), LastModel()
    loaded, proof = models.loaded(request, say=progress.say), models.proof()
    counts = view.head_counts(proof)
    view.check_head(loaded.name, counts, place)
    texts = view.default_texts(loaded) if given is None else [given]
    tokens = view.default_tokens(loaded) if given is None else view.MOST_TOKENS
    longest = max(document_length(loaded, text) for text in texts)
    # A long text does not fit into a page of all heads.
    fits = view.shown_rows(sum(counts.values()), len(texts)) >= min(longest, tokens)
    key = config_hash({"model": loaded.weights_hash, "texts": [text.sha256 for text in texts]})
    name = run_folder_name(f"head-{loaded.name}-L{place[0]}H{place[1]}", key)
    with tempfile.TemporaryDirectory(prefix="wherewhat-") as folder:
        portraits = _portraits(request, models, given, out=out, folder=Path(folder), progress=progress)
        shown = view.view_attention(
            loaded,
            texts,
            head=place,
            layers=None if fits else [place[0]],
            portraits=None if isinstance(portraits, str) else portraits,
            proof=proof,
            tokens=tokens,
        )
        path = shown.save(file or out / f"{name}.html")
        _print(shown, portraits, out=out, fits=fits)
    print_line(Console(), path)


def _print(shown: AttentionView, portraits: Portraits | str, *, out: Path, fits: bool) -> None:
    """Print portrait, patterns and attended tokens of the head that a view begins with."""
    console, place = Console(), shown.head
    print_line(console, f"{shown.name}, layer {place[0]}, head {place[1]}", style="bold")
    if isinstance(portraits, str):
        print_line(console, f"No portrait: {portraits}", wrap=True)
    else:
        sentence = portraits.sentences.get(place, "No portrait: the head has no scores.")
        print_line(console, sentence, wrap=True)
        print_line(console, portraits.source, wrap=True, style="dim")
        run = portraits.run.directory.path
        if run.parent == out:  # not what was measured on a prompt
            print_line(console, run, style="dim")
    for note in shown.notes:
        print_line(console, note, wrap=True)
    if not fits:
        print_line(
            console, f"The page has layer {place[0]} only: all layers are too large on so many tokens.", wrap=True
        )
    for text, passage in shown.passages.items():
        pattern = shown.pattern(*place, text)
        print_line(console, "")
        plain = not console.encoding.lower().startswith("utf")
        print_line(console, f"{text}: queries from top to bottom, keys from left to right", style="bold")
        width = min(console.width, 80)
        each = 2 * _cells(len(pattern), width)
        print_line(console, f"each line: {each} queries, with the name of the first", style="dim")
        print_line(console, _legend(plain), style="dim")
        for line in pattern_lines(pattern, passage.tokens, width=width, plain=plain):
            print_line(console, line)
        console.print(attended_table(pattern, passage.tokens))


def _portraits(
    request: ModelRequest, models: LastModel, given: Document | None, *, out: Path, folder: Path, progress: Progress
) -> Portraits | str:
    """Return portraits of a finished run in ``out``, else of a short measurement; or why there are none.

    What is measured on a prompt is kept in ``folder``: in ``out``, other commands would find it.
    """
    from wherewhat.models.loaded import max_positions
    from wherewhat.report.attention_view import Portraits, heads_run
    from wherewhat.runs.execution import run
    from wherewhat.runs.results import StoredRun

    finished = heads_run(out, models.loaded(request))
    if finished is not None:
        return Portraits.of(finished, where="Measured earlier")
    progress.say("measuring all heads on this text")
    if given is None:
        tokens = min(_MEASURED_TOKENS, max_positions(models.loaded(request).model)[0] or _MEASURED_TOKENS)
        asked = Request("heads", model=request, documents=1, tokens=tokens, options=_MEASURED)
    else:
        asked = Request("heads", model=request, texts=(given,), options=_MEASURED)
    try:
        directory = run(asked, out=out if given is None else folder, progress=progress, models=models)
    except (ConfigError, MeasureError, TextError) as error:  # a prompt or a model of a few tokens
        return str(error)
    return Portraits.of(StoredRun(directory), where="Measured now")


def _legend(plain: bool) -> str:
    """Return the least weight of every character."""
    shades = (_PLAIN_SHADES if plain else _SHADES)[1:]
    least = ((number + 0.5) / len(shades) for number in range(len(shades)))
    return ", ".join(f"{shade} from {x * x:.0%}" for shade, x in zip(shades, least, strict=True))


def token_label(token: str, *, most: int = _LABEL - 1) -> str:
    """Return a token on one line: printable, with visible spaces, cut to ``most`` columns."""
    label = printable(token.replace("\n", "⏎").replace(" ", "·"))
    return label if cell_len(label) <= most else f"{set_cell_size(label, most - 1).rstrip()}…"


def _cells(n: int, width: int) -> int:
    """Return the number of keys in a column of a pattern of ``n`` tokens; a line has twice as many queries."""
    return -(-n // max(1, width - _LABEL))


def pattern_lines(weights: Tensor, tokens: Sequence[str], *, width: int, plain: bool = False) -> list[str]:
    """Return a pattern ``(n, n)`` drawn with characters: a line for two queries, a column for each key.

    A character stands for several cells where there are too many, and shows the largest. Each line begins with its
    first query.
    """
    import torch

    n = len(weights)
    step = _cells(n, width)
    pooled = torch.nn.functional.max_pool2d(
        weights[None].double(), (2 * step, step), stride=(2 * step, step), ceil_mode=True
    )[0]
    shades = _PLAIN_SHADES if plain else _SHADES
    levels = (pooled.clamp(0, 1).sqrt() * (len(shades) - 1)).round().int().tolist()
    lines = []
    for row, codes in enumerate(levels):
        # Keys after the last query of the row do not exist.
        last = min(n - 1, 2 * step * (row + 1) - 1) // step
        drawn = "".join(shades[code] for code in codes[: last + 1])
        label = token_label(tokens[2 * step * row])
        lines.append(f"{' ' * (_LABEL - 1 - cell_len(label))}{label} {drawn}".rstrip())
    return lines


def attended_table(weights: Tensor, tokens: Sequence[str]) -> Table:
    """Return the queries whose attention to one key stands out most, and the last one, with their most attended keys.

    Attention stands out where it exceeds the mean of all queries that see the key, so that a key to which all queries
    attend counts little.
    """
    import torch

    n = len(weights)
    mean = weights.sum(0) / torch.arange(n, 0, -1, dtype=weights.dtype)
    excess = (weights - mean).tril().amax(-1)
    excess[0] = -1  # the first token has no other key
    chosen = sorted({*excess.topk(min(_QUERIES - 1, n)).indices.tolist(), n - 1})
    table = Table(caption=f"The queries whose attention to a key stands out most, and the last of {n} tokens.")
    table.add_column("query", justify="right")
    table.add_column("its attention: key (tokens back), share")
    for query in chosen:
        shares, keys = weights[query].topk(min(_KEYS, query + 1))
        listed = (
            f"{token_label(tokens[key])} ({query - key}) {share:.0%}"
            for share, key in zip(shares.tolist(), keys.tolist(), strict=True)
            if share >= 0.005
        )
        table.add_row(escape(token_label(tokens[query])), escape("   ".join(listed)))
    return table
