"""Brute force: the table equals rows sorted in plain Python. Identity: its bytes depend on the rows alone."""

import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.runs import complete_run
from wherewhat.errors import StoreError
from wherewhat.measures.measurement import measurements
from wherewhat.runs.schema import (
    COLUMNS,
    KEY_NAMES,
    SCHEMA_VERSION,
    arrow_schema,
    encode_scores,
    join_tables,
    read_scores,
    score_table,
    stored_scores,
)
from wherewhat.scores import Metric, Scores, stored_metric

SOURCE = {"measurement": "entropy", "model": "ä", "weights": "trained", "seed": 2**40}
DECLARED = (
    stored_metric("x"),
    Metric("y", "y", "", unit="nats"),
    stored_metric("label", categories=("where", "what")),
)


def some_scores(seed):
    """Scores with layers of different sizes and metrics, undefined values and categories."""
    generator = random.Random(seed)

    def number():
        return generator.choice([torch.nan, 0.1, 1e300, -0.0, 7.0])

    layers = []
    for layer in generator.sample([0, 2, 10, 11], 3):
        size = generator.choice([1, 3, 12])
        heads = {
            name: torch.tensor([number() for _ in range(size)], dtype=torch.float64)
            for name in generator.sample("xy", 1)
        }
        if generator.random() < 0.7:
            heads["label"] = torch.tensor([generator.choice([-1.0, 0.0, 1.0]) for _ in range(size)])
        layers.append(Scores(layer=layer, heads=heads, whole={name: number() for name in generator.sample("xy", 1)}))
    generator.shuffle(layers)
    return Scores(layers=layers, whole={"x": number()}).checked(DECLARED, of="entropy")


def rows_of(scores, document):
    """The rows of a table, one after another in plain Python."""
    units = {"x": None, "y": "nats", "label": None}

    def row(layer, head, metric, value):
        value = None if value != value else float(value)
        named = metric == "label" and value is not None and value >= 0
        category = ("where", "what")[int(value)] if named else None
        place = {"document": document, "layer": layer, "head": head, "metric": metric}
        return {**SOURCE, **place, "value": value, "unit": units[metric], "category": category}

    rows = [row(None, None, name, value) for name, value in scores.whole.items()]
    for one in scores.layers:
        rows += [row(one.layer, None, name, value) for name, value in one.whole.items()]
        rows += [row(one.layer, h, name, v) for name, x in one.heads.items() for h, v in enumerate(x.tolist())]
    return rows


def null_last(row):
    return [(row[name] is None, 0 if row[name] is None else row[name]) for name in KEY_NAMES]


def test_table_is_the_rows_sorted_by_key():
    for seed in range(20):
        scores = some_scores(seed)
        expected = sorted(rows_of(scores, "Émile"), key=null_last)
        assert score_table({"Émile": scores}, SOURCE).to_pylist() == expected
    assert score_table({None: Scores()}, SOURCE).num_rows == 0


def test_reading_returns_what_was_written():
    documents = {name: some_scores(seed) for seed, name in enumerate(("a/b", "Z", None))}
    found = stored_scores(score_table(documents, SOURCE))
    assert found.keys() == documents.keys()
    for name, scores in documents.items():
        assert len(found[name].layers) == len(scores.layers)
        for one, other in zip(found[name], scores, strict=True):
            assert one.layer == other.layer
            assert one.heads.keys() == other.heads.keys()
            assert all(torch.equal(x.nan_to_num(5), one.heads[n].nan_to_num(5)) for n, x in other.heads.items())
            assert str(dict(sorted(one.whole.items()))) == str(dict(sorted(other.whole.items())))


KINDS = {"string": pa.string(), **{name: pa.type_for_alias(name) for name in ("int32", "int64", "float64")}}


def test_bytes_depend_neither_on_order_nor_on_grouping(tmp_path):
    documents = {name: some_scores(seed) for seed, name in enumerate(("Émile", "a/b", "Z", "b", None))}
    tables = {name: score_table({name: scores}, SOURCE) for name, scores in documents.items()}
    rows = sorted((row for name, scores in documents.items() for row in rows_of(scores, name)), key=null_last)
    expected = encode_scores(join_tables(list(tables.values())))
    plain = {c.name: pa.array([row[c.name] for row in rows], KINDS[c.type]) for c in COLUMNS}
    assert encode_scores(pa.table(plain).cast(arrow_schema())) == expected  # encoded row by row
    generator, names = random.Random(1), list(documents)
    for cuts in (1, 2, 5):
        generator.shuffle(names)
        for i in range(cuts):
            joined = join_tables([tables[name] for name in names[i::cuts]])
            (tmp_path / f"{i}").write_bytes(encode_scores(joined))
        joined = join_tables([read_scores(tmp_path / f"{i}") for i in range(cuts)])
        assert joined.to_pylist() == rows
        assert encode_scores(joined) == expected


def test_bytes_of_documents_in_one_table_are_those_of_their_joined_tables():
    """With layers of different metrics and sizes, categories, undefined values, and metrics that some do not have."""
    only_label = Scores(layers=[Scores(layer=0, heads={"label": torch.tensor([torch.nan, -1.0, 1.0])})])
    only_whole = Scores(layers=[Scores(layer=3, whole={"y": 2.0})], whole={"label": 1.0})
    others = [scores.checked(DECLARED, of="entropy") for scores in (only_label, only_whole, Scores())]
    names = ("Émile", "a/b", "Z", None, "b", "a")
    for seed in range(30):
        generator = random.Random(seed)
        listed = [*others, *(some_scores(3 * seed + i) for i in range(3))]
        generator.shuffle(listed)
        documents = dict(zip(generator.sample(names, 2 + seed % 5), listed, strict=False))
        joined = join_tables([score_table({name: scores}, SOURCE) for name, scores in documents.items()])
        table = score_table(documents, SOURCE)
        assert table.to_pylist() == joined.to_pylist()
        assert encode_scores(table) == encode_scores(joined)


def test_file_is_typed_dictionary_encoded_and_versioned(tmp_path):
    (tmp_path / "scores.parquet").write_bytes(encode_scores(score_table({"d": some_scores(0)}, SOURCE)))
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
    (tmp_path / "empty").write_bytes(encode_scores(score_table({None: Scores()}, SOURCE)))
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


def test_two_rows_with_one_key_are_refused_also_with_nulls():
    for document in ("d", None):
        table = score_table({document: some_scores(0)}, SOURCE)
        with pytest.raises(StoreError, match=r"share one key: measurement='entropy'.*metric=") as caught:
            join_tables([table, table])
        assert "\n" not in str(caught.value)


def test_names_that_are_not_unicode_are_refused():
    scores = Scores(whole={"\ud800": 1.0}).checked([stored_metric("*")], of="entropy")
    with pytest.raises(StoreError, match="is not valid Unicode: choose another name"):
        score_table({"d": scores}, SOURCE)


def test_foreign_older_and_newer_files_are_refused(tmp_path):
    path = tmp_path / "scores.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(StoreError, match=r"cannot read .*scores\.parquet"):
        read_scores(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(StoreError, match="no wherewhat schema version"):
        read_scores(path)
    for version, words in (
        (999, f"schema version 999, newer than {SCHEMA_VERSION} known here: upgrade"),
        (2, f"schema version 2, older than {SCHEMA_VERSION}: run its command again"),
        (SCHEMA_VERSION, f"columns are not those of schema {SCHEMA_VERSION}"),
    ):
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"wherewhat.schema": str(version)}), path)
        with pytest.raises(StoreError, match=words):
            read_scores(path)
    with pytest.raises(StoreError, match="No such file"):
        read_scores(tmp_path / "missing")


def test_units_of_the_documentation_are_those_that_are_stored():
    (unit,) = (column for column in COLUMNS if column.name == "unit")
    stored = {metric.unit for measurement in measurements().values() for metric in measurement.metrics}
    assert set(re.findall(r"`(\w+)`", unit.meaning)) <= stored


def test_tables_of_documents_are_joined_without_sorting_their_rows(monkeypatch):
    """In any order; rows are sorted only where documents share a table."""
    monkeypatch.setattr("numpy.lexsort", lambda keys: pytest.fail("rows are sorted already"))
    scores = Scores(layers=[Scores(layer=0, heads={"b": torch.tensor([2.0, 1.0]), "a": torch.tensor([0.0, 1.0])})])
    checked = scores.checked([stored_metric("*")], of="test")
    names = ["d10", None, "d9", "d1"]
    table = join_tables([score_table({name: checked}, SOURCE) for name in names])
    assert table["document"].to_pylist() == [x for name in ("d1", "d10", "d9", None) for x in [name] * 4]
    assert table["metric"].to_pylist() == ["a", "b"] * 8
