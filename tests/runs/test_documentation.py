"""Identity: the documented columns and files are those of the schema."""

import re
from pathlib import Path

from helpers.runs import complete_run
from wherewhat.runs.schema import COLUMNS, SCHEMA_VERSION

PAGE = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")


def test_documented_columns_are_the_schema():
    header = "| column | type | null | key | meaning |\n|---|---|---|---|---|\n"
    rows = PAGE.split(header)[1].split("\n\n")[0].splitlines()
    yes_no = {True: "yes", False: "no"}
    assert rows == [
        f"| `{c.name}` | {c.type} | {yes_no[c.nullable]} | {yes_no[c.key]} | {c.meaning} |" for c in COLUMNS
    ]
    assert f"Schema version {SCHEMA_VERSION}," in PAGE
    assert f'"wherewhat.schema": {SCHEMA_VERSION}}}' in PAGE


def test_documented_files_are_those_of_a_run(tmp_path):
    run, _ = complete_run(tmp_path)
    table = PAGE.split("| file | what it holds |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+?)/?` \|", table, flags=re.MULTILINE)) == {
        path.name for path in run.path.iterdir()
    }
