"""Brute force: the table equals rows sorted in plain Python. Identity: its bytes depend on the rows alone."""

import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.runs import complete_run
from wherewhat.errors import StoreError
from wherewhat.measures.registry import measurements
from wherewhat.runs.schema import (
    COLUMNS,
    KEY_NAMES,
    SCHEMA_VERSION,
    Score,
    ScoreSource,
    encode_scores,
    join_tables,
    read_scores,
    score_table,
)

BASE = {
    "measurement": "entropy",
    "model": "tiny",
    "weights": "trained",
    "seed": 0,
    "metric": "mean",
    "value": 1.0,
    "layer": 0,
    "head": 0,
}


def many_rows(count=400):
    generator = random.Random(0)
    rows = {}
    for _ in range(count):
        layer = generator.choice([None, 0, 2, 10])
        row = Score(
            measurement=generator.choice(["entropy", "kernel"]),
            model=generator.choice(["b", "ä", "a"]),
            weights=generator.choice(["trained", "random"]),
            seed=generator.choice([-1, 0, 2**40]),
            document=generator.choice([None, "Émile", "a/b", "Z"]),
            layer=layer,
            head=None if layer is None else generator.choice([None, 0, 1, 11]),
            metric=generator.choice(["x", "y"]),
            value=generator.choice([None, 0.1, 1e300, float("inf"), -0.0]),
            unit=generator.choice([None, "nat"]),
        )
        rows[tuple(getattr(row, name) for name in KEY_NAMES)] = row
    return list(rows.values())


def as_dict(row):
    return {column.name: getattr(row, column.name) for column in COLUMNS}


def null_last(row):
    return [(value is None, 0 if value is None else value) for value in (getattr(row, n) for n in KEY_NAMES)]


def test_table_is_the_rows_sorted_by_key():
    rows = many_rows()
    assert score_table(rows).to_pylist() == [as_dict(row) for row in sorted(rows, key=null_last)]


def test_bytes_depend_neither_on_order_nor_on_grouping(tmp_path):
    rows = many_rows()
    expected = encode_scores(score_table(rows))
    generator = random.Random(1)
    for cuts in (1, 2, 7):
        generator.shuffle(rows)
        tables = [score_table(rows[i::cuts]) for i in range(cuts)]
        for i, table in enumerate(tables):
            (tmp_path / f"{i}").write_bytes(encode_scores(table))
        joined = join_tables([read_scores(tmp_path / f"{i}") for i in range(cuts)])
        assert encode_scores(joined) == expected


def test_file_is_typed_dictionary_encoded_and_versioned(tmp_path):
    (tmp_path / "scores.parquet").write_bytes(encode_scores(score_table(many_rows())))
    schema = pq.read_schema(tmp_path / "scores.parquet")
    assert schema.metadata[b"wherewhat.schema"] == str(SCHEMA_VERSION).encode()
    for column in COLUMNS:
        field = schema.field(column.name)
        is_string = column.type == "string"
        assert field.type == (pa.dictionary(pa.int32(), pa.string()) if is_string else pa.type_for_alias(column.type))
        assert field.nullable == column.nullable
    assert schema.names == [column.name for column in COLUMNS]
    data = (tmp_path / "scores.parquet").read_bytes()
    created_by = pq.ParquetFile(tmp_path / "scores.parquet").metadata.created_by.encode()
    assert data.count(pa.__version__.encode()) == data.count(created_by) == 1  # no other version is in the bytes
    (tmp_path / "empty").write_bytes(encode_scores(score_table([])))
    assert read_scores(tmp_path / "empty").num_rows == 0


def test_documented_columns_and_files_are_those_of_a_run(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    header = "| column | type | null | key | meaning |\n|---|---|---|---|---|\n"
    rows = page.split(header)[1].split("\n\n")[0].splitlines()
    words = {True: "yes", False: "no"}
    assert rows == [f"| `{c.name}` | {c.type} | {words[c.nullable]} | {words[c.key]} | {c.meaning} |" for c in COLUMNS]
    assert f"Schema version {SCHEMA_VERSION}," in page
    assert f'"wherewhat.schema": {SCHEMA_VERSION}}}' in page
    run, _ = complete_run(tmp_path)
    table = page.split("| file | what it holds |")[1].split("\n\n")[0]
    documented = set(re.findall(r"^\| `([^`]+?)/?` \|", table, flags=re.MULTILINE))
    assert documented == {path.name for path in run.path.iterdir()}


def test_bad_rows_are_refused_in_one_line(subtests):
    for change, words in (
        ({"metric": ""}, "metric is empty"),
        ({"model": None}, "model is empty"),
        ({"document": ""}, "document is empty"),
        ({"seed": None}, "seed is null in 1 rows"),
        ({"seed": 2**63}, "seed is not int64"),
        ({"layer": 2**31}, "layer is not int32"),
        ({"layer": float("nan"), "head": None}, "layer is not int32"),
        ({"layer": -1}, "layer is negative"),
        ({"layer": None}, "a head needs a layer"),
        ({"value": float("nan")}, "value is NaN; use None"),
        ({"unit": "\ud800"}, "unit is not string"),
        ({"metric": 5}, "metric is not string"),
    ):
        with subtests.test(words=words):
            with pytest.raises(StoreError, match=words) as caught:
                score_table([Score(**{**BASE, **change})])
            assert "\n" not in str(caught.value)


def test_two_rows_with_one_key_are_refused_also_with_nulls():
    for place in ({}, {"layer": None, "head": None, "document": None}):
        row = {**BASE, **place}
        with pytest.raises(StoreError, match=r"share one key: measurement='entropy'.*metric='mean'"):
            score_table([Score(**row), Score(**{**row, "value": 2.0})])


def test_heads_writes_one_row_per_head():
    import torch

    source = ScoreSource(measurement="m", model="x", weights="trained", seed=0, document="d")
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    rows = source.heads("mean", values, layer=4, unit="nat")
    assert [(r.head, r.value) for r in rows] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert {(r.layer, r.unit, r.document) for r in rows} == {(4, "nat", "d")}
    assert [row.value for row in source.heads("mean", [None, 2.0], layer=0)] == [None, 2.0]


def test_foreign_and_newer_files_are_refused(tmp_path):
    path = tmp_path / "scores.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(StoreError, match=r"cannot read .*scores\.parquet"):
        read_scores(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(StoreError, match="no wherewhat schema version"):
        read_scores(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"wherewhat.schema": "999"}), path)
    with pytest.raises(StoreError, match="schema version 999, newer than 2 known here: upgrade"):
        read_scores(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"wherewhat.schema": "1"}), path)
    with pytest.raises(StoreError, match="schema version 1, older than 2: run its command again"):
        read_scores(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"wherewhat.schema": "2"}), path)
    with pytest.raises(StoreError, match="columns are not those of schema 2"):
        read_scores(path)
    with pytest.raises(StoreError, match="No such file"):
        read_scores(tmp_path / "missing")


def test_units_of_the_documentation_are_those_that_are_stored():
    (unit,) = (column for column in COLUMNS if column.name == "unit")
    stored = {metric.unit for measurement in measurements().values() for metric in measurement.metrics}
    assert set(re.findall(r"`(\w+)`", unit.meaning)) <= stored
