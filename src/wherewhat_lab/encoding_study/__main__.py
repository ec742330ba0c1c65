"""``python -m wherewhat_lab.encoding_study``: run the study without typer, pyarrow and plotly."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wherewhat.errors import WherewhatError
from wherewhat_lab.encoding_study.recipe import EncodingRecipe, read_recipe
from wherewhat_lab.encoding_study.study import run_study


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return the exit code: 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser("python -m wherewhat_lab.encoding_study", description=__doc__)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/encodings"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(arguments)
    try:
        run_study(
            EncodingRecipe() if options.recipe is None else read_recipe(options.recipe),
            out=options.out,
            text=options.text,
            device=options.device,
            only=tuple(options.only),
            keep=options.keep,
            finished=_say,
        )
    except WherewhatError as error:
        sys.stderr.write(f"wherewhat: {' '.join(str(error).split())}\n")
        return 2
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
