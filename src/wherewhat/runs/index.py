"""All scores of a store in one table, kept in ``index.parquet``."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from wherewhat.errors import StoreError
from wherewhat.files import canonical_json, open_regular, parse_object
from wherewhat.measures.measurement import categories_of, measurements
from wherewhat.runs.directory import COMPLETE, CONFIG, PROVENANCE, SCORES
from wherewhat.runs.identity import software
from wherewhat.runs.schema import SCHEMA_VERSION
from wherewhat.runs.storage import Folder, Place, open_place

if TYPE_CHECKING:
    import polars as pl


_log = logging.getLogger(__name__)

INDEX = "index.parquet"
_OPENED_TOGETHER = 512
_VERSION = "3"
"""Part of every stamp: rows of an index with another one are made again."""

FACTS: dict[str, str] = {
    "run": "str",
    "measurement": "str",
    "model": "str",
    "size": "int",
    "checkpoint": "str",
    "step": "int",
    "weights": "str",
    "encoding": "str",
    "seed": "int",
    "dtype": "str",
    "tokens": "int",
    "documents": "int",
    "text": "str",
    "options": "str",
    "software": "str",
}
"""Facts that runs can be grouped by, and the type of each."""

_CHECKPOINT = re.compile(
    r"^(?:(?:global[-_]?)?step|checkpoint|ckpt|iter(?:ation)?)[-_=]?(\d{1,99})([km]?)(?:[-_.].*)?$", re.I
)
_SIZE = re.compile(r"(?:^|[-_.x])(\d{1,99}(?:\.\d+)?)([kmbt])(?=$|[-_.])", re.I)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def run_facts(name: str, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of one run, by :data:`FACTS`, from the name of its folder, configuration and provenance."""
    extra = provenance.get("extra")
    extra = extra if isinstance(extra, Mapping) else {}
    model, checkpoint = _model(config, extra)
    text = provenance.get("text_hash")
    return {
        "run": name,
        "measurement": _text(config.get("measurement")),
        "model": model,
        "size": stated_size(model or "") if (parameters := _integer(extra.get("parameters"))) is None else parameters,
        "checkpoint": checkpoint,
        "step": None if checkpoint is None else training_step(checkpoint),
        "weights": _text(config.get("weights")),
        "encoding": _text(extra.get("encoding") or config.get("encoding")),
        "seed": _integer(config.get("seed")),
        "dtype": _text(config.get("dtype")),
        "tokens": _integer(config.get("tokens")),
        "documents": len(documents) if isinstance(documents := config.get("documents"), list) else None,
        "text": text[:12] if isinstance(text, str) else None,
        "options": canonical_json(options) if isinstance(options := config.get("options"), Mapping) else None,
        "software": software(config),
    }


def training_step(checkpoint: str) -> int | None:
    """Return the step in the name of a checkpoint: 1000 in ``step1000``, ``checkpoint-1000`` or ``global_step1k``."""
    match = _CHECKPOINT.match(PurePosixPath(checkpoint).name)
    return None if match is None else _integer(int(match[1]) * _FACTORS[match[2].lower()])


def stated_size(model: str) -> int | None:
    """Return the number of parameters in a model's name: 160,000,000 in ``pythia-160m``."""
    match = _SIZE.search(model)
    return None if match is None else _integer(round(float(match[1]) * _FACTORS[match[2].lower()]))


def _model(config: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return model and checkpoint. A folder named after a step belongs to the model of its parent folder."""
    name = _text(config.get("model"))
    asked = _text(extra.get("checkpoint"))
    if asked is not None:
        return name, asked
    if name is not None and training_step(name) is not None:
        parent = PurePosixPath(str(extra.get("spec") or "").replace("\\", "/")).parent.name
        return parent or name, name
    return name, _text(extra.get("revision"))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


@dataclass
class Indexed:
    """The scores of a store.

    Attributes:
        values: One row per run, metric and document, read on collection.
        unreadable: Why a finished run cannot be read, by name.
    """

    values: pl.LazyFrame
    unreadable: dict[str, str] = field(default_factory=dict)


def open_index(address: str) -> Indexed:
    """Return the scores of the store at an address, after updating its index."""
    import polars as pl

    place = open_place(address)
    if isinstance(place, Folder) and not place.path.is_dir():
        raise StoreError(f"there is no store at {address}: give a folder that holds run directories")
    stamps = _finished(place)
    known = _read(place)
    old: dict[str, str] = {} if known is None else dict(known.select("run", "stamp").unique().collect().iter_rows())
    same = {name for name, stamp in old.items() if stamps.get(name) == stamp}
    new = [name for name in stamps if name not in same]
    if known is not None and not new and len(same) == len(old):
        return Indexed(known)
    rows, unreadable = _condense(place, new, stamps)
    table = rows if known is None else pl.concat([known.filter(pl.col("run").is_in(same)).collect(), rows])
    _write(place, table)
    return Indexed(table.lazy(), unreadable)


def schema() -> dict[str, Any]:
    """Return the columns of the index."""
    import polars as pl

    types = {"str": pl.String, "int": pl.Int64}
    facts = {name: types[kind] for name, kind in FACTS.items()}
    return {**facts, "stamp": pl.String, "metric": pl.String, "document": pl.String, "value": pl.Float64}


def _finished(place: Place) -> dict[str, str]:
    """Return finished runs by name, with a stamp that changes when one is written again."""
    if isinstance(place, Folder):
        stamps = {}
        for name in place.names(""):
            try:
                seal = (place.path / name / COMPLETE).stat()
            except OSError:
                continue  # an unfinished run, or no run at all
            stamps[name] = f"{seal.st_mtime_ns}-{seal.st_size}-{_VERSION}"
        return stamps
    names = [name for name in place.names("") if name not in (INDEX, "sweeps")]
    # The name ends in the hash of the configuration, so a finished run does not change.
    return {path.rpartition("/")[0]: _VERSION for path in place.read_many(f"{name}/{COMPLETE}" for name in names)}


def _read(place: Place) -> pl.LazyFrame | None:
    """Return the stored index; None if there is none or it cannot be used."""
    import polars as pl

    try:
        if isinstance(place, Folder):
            path = place.path / INDEX
            table = pl.scan_parquet(path, glob=False) if path.is_file() else None
        else:
            content = place.read(INDEX)
            table = None if content is None else pl.read_parquet(io.BytesIO(content)).lazy()
        if table is None or dict(table.collect_schema()) != schema():
            return None
        return table.collect().lazy()  # decoded here, since pages can be damaged although the schema is not
    except (pl.exceptions.PolarsError, OSError):
        return None  # damaged or another format: it is made again


def _write(place: Place, table: pl.DataFrame) -> None:
    buffer = io.BytesIO()
    table.write_parquet(buffer, compression="zstd")
    try:
        place.write(INDEX, buffer.getvalue())
    except StoreError as error:
        _log.info("the index is not stored: %s", error)  # a read-only store can be compared too


def _condense(place: Place, names: Sequence[str], stamps: dict[str, str]) -> tuple[pl.DataFrame, dict[str, str]]:
    """Return rows of the index for some runs, and add those that cannot be read to the second value."""
    import polars as pl

    tables = [pl.DataFrame(schema=schema())]
    unreadable: dict[str, str] = {}
    for start in range(0, len(names), _OPENED_TOGETHER):
        batch = names[start : start + _OPENED_TOGETHER]
        facts = _facts(place, batch, unreadable)
        values = _values(place, list(facts), unreadable)
        rows = [{**row, "stamp": stamps[name]} for name, row in facts.items()]
        described = pl.DataFrame(rows, schema={name: schema()[name] for name in (*FACTS, "stamp")})
        tables.append(described.join(values, on="run").select(list(schema())))
    return pl.concat(tables), unreadable


def _facts(place: Place, names: Sequence[str], unreadable: dict[str, str]) -> dict[str, dict[str, Any]]:
    contents = place.read_many(f"{name}/{file}" for name in names for file in (COMPLETE, CONFIG, PROVENANCE))
    facts = {}
    for name in names:
        seal, config, provenance = (
            parse_object(contents.get(f"{name}/{file}", b"")) for file in (COMPLETE, CONFIG, PROVENANCE)
        )
        if (seal or {}).get("schema") != SCHEMA_VERSION:
            version = f"schema version {(seal or {}).get('schema')}, not {SCHEMA_VERSION}"
            unreadable[name] = f"it was written by another version of wherewhat ({version}): run its command again"
        elif config is None or provenance is None:
            unreadable[name] = f"{CONFIG if config is None else PROVENANCE} is missing or damaged"
        elif "measurement" in config:  # other runs, such as trainings of the laboratory, have no score table
            facts[name] = run_facts(name, config, provenance)
    return facts


def _values(place: Place, names: Sequence[str], unreadable: dict[str, str]) -> pl.DataFrame:
    """Return the mean over heads and layers by run, metric and document."""
    import polars as pl

    if isinstance(place, Folder) and names:
        paths = {str(place.path / name / SCORES): name for name in names}
        try:
            for path in paths:
                open_regular(Path(path)).close()  # polars would wait for the writer of a pipe

            # All files at once, in parallel; if that fails, one by one, to find the damaged ones.
            table = _means(pl.scan_parquet(list(paths), include_file_paths="run", glob=False)).collect()
            return table.with_columns(pl.col("run").replace_strict(paths, return_dtype=pl.String))
        except (pl.exceptions.PolarsError, OSError):
            pass
    tables = []
    for name in names:
        content = place.read(f"{name}/{SCORES}")
        try:
            if content is None:
                raise OSError("it is missing")
            tables.append(_means(pl.read_parquet(io.BytesIO(content)).lazy().with_columns(run=pl.lit(name))).collect())
        except (pl.exceptions.PolarsError, OSError) as error:
            unreadable[name] = f"{SCORES} cannot be read ({(str(error).splitlines() or ['damaged'])[0][:120]})"
    empty = pl.DataFrame(schema={name: schema()[name] for name in ("run", "metric", "document", "value")})
    return pl.concat([empty, *tables])


def _means(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Return means over heads and layers; of a category the share of each of its values, such as ``label=sink``."""
    import polars as pl

    strings = [pl.col(name).cast(pl.String) for name in ("run", "measurement", "metric", "document", "category")]
    defined = rows.select(*strings, "value").filter(pl.col("value").is_not_null())
    # A category that no head has is known only from the measurement; those of an unknown one are named in the rows.
    declared = pl.LazyFrame(
        [
            {"measurement": name, "metric": metric, "wanted": category}
            for name, measurement in measurements().items()
            for metric, categories in categories_of(measurement).items()
            for category in categories
        ],
        schema={"measurement": pl.String, "metric": pl.String, "wanted": pl.String},
    )
    named = defined.filter(pl.col("category").is_not_null())
    seen = named.select("measurement", "metric", wanted=pl.col("category"))
    pair = ["measurement", "metric"]
    categories = pl.concat([declared, seen]).unique()
    shares = named.join(categories, on=pair).with_columns(
        metric=pl.format("{}={}", "metric", "wanted"),
        value=(pl.col("category") == pl.col("wanted")).cast(pl.Float64),
    )
    columns = ["run", "metric", "document", "value"]
    both = pl.concat([defined.join(categories, on=pair, how="anti").select(columns), shares.select(columns)])
    return both.group_by("run", "metric", "document").agg(pl.col("value").mean())
