"""Calling attribution: what it is given of an instance (a Context), and rows with its answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.context import Attribute, Context
from phasewise.collector.registry import Registry
from phasewise.collector.requests import ATTRIBUTED, FULL_SCHEMA
from phasewise.collector.scope import Scope
from phasewise.collector.transaction import Transaction

_KEPT_BY_WRITER = ("request_key", "revision", "final")
_NO_ROWS = pl.DataFrame(schema=FULL_SCHEMA)
_NO_MODELS = pl.DataFrame(schema={"request_key": pl.String, "sole": pl.String})
_NULLS = {name: pl.lit(None, dtype=kind).alias(name) for name, kind in FULL_SCHEMA.items()}


@dataclass(frozen=True, slots=True)
class Question:
    """targets: keys of the rows of an instance that attribution is asked about, all of them in the scope."""

    instance: str
    scope: Scope
    targets: pl.Series

    @property
    def model(self) -> str | None:
        """What is taken for the model of targets that name none: that of their replica's samples, if those agree on one."""
        if self.scope.samples.is_empty():
            return None
        models = self.scope.samples["model"].drop_nulls().unique()
        return str(models[0]) if len(models) == 1 else None


@dataclass(frozen=True, slots=True)
class Answer:
    """told: request_key and the columns attribution sets, in order of the keys; models: request_key and `sole`, what is taken for the
    model of targets that name none."""

    told: pl.DataFrame
    models: pl.DataFrame

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


def ask(attribute: Attribute, registry: Registry, questions: Sequence[Question]) -> Answer:
    """What attribution says of some rows of several instances."""
    models = [_lacking_model(one) for one in questions]
    answer = attribute([_context(registry, one, lacking) for one, lacking in zip(questions, models, strict=True)])
    names = [name for name in answer.columns if name in FULL_SCHEMA and name not in _KEPT_BY_WRITER]
    told = answer.select("request_key", *(pl.col(name).cast(FULL_SCHEMA[name]) for name in names))
    return Answer(told.sort("request_key"), pl.concat(models))


def _lacking_model(asked: Question) -> pl.DataFrame:
    """Targets that name no model, with that of their replica's samples; of another time they may tell of another model."""
    rows, model = asked.scope.rows, asked.model
    if model is None or not rows["model"].null_count():
        return _NO_MODELS
    lacking = pl.col("model").is_null() & pl.col("request_key").is_in(asked.targets.implode())
    return rows.filter(lacking).select("request_key", pl.lit(model).alias("sole"))


def _context(registry: Registry, asked: Question, lacking: pl.DataFrame) -> Context:
    scope, name = asked.scope, asked.instance
    return Context(
        instance=name,
        requests=scope.rows if lacking.is_empty() else _with_model(scope.rows, lacking),
        samples=scope.samples,
        steps=scope.steps,
        targets=asked.targets,
        settings=registry.settings(name, scope.start_unix_ns, scope.end_unix_ns) if name else {},
    )


def attributed_first(rows: pl.DataFrame, answers: Sequence[Answer]) -> pl.DataFrame:
    """New rows, not stored yet, with their first attribution as far as there are answers; the others as they are."""
    if not answers:
        return rows
    told = pl.concat([answer.told for answer in answers], how="diagonal")
    beside = rows.select("request_key").join(told, on="request_key", how="inner", maintain_order="left")
    if beside.height > rows.height:  # what is said of a row twice makes no second one
        beside = beside.unique("request_key", keep="first", maintain_order=True)
    others = []
    if beside["request_key"].equals(rows["request_key"]):  # so no other column of so wide rows has to be copied
        filled = rows.with_columns(beside.get_columns()[1:])
    else:
        filled = rows.drop(told.columns[1:]).join(beside, on="request_key", how="inner", maintain_order="left")
        others = [rows.join(told, on="request_key", how="anti")]
    filled = _noting_model(filled, pl.concat([answer.models for answer in answers]))
    filled = filled.with_columns(pl.lit(0, dtype=pl.Int64).alias("revision")).select(list(FULL_SCHEMA))
    return pl.concat([filled, *others])


def finished(transaction: Transaction, answer: Answer, targets: pl.DataFrame) -> pl.DataFrame:
    """The targets, none of them final yet, with what has to be set as they become so. That is most rows once, and most of their columns
    change: nothing is compared but columns that are the same for all of them."""
    rows = _beside(targets.select("row", "request_key", "finished_unix_ns"), answer.told)
    alike = [name for name in answer.columns if _is_constant(rows[name])]
    if not alike:
        return rows
    same = transaction.query(
        f"SELECT {', '.join(f'bool_and({name} IS NOT DISTINCT FROM ?) AS {name}' for name in alike)} FROM requests r "
        "SEMI JOIN wanted w ON r.rowid = w.row WHERE finished_unix_ns BETWEEN ? AND ?",
        [*(rows[name][0] for name in alike), rows["finished_unix_ns"].min(), rows["finished_unix_ns"].max()],
        wanted=rows.select("row"),
    )
    return rows.drop(name for name in alike if same[name].item())


def left_out(answer: Answer, targets: pl.DataFrame) -> int:
    """How many targets (request_key, final) that are not final yet have no row in the answer."""
    return targets.filter(~pl.col("final").fill_null(False)).join(answer.told, on="request_key", how="anti").height


def _is_constant(values: pl.Series) -> bool:
    nothing = values.null_count()
    return nothing == len(values) or (not nothing and bool(values.min() == values.max()))


def _beside(targets: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """Targets and what is told of them: nothing of those that are left out. Both name each key once, so a join is needed only for these."""
    own = targets.sort("request_key")
    if own["request_key"].equals(told["request_key"]):
        return own.hstack(told.get_columns()[1:])
    return own.join(told.unique("request_key"), on="request_key", how="left", maintain_order="left")


def attributed(
    transaction: Transaction, answer: Answer, targets: pl.DataFrame, final: bool, counted: Collection[str] = ()
) -> list[pl.DataFrame]:
    """Of the targets (row, request_key, finished_unix_ns), which are all stored, those whose attribution says something else now:
    their place, key, time and what is to be set in the store, `revision` counted on, `final` if so. A column that is the same for
    all rows of a frame is left out of it; rows that only become final are a frame of their own.

    counted: keys of rows whose revision counts what changed in them already.
    """
    compared = list(dict.fromkeys([*answer.columns, "model", "provenance", "final"]))
    old = _stored_columns(transaction, targets, [*compared, "revision"])
    new = _noting_model(old, answer.models).drop(answer.columns)
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


def _with_model(rows: pl.DataFrame, lacking: pl.DataFrame) -> pl.DataFrame:
    """Rows, those that lack a model with what is taken for it."""
    told = rows.join(lacking, on="request_key", how="left", maintain_order="left")
    return told.with_columns(pl.coalesce("model", "sole").alias("model")).drop("sole")


def _noting_model(rows: pl.DataFrame, models: pl.DataFrame) -> pl.DataFrame:
    """The same in what is stored of them, with where the model is from."""
    if models.is_empty():
        return rows
    told = rows.join(models, on="request_key", how="left", maintain_order="left")
    lacking = pl.col("model").is_null() & pl.col("sole").is_not_null()
    noted = pl.col("provenance").fill_null("{}").str.strip_suffix("}")
    comma = pl.when(noted == "{").then(pl.lit("")).otherwise(pl.lit(","))
    provenance = noted + comma + pl.lit('"model":"inferred:samples"}')
    return told.with_columns(
        pl.when(lacking).then(provenance).otherwise("provenance").alias("provenance"),
        pl.coalesce("model", "sole").alias("model"),
    ).drop("sole")


def _stored_columns(transaction: Transaction, targets: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Key, time, place in the table (`row`) and some other columns of stored rows (row, request_key, finished_unix_ns)."""
    found = transaction.query(
        f"SELECT rowid AS row, {', '.join(names)} FROM requests r SEMI JOIN wanted w ON r.rowid = w.row "
        "WHERE finished_unix_ns BETWEEN ? AND ?",
        [targets["finished_unix_ns"].min(), targets["finished_unix_ns"].max()],
        wanted=targets.select("row"),
    ).select("row", *(pl.col(name).cast(FULL_SCHEMA[name]) for name in names))
    own = targets.select("row", "request_key", "finished_unix_ns")
    return own.join(found, on="row", how="inner", maintain_order="left")


def without_attribution(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of normalization with the columns attribution will fill, all unknown."""
    return typed(rows.drop(ATTRIBUTED, strict=False).with_columns(pl.lit(False).alias("final")))
