"""A store with one hour of rows on each of some days, all hot, ready to be sealed and then to grow old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builders import START_UNIX_NS, attributed, make_request, make_sample, record_table, request_table
from rolled import roll_up
from span_tables import span_table
from writing import engine_span

from phasewise.collector.archive import SpanArchive
from phasewise.collector.lake import HOUR_NS, KINDS, Lake
from phasewise.collector.records import EngineSample
from phasewise.collector.retention import DAY_NS
from phasewise.collector.store import Store

DAYS = 5
MONTH = 30  # days
EACH = 6  # rows of a day
FIRST_HOUR = START_UNIX_NS // HOUR_NS


def fill(data: Path, days: int = DAYS) -> None:
    """Requests and samples received when they finished, raw spans beside, a finding."""
    rows, samples = [], []
    for day in range(days):
        for i in range(EACH):
            request = make_request(at_s=day * 86_400 + i * 60, decode_s=1.0 + i, request_key=f"{day * 10 + i:032x}")
            received = {"final": True, "revision": 1, "received_unix_ns": request.finished_unix_ns}
            rows.append(attributed(request) | received)
            samples.append(make_sample(instance="gpu-0:8000", at_s=day * 86_400 + i * 60, running=2.0))
        spans = span_table([engine_span(trace=f"{day + 1:032x}")], received_unix_ns=START_UNIX_NS + day * DAY_NS)
        SpanArchive(data).write(spans, f"s{day}")
    with Store(data / "phasewise.duckdb") as store, store.write() as transaction:
        transaction.insert("requests", request_table(rows))
        transaction.insert("engine_samples", record_table(EngineSample, samples))
        transaction.execute(
            "INSERT INTO findings BY NAME SELECT 'f' AS finding, 0 AS created_unix_ns, 0 AS from_unix_ns, 0 AS to_unix_ns, '{}' AS verdict"
        )
        roll_up(transaction)


def contents(data: Path) -> dict[str, Any]:
    """All that can be seen of it, hot and cold as one, and every file of the cold tier that rows stand in."""
    with Store(data / "phasewise.duckdb") as store:
        lake = Lake(store.cold_directory)
        sealed = {kind: sorted(lake.files(kind)) for kind in KINDS}
        named = {path for kind in KINDS for paths in lake.files(kind).values() for path in paths}
        on_disk = {str(path.relative_to(lake.directory)) for path in lake.directory.glob("*/date=*/hour=*/*.parquet")}
        listed = set(store.query("SELECT path FROM cold_files")["path"])
        assert listed <= named <= on_disk
        return {
            "requests": store.query("SELECT * FROM requests ORDER BY request_key").rows(),
            "samples": store.query("SELECT * FROM engine_samples ORDER BY ALL").rows(),
            "hot": store.query("SELECT count(*) AS n FROM main.requests")["n"].item(),
            "rollups": store.query("SELECT * FROM rollups ORDER BY ALL").rows(),
            "findings": store.query("SELECT count(*) AS n FROM findings")["n"].item(),
            "states": store.query("SELECT hour, state FROM main.sealed_hours ORDER BY hour").rows(),
            "sealed": sealed,
            "visible": len(listed),
            "strays": len(on_disk - named),
            "spans": sorted(path.parent.name for path in (data / "spans").glob("*/*/*.parquet")),
        }
