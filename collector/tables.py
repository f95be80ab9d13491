"""The tables of the store: which exist, their columns, and how a file of an older release is brought up to date."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phasewise.collector import records
from phasewise.rules.vocabulary import CAUSE_COLUMNS

SCHEMA_VERSION = 2  # 2: sealed hours, and the cold files they stand in
ROLLUP_SUMS = ("e2e", "ttft", "queue", "context", "prefill", "first_token", "decode", "external")
ROLLUP_HISTOGRAMS = ("e2e", "ttft", "tpot", "queue")
GAMMA = 1.02  # bucket b holds values in [GAMMA^b, GAMMA^(b+1)): 1 % off at the middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A stored verdict with the window it was made for and everything it rests on."""

    finding: str
    created_unix_ns: int
    from_unix_ns: int
    to_unix_ns: int
    verdict: str  # JSON
    inputs: str | None = None  # JSON: filters, objectives, counts
    rules_version: str | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPosition:
    """Where a reader of the journal stands; committed in the transaction of the rows it made."""

    name: str
    position: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Something that happened, how often: duplicates, unmapped spans by scope, refused lines."""

    name: str
    label: str = ""
    value: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A span seen lately, so that a resend changes nothing. 64-bit hashes; content tells a conflicting duplicate."""

    span: int
    trace: int
    content: int
    received_unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedHour:
    """An hour (whole hours since 1970) that has been moved to the cold tier, and what became of it since."""

    hour: int
    generation: int  # how often it was written
    state: str  # sealed: in cold_files; thawed: back in the hot tables; expired: deleted, only its rollups are left
    sealed_unix_ns: int
    thawed_unix_ns: int | None = None
    received_unix_ns: int | None = None  # the last receipt of a row in it: retention counts from here
    rows: int = 0
    expired_unix_ns: int | None = (
        None  # when rows of it were deleted first: its hourly rollup tells more than rows do, for good
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdFile:
    """A Parquet file of the cold tier whose rows readers see."""

    kind: str
    hour: int
    path: str  # relative to DIR/cold
    rows: int
    bytes: int
    crc32c: int
    columns: str  # names, sorted, with commas
    low_unix_ns: int  # first and last time of its rows
    high_unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgedRow:
    """A request that a purge deletes, until no byte of it is left; `hour`: of its end (whole hours since 1970)."""

    request_key: str
    trace_id: str | None = None
    hour: int


def _rollups() -> str:
    sums = [f'"{name}_ns" HUGEINT' for name in ROLLUP_SUMS]
    causes = [f'"{column.removesuffix("_s")}_ns" HUGEINT' for column in CAUSE_COLUMNS]
    histograms = [f'"{name}_histogram" MAP(INTEGER, UBIGINT)' for name in ROLLUP_HISTOGRAMS]
    shape = ['"input_log2" BIGINT', '"output_log2" BIGINT']
    keys = [
        '"width_s" BIGINT',
        '"bucket_unix_ns" BIGINT',
        *shape,
        *(f'"{name}" VARCHAR' for name in ("model", "instance", "cause", "outcome")),
    ]
    counts = [f'"{name}" BIGINT' for name in ("requests", "input_tokens", "output_tokens", "preemptions")]
    return ", ".join([*keys, *counts, *sums, *causes, *histograms])


def _columns(record: type) -> str:
    return records.duckdb_columns(record)


def _plain(columns: str, names: tuple[str, ...]) -> str:
    """These columns as they are in the file. Ids are random digits: trying to compress them takes half the time of a checkpoint,
    and makes a hot row a third smaller; cold rows are compressed whatever it takes."""
    for name in names:
        columns = re.sub(rf'("{name}" \w+)', r"\1 USING COMPRESSION uncompressed", columns)
    return columns


TABLES: Mapping[str, str] = MappingProxyType(
    {
        "requests": _plain(_columns(records.Request), ("request_key", "call_key", "trace_id", "span_id", "request_id")),
        "turns": _columns(records.Turn),
        "engine_steps": _columns(records.EngineStep),
        "engine_samples": _columns(records.EngineSample),
        "gpu_samples": _columns(records.GpuSample),
        "places": _columns(records.Place),
        "instances": _columns(records.Instance),
        "rollups": _rollups(),
        "runs": _columns(records.Run),
        "annotations": _columns(records.Annotation),
        "findings": _columns(Finding),
        "positions": _columns(StoredPosition),
        "counters": _columns(Counter),
        "span_ledger": _columns(LedgerEntry).replace("BIGINT", "UBIGINT", 3),
        "supplements": _columns(records.Request),
        "sealed_hours": _columns(SealedHour),
        "cold_files": _columns(ColdFile),
        "purging": _columns(PurgedRow),
    }
)
# Files of older releases get the columns they lack; these records say which.
RECORDS: Mapping[str, type] = MappingProxyType(
    {
        "requests": records.Request,
        "turns": records.Turn,
        "engine_steps": records.EngineStep,
        "engine_samples": records.EngineSample,
        "gpu_samples": records.GpuSample,
        "places": records.Place,
        "instances": records.Instance,
        "runs": records.Run,
        "annotations": records.Annotation,
        "findings": Finding,
        "supplements": records.Request,
    }
)
