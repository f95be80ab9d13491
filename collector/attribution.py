"""Calling attribution: what it is given of an instance (a Context), and rows with its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.context import Attribute, Context
from phasewise.collector.registry import Registry
from phasewise.collector.requests import ATTRIBUTED, FULL_SCHEMA
from phasewise.collector.scope import Scope
from phasewise.collector.store import Transaction

_KEPT_BY_WRITER = ("request_key", "revision", "final")
_NO_ROWS = pl.DataFrame(schema=FULL_SCHEMA)
_NULLS = {name: pl.lit(None, dtype=kind).alias(name) for name, kind in FULL_SCHEMA.items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """told: request_key and the columns attribution sets; model: what it takes for the model of targets that name none."""

    told: pl.DataFrame
    model: str | None

    @property
    def columns(self) -> list[str]:
        return self.told.columns[1:]


def typed(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of `requests` with exactly the columns and types of the record."""
    if rows.is_empty():
        return _NO_ROWS
    known = rows.schema
    others = {name: pl.col(name).cast(kind) for name, kind in FULL_SCHEMA.items() if known.get(name, kind) != kind}
    if not others and known.names() == _NO_ROWS.columns:
        return rows
    absent = [null for name, null in _NULLS.items() if name not in known]
    return rows.with_columns([*absent, *others.values()]).select(_NO_ROWS.columns)


def ask(attribute: Attribute, registry: Registry, instance: str, scope: Scope, keys: pl.Series) -> Answer:
    """What attribution says of the targets `keys`, all of them in the scope."""
    models = scope.samples["model"].drop_nulls().unique()
    sole = str(models[0]) if len(models) == 1 else None
    answer = attribute(
        Context(
            instance=instance,
            engine=_engine_of(scope.rows),
            requests=_with_model(scope.rows, keys, sole),
            samples=scope.samples,
            steps=scope.steps,
            targets=keys,
            settings=registry.settings(instance, scope.start_unix_ns, scope.end_unix_ns) if instance else {},
        )
    )
    names = [name for name in answer.columns if name in FULL_SCHEMA and name not in _KEPT_BY_WRITER]
    told = answer.select("request_key", *(pl.col(name).cast(FULL_SCHEMA[name]) for name in names))
    return Answer(told.sort("request_key"), sole)


def attributed_first(rows: pl.DataFrame, answers: Mapping[str, Answer]) -> pl.DataFrame:
    """New rows, not stored yet, with their first attribution as far as there are answers (by instance); the others as they are."""
    if not answers:
        return rows
    told = pl.concat([answer.told for answer in answers.values()], how="diagonal")
    filled = rows.drop(told.columns[1:]).join(told, on="request_key", how="inner", maintain_order="left")
    others = [] if filled.height == rows.height else [rows.join(told, on="request_key", how="anti")]
    soles = {name: answer.model for name, answer in answers.items() if answer.model is not None}
    if soles:
        sole = pl.col("instance").fill_null("").replace_strict(soles, default=None, return_dtype=pl.String)
        filled = _noting_model(filled, sole)
    filled = filled.with_columns(pl.lit(0, dtype=pl.Int64).alias("revision")).select(list(FULL_SCHEMA))
    return pl.concat([filled, *others])


def finished(transaction: Transaction, instance: str, answer: Answer, targets: pl.DataFrame) -> pl.DataFrame:
    """The targets, all rows of an instance in their time and none of them final yet, with what has to be set as they become so. That
    is most rows once, and most of their columns change: nothing is compared but columns that are the same for all of them."""
    rows = _beside(targets.select("row", "request_key", "finished_unix_ns"), answer.told)
    alike = [name for name in answer.columns if _is_constant(rows[name])]
    if not alike:
        return rows
    same = transaction.query(
        f"SELECT {', '.join(f'bool_and({name} IS NOT DISTINCT FROM ?) AS {name}' for name in alike)} FROM requests "
        "WHERE coalesce(instance, '') = ? AND finished_unix_ns BETWEEN ? AND ?",
        [*(rows[name][0] for name in alike), instance, rows["finished_unix_ns"].min(), rows["finished_unix_ns"].max()],
    )
    return rows.drop(name for name in alike if same[name].item())


def names_models(answer: Answer, rows: pl.DataFrame) -> bool:
    """Whether any of the rows in sight may get its model from its replica's samples."""
    return answer.model is not None and rows["model"].null_count() > 0


def _is_constant(values: pl.Series) -> bool:
    nothing = values.null_count()
    return nothing == len(values) or (not nothing and bool(values.min() == values.max()))


def _beside(targets: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """Targets and what is told of them; both name each key once, so a join is needed only where some are not told of."""
    own = targets.sort("request_key")
    if own["request_key"].equals(told["request_key"]):
        return own.hstack(told.get_columns()[1:])
    return own.join(told.unique("request_key"), on="request_key", how="inner")


def attributed(
    transaction: Transaction,
    instance: str,
    answer: Answer,
    targets: pl.DataFrame,
    final: bool,
    counted: Collection[str] = (),
) -> list[pl.DataFrame]:
    """Of the targets (row, request_key, finished_unix_ns), which are all stored, those whose attribution says something else now:
    their place, key, time and what is to be set in the store, `revision` counted on, `final` if so. A column that is the same for
    all rows of a frame is left out of it; rows that only become final are a frame of their own.

    counted: keys of rows whose revision counts what changed in them already.
    """
    compared = list(dict.fromkeys([*answer.columns, "model", "provenance", "final"]))
    old = _stored_columns(transaction, instance, targets, [*compared, "revision"], final)
    new = _noting_model(old, pl.lit(answer.model, dtype=pl.String)).drop(answer.columns)
    new = new.join(answer.told.unique("request_key"), on="request_key", how="left", maintain_order="left")
    more = pl.lit(1) - pl.col("request_key").is_in(list(counted)).cast(pl.Int64) if counted else pl.lit(1)
    revision = pl.when(pl.col("revision").is_null()).then(pl.lit(0)).otherwise(pl.col("revision") + more)
    new = new.with_columns(pl.col("final").fill_null(False) | final, revision.cast(pl.Int64).alias("revision"))
    changed = {name: old[name].ne_missing(new[name]) for name in compared}
    ripe = changed.pop("final")
    differs = old["revision"].is_null()
    for one in changed.values():
        differs |= one
    told = [name for name, one in changed.items() if one.any()]
    kept = ["row", "request_key", "finished_unix_ns", "revision", "final"]
    return [
        frame
        for frame in (new.filter(differs).select(*kept, *told), new.filter(ripe & ~differs).select(kept))
        if not frame.is_empty()
    ]


def _engine_of(rows: pl.DataFrame) -> str | None:
    """The engine of the newest row that names one."""
    known = rows.select("engine", "arrival_unix_ns", "request_key").drop_nulls("engine")
    newest = known.filter(pl.col("arrival_unix_ns") == pl.col("arrival_unix_ns").max()).sort("request_key")
    return str(newest["engine"][-1]) if len(newest) else None


def _with_model(rows: pl.DataFrame, keys: pl.Series, sole: str | None) -> pl.DataFrame:
    """Targets whose span names no model get that of their replica's samples, if those agree on one."""
    if sole is None or not rows["model"].null_count():
        return rows
    lacking = pl.col("model").is_null() & pl.col("request_key").is_in(keys.implode())
    return rows.with_columns(pl.when(lacking).then(pl.lit(sole)).otherwise("model").alias("model"))


def _noting_model(rows: pl.DataFrame, sole: pl.Expr) -> pl.DataFrame:
    """The same in what is stored of them, with where the model is from."""
    if not rows["model"].null_count():
        return rows
    lacking = pl.col("model").is_null() & sole.is_not_null()
    noted = pl.col("provenance").fill_null("{}").str.strip_suffix("}")
    comma = pl.when(noted == "{").then(pl.lit("")).otherwise(pl.lit(","))
    provenance = noted + comma + pl.lit('"model":"inferred:samples"}')
    return rows.with_columns(
        pl.when(lacking).then(provenance).otherwise("provenance").alias("provenance"),
        pl.when(lacking).then(sole).otherwise("model").alias("model"),
    )


def _stored_columns(
    transaction: Transaction, instance: str, targets: pl.DataFrame, names: Sequence[str], whole: bool
) -> pl.DataFrame:
    """Key, time, place in the table (`row`) and some other columns of stored rows of an instance (row, finished_unix_ns). whole: they
    are all of their time, so none has to be looked for."""
    chosen = "TRUE" if whole else "rowid IN (SELECT row FROM wanted)"
    found = transaction.query(
        f"SELECT rowid AS row, {', '.join(names)} FROM requests WHERE coalesce(instance, '') = ? "
        f"AND finished_unix_ns BETWEEN ? AND ? AND {chosen}",
        [instance, targets["finished_unix_ns"].min(), targets["finished_unix_ns"].max()],
        wanted=targets.select("row"),
    ).select("row", *(pl.col(name).cast(FULL_SCHEMA[name]) for name in names))
    own = targets.select("row", "request_key", "finished_unix_ns")
    return own.join(found, on="row", how="inner", maintain_order="left")


def without_attribution(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of normalization with the columns attribution will fill, all unknown."""
    return typed(rows.drop(ATTRIBUTED, strict=False).with_columns(pl.lit(False).alias("final")))
