"""Figures and tables as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from wherewhat.errors import ConfigError, StoreError
from wherewhat.store.atomic import make_folder, write_file

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from wherewhat.store import RunDirectory

PICTURES = ("png", "svg", "pdf", "html")
TABLES = ("csv", "parquet")


def ending(path: Path) -> str:
    """The ending of a file that can be written here.

    Raises:
        ConfigError: If it is none of them.
    """
    found = path.suffix.lower().lstrip(".")
    if found not in PICTURES + TABLES:
        raise ConfigError(f"{path.name} does not say what to write: end it in .{', .'.join(PICTURES + TABLES)}")
    return found


def save_figure(figure: Figure, path: Path, *, width: int = 900, height: int = 560, scale: float = 2.0) -> Path:
    """Write a figure, whole or not at all.

    Args:
        figure: The figure.
        path: A file that ends in .png, .svg, .pdf or .html (which opens offline).
        width: Width in pixels.
        height: Height in pixels.
        scale: Pixels for each of these in a PNG.

    Raises:
        ConfigError: If the ending is another, or what draws pictures is not installed.
        StoreError: If the file cannot be written.
    """
    kind = ending(path)
    if kind in TABLES:
        raise ConfigError(f"{path.name} is a table's name: end it in .{', .'.join(PICTURES)}")
    if kind == "html":
        content = figure.to_html(include_plotlyjs=True, full_html=True).encode()
    else:
        if importlib.util.find_spec("kaleido") is None:
            raise ConfigError(
                f".{kind} files need the package 'kaleido': pip install 'wherewhat[figures]', or use .html"
            )
        try:
            content = figure.to_image(format=kind, width=width, height=height, scale=scale)
        except (RuntimeError, ValueError, OSError) as error:  # kaleido could not start a browser
            line = str(error).strip().splitlines()
            raise ConfigError(
                f"cannot draw {path.name}: {line[0] if line else type(error).__name__}; install Chrome or Chromium, or "
                "use .html"
            ) from None
    return _write(path, content)


def save_table(directory: RunDirectory, path: Path) -> Path:
    """Write a run's scores, one line for each number.

    Args:
        directory: A finished run.
        path: A file that ends in .csv or .parquet.

    Raises:
        ConfigError: If the ending is another.
        StoreError: If the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    kind = ending(path)
    if kind in PICTURES:
        raise ConfigError(f"{path.name} is a picture's name: end it in .{', .'.join(TABLES)}")
    table = directory.scores()
    sink = pa.BufferOutputStream()
    if kind == "csv":
        pyarrow.csv.write_csv(table, sink)
    else:
        pyarrow.parquet.write_table(table, sink)
    return _write(path, sink.getvalue().to_pybytes())


def _write(path: Path, content: bytes) -> Path:
    if path.is_dir():
        raise StoreError(f"cannot write {path}: it is a folder")
    make_folder(path.parent)
    write_file(path, content)
    return path
