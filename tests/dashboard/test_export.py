"""`phasewise export` and back: the round trip is exact, through a server or not, whole or a part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import record_table
from overlapping import REQUESTS, lines
from span_tables import at

from phasewise.collector import exchange, span_pages
from phasewise.collector.archive import SpanArchive
from phasewise.collector.exchange_folder import files_of_export
from phasewise.collector.records import Annotation, GpuSample, Place
from phasewise.collector.retention import DAY_NS, Keep, Retention
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.dashboard import cli
from phasewise.dashboard.commands.connection import open_data
from phasewise.dashboard.commands.store_process import StoreService, StoreSettings
from phasewise.rules.errors import InputError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests with turns, samples, steps and a mark."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "traces.jsonl").write_text("\n".join(lines()))
    page = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
    scrapes = [{"unix_ns": at(n), "text": page, "instance": "h:8000"} for n in range(20)]
    (folder / "scrapes.jsonl").write_text("\n".join(map(json.dumps, scrapes)))
    files = [str(folder / name) for name in ("traces.jsonl", "scrapes.jsonl")]
    assert cli.main(["ingest", "--data", str(folder / "data"), *files]) == 0
    with open_data(folder / "data") as local:
        local.writer.annotate([Annotation(unix_ns=at(5), kind="deploy", text="v2 \u2028 =cmd|' /c calc'!A0")])
        steps = {"instance": ["e-1"] * 3, "step": [0, 1, 2], "start_unix_ns": [at(1)] * 3, "duration_s": [0.1] * 3}
        steps |= {"prefill_tokens": [1] * 3, "decode_sequences": [1] * 3}
        devices = [GpuSample(instance="h:9400", device="GPU-0", unix_ns=at(n), host="h", xid=0) for n in range(20)]
        places = [Place(instance="h:9400", host="h"), Place(instance="e-2", pod="p-2")]
        with local.store.write() as transaction:
            transaction.insert("engine_steps", pl.DataFrame(steps))
            transaction.insert("gpu_samples", record_table(GpuSample, devices))
            transaction.insert("places", record_table(Place, places))
    return folder / "data"


def export(data: Path, out: Path, *options: str) -> dict[str, pa.Table]:
    assert cli.main(["export", "--data", str(data), "--out", str(out), *options]) == 0
    return {path.stem: pq.read_table(path) for path in files_of_export(out)}


def ingest(data: Path, *files: Path) -> int:
    return cli.main(["ingest", "--data", str(data), *map(str, files)])


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exchange, "PAGE_ROWS", 7)
    monkeypatch.setattr(span_pages, "_ROWS", 10)
    yield


def test_what_is_exported_and_imported_is_exported_the_same(data: Path, tmp_path: Path, small_pages: None) -> None:
    first = export(data, tmp_path / "a")
    assert {name: table.num_rows for name, table in first.items()} == {
        "instances": 2, "annotations": 1, "requests": REQUESTS, "turns": REQUESTS, "engine_steps": 3, "engine_samples": 20,
        "gpu_samples": 20, "places": 2, "rollups": first["rollups"].num_rows, "spans": 2 * REQUESTS,
    }  # fmt: skip
    assert sum(first["rollups"]["requests"].to_pylist()) == REQUESTS
    assert ingest(tmp_path / "other", tmp_path / "a") == 0
    second = export(tmp_path / "other", tmp_path / "b")
    assert second == first
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("a", "b")]
    assert manifests[0] == manifests[1]  # the digests too
    trace = f"{1:032x}"
    assert SpanArchive(tmp_path / "other").trace(trace) == SpanArchive(data).trace(trace)


@pytest.mark.slow
def test_imported_again_it_changes_nothing_and_the_store_answers_alike(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = export(data, tmp_path / "a")
    assert ingest(tmp_path / "other", tmp_path / "a") == 0
    assert cli.main(["ingest", "--data", str(tmp_path / "other"), str(tmp_path / "a"), "--again"]) == 0
    assert export(tmp_path / "other", tmp_path / "b") == first
    told = []
    for folder in (data, tmp_path / "other"):
        capsys.readouterr()
        cli.main(["analyze", "--data", str(folder), "--from", str(at(0)), "--to", str(at(100)), "--json"])
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["requests"] == REQUESTS
    assert told[0] == told[1]
    with duckdb.connect(str(data / "phasewise.duckdb"), read_only=True) as store:
        rollups = store.execute("SELECT * FROM rollups ORDER BY ALL").fetchall()
    with duckdb.connect(str(tmp_path / "other" / "phasewise.duckdb"), read_only=True) as store:
        assert store.execute("SELECT * FROM rollups ORDER BY ALL").fetchall() == rollups


@pytest.mark.slow
def test_sealed_hours_are_exported_as_they_were(data: Path, tmp_path: Path, small_pages: None) -> None:
    first = export(data, tmp_path / "a")
    shutil.copytree(data, tmp_path / "cold")
    window = ("--from", str(at(3)), "--to", str(at(12)), "--filter", "model:exists:true")
    part = export(data, tmp_path / "part", *window)
    with open_data(tmp_path / "cold") as local:
        for due in due_hours(local.store, later := at(48 * 3600)):
            assert Sealer(local.store, lambda: later).seal(due)
        assert local.store.query("SELECT count(*) AS n FROM main.requests")["n"].item() == 0
        assert local.store.query("SELECT count(*) AS n FROM main.gpu_samples")["n"].item() == 0
    assert export(tmp_path / "cold", tmp_path / "b") == first
    assert export(tmp_path / "cold", tmp_path / "c", *window) == part
    assert ingest(tmp_path / "cold", tmp_path / "a") == 0  # into sealed hours, and nothing is there twice
    assert export(tmp_path / "cold", tmp_path / "d") == first


def rows_gone(folder: Path) -> None:
    """Seals what is stored, and lets its hours expire; one request of them comes late, and is sealed as well."""
    later = at(48 * 3600)
    with open_data(folder) as local:
        late = local.store.query("SELECT * FROM requests ORDER BY request_key LIMIT 1")
        for due in due_hours(local.store, later):
            assert Sealer(local.store, lambda: later).seal(due)
        now = later + 20 * DAY_NS
        retention = Retention(local.store, folder, Keep(), lambda: now, lambda: now / 1e9, lambda _: (0, 10**12))
        retention._seen = (now, now / 1e9)
        assert retention.run() >= 1
        retention.vacuum()
        with local.store.write() as transaction:
            transaction.insert("requests", late)


@pytest.mark.slow
def test_rollups_of_expired_hours_come_back_once_and_whole(data: Path, tmp_path: Path, small_pages: None) -> None:
    shutil.copytree(data, tmp_path / "old")
    whole = export(data, tmp_path / "whole")["rollups"]
    rows_gone(tmp_path / "old")
    first = export(tmp_path / "old", tmp_path / "a")
    assert (first["rollups"], first["requests"].num_rows) == (whole, 1)
    for options in ([], ["--again"]):
        assert cli.main(["ingest", "--data", str(tmp_path / "other"), str(tmp_path / "a"), *options]) == 0
        second = export(tmp_path / "other", tmp_path / f"b{len(options)}")
        assert second == first
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("a", "b0", "b1")]
    assert manifests[0] == manifests[1] == manifests[2]
    assert ingest(tmp_path / "other", tmp_path / "whole") == 0  # the requests themselves, at last
    assert export(tmp_path / "other", tmp_path / "c")["rollups"] == whole
    assert export(data, tmp_path / "d", "--from", str(at(-7200)), "--to", str(at(7200)))["rollups"] == whole
    assert "rollups" not in export(data, tmp_path / "e", "--from", str(at(1)), "--to", str(at(900)))
    assert "rollups" not in export(data, tmp_path / "f", "--filter", "model:exists:true")


@pytest.mark.live
@pytest.mark.slow
def test_a_server_exports_what_the_folder_exports(data: Path, tmp_path: Path, small_pages: None) -> None:
    first = export(data, tmp_path / "a")
    service = StoreService(StoreSettings(data, port=0))
    url = f"http://127.0.0.1:{service.start()}"
    other = StoreService(StoreSettings(tmp_path / "other", port=0))
    other_url = f"http://127.0.0.1:{other.start()}"
    try:
        assert cli.main(["export", "--server", url, "--out", str(tmp_path / "b")]) == 0
        assert cli.main(["ingest", "--server", other_url, str(tmp_path / "b")]) == 0
    finally:
        service.stop()
        other.stop()
    assert {path.stem: pq.read_table(path) for path in files_of_export(tmp_path / "b")} == first
    assert export(tmp_path / "other", tmp_path / "c") == first


def test_a_window_and_a_filter_take_whole_traces(data: Path, tmp_path: Path) -> None:
    window = ["--from", str(at(10)), "--to", str(at(15))]
    part = export(data, tmp_path / "a", *window)
    ends = part["requests"]["finished_unix_ns"].to_pylist()
    assert ends == [at(10 + n) for n in range(5)]
    traces = set(part["requests"]["trace_id"].to_pylist())
    for trace in traces:  # the span around a request ends after it, and comes along
        assert part["spans"].filter(pa.compute.equal(part["spans"]["trace_id"], trace)).num_rows == 2
    key = str(part["requests"]["request_key"][0])
    one = export(data, tmp_path / "b", "--filter", f"request_key:eq:{key}")
    assert {name: one[name].num_rows for name in ("requests", "turns", "spans")} == {
        "requests": 1,
        "turns": 1,
        "spans": 2,
    }
    assert "annotations" not in part
    assert [row["instance"] for row in part["places"].to_pylist()] == ["h:9400"]
    assert cli.main(["export", "--data", str(data), "--out", str(tmp_path / "c"), "--from", str(at(5000))]) == 3


def changed(folder: Path, **values: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_that_was_damaged_is_refused_by_name(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(data, tmp_path / "a")
    file = tmp_path / "a" / "requests.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ingest(tmp_path / "d", tmp_path / "a") == 2
    assert "requests.parquet: is not what the manifest says" in capsys.readouterr().err
    file.write_bytes(whole[: len(whole) // 2])
    assert ingest(tmp_path / "d", file) == 2
    assert "requests.parquet: is damaged Parquet" in capsys.readouterr().err
    file.unlink()
    with pytest.raises(InputError, match=r"requests\.parquet: is missing"):
        files_of_export(tmp_path / "a")
    manifest = (tmp_path / "a" / "manifest.json").rename(tmp_path / "manifest.json")
    assert ingest(tmp_path / "d", tmp_path / "a") == 2
    assert "manifest.json: is missing: the export was cut off" in capsys.readouterr().err
    manifest.rename(tmp_path / "a" / "manifest.json")
    changed(tmp_path / "a", schema_version=99)
    with pytest.raises(InputError, match="upgrade phasewise"):
        files_of_export(tmp_path / "a")


def test_parquet_of_others_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "f.parquet")
    assert ingest(tmp_path / "d", tmp_path / "f.parquet") == 2
    assert "is Parquet that phasewise export did not write" in capsys.readouterr().err


def test_a_folder_in_use_is_not_written_into(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert cli.main(["export", "--data", str(data), "--out", str(tmp_path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert cli.main(["export", "--data", str(data), "--out", str(tmp_path / "n"), "--filter", "colour:eq:red"]) == 2
    assert "is not a key to filter by" in capsys.readouterr().err
    assert not (tmp_path / "n").exists()
