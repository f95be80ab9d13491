"""`phasewise db` as its user meets it: on a directory of its own, and through the server that owns it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import aged_days
import pytest
from builders import START_UNIX_NS
from stocked import Served, fill
from writing import PLAIN

from phasewise.collector.retention import DAY_NS
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.cli import main
from phasewise.dashboard.housekeeping import purged
from phasewise.rules.load import load_rulebook


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    with Store(folder / "phasewise.duckdb") as store:
        fill(store)
    return folder


def test_a_backup_is_restored_and_checked(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["db", "backup", "--data", str(data), "--out", str(tmp_path / "backup")]) == 0
    assert list((data / "cold").glob(".snapshot-*")) == []
    assert main(["db", "restore", str(tmp_path / "backup"), "--data", str(tmp_path / "new")]) == 0
    assert "160 requests" in capsys.readouterr().out
    assert main(["db", "check", "--data", str(tmp_path / "new"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["tables"]["requests"] == 160
    file = tmp_path / "new" / "phasewise.duckdb"
    file.write_bytes(file.read_bytes()[:6000])
    assert main(["db", "check", "--data", str(tmp_path / "new")]) == 1
    assert "FAIL" in capsys.readouterr().err
    assert main(["db", "restore", str(tmp_path / "backup"), "--data", str(tmp_path / "new")]) == 2
    assert main(["db", "check", "--data", str(tmp_path / "nowhere")]) == 2


def test_a_purge_says_what_went(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["db", "purge", "--data", str(data)]) == 2
    assert main(["db", "purge", "--data", str(data), "--where", "modle:eq:x"]) == 2
    capsys.readouterr()
    assert main(["db", "purge", "--data", str(data), "--where", "model:eq:qwen-7b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 40
    with Store(data / "phasewise.duckdb") as store:
        assert store.query("SELECT DISTINCT model FROM requests")["model"].to_list() == ["llama-8b"]


def test_the_server_gives_snapshots_and_purges(served: Served) -> None:
    answer = served.client.post("/api/v1/db/snapshot", json={})
    assert answer.status_code == 201
    folder = Path(answer.json()["folder"])
    assert folder.parent == served.store.cold_directory
    with Store(folder / "phasewise.duckdb") as copy:
        assert copy.query("SELECT count(*) AS n FROM requests")["n"].item() == 160
    shutil.rmtree(folder)
    wrong = served.client.post("/api/v1/db/purge", json={"where": "model:eq:x"})
    assert (wrong.status_code, wrong.json()["field"]) == (400, "body")
    assert served.client.post("/api/v1/db/purge", json={}).status_code == 400
    foreign = served.client.post("/api/v1/db/purge", json={"where": []}, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403
    answer = served.client.post("/api/v1/db/purge", json={"where": ["model:eq:qwen-7b"]})
    assert (answer.status_code, answer.json()["requests"]) == (200, 40)
    assert served.client.get("/api/v1/requests").status_code == 200
    assert served.client.get("/api/v1/health").json()["requests"] == 120


def test_a_purge_beside_a_file_that_vanished_does_its_work_and_says_what_is_lost(tmp_path: Path) -> None:
    data = tmp_path / "data"
    aged_days.fill(data, 2)
    now = START_UNIX_NS + 6 * DAY_NS
    with Store(data / "phasewise.duckdb") as store:
        for due in due_hours(store, now):
            assert Sealer(store, lambda: now).seal(due)
        writer = Writer(store, data, load_rulebook(), PLAIN, clock=lambda: now)
        first, _ = sorted((data / "cold").glob("engine_samples/date=*/hour=*/*.parquet"))
        first.unlink()
        done = purged(store, writer, data, ["instance:eq:gpu-0"], "", now)
        assert done["hours"] == 2
        assert f"({aged_days.EACH} of engine_samples)" in str(writer.health()["losses"])
        assert store.query("SELECT count(*) AS n FROM requests")["n"].item() == 0
