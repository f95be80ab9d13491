"""F42: a backup taken while spans come in is of one moment, and what is restored from it elsewhere is whole up to that moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import phasewise, serving
from span_ledger import Ledger, Sender, assert_account, sending, settle
from waiting import wait_for

from phasewise.collector.store import Store

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_a_backup_under_load_restores_to_one_moment(tmp_path: Path) -> None:
    ledger = Ledger()
    data, backup, again = tmp_path / "data", tmp_path / "backup", tmp_path / "again"
    with serving(data) as server:
        ports = {"grpc": server.ready["otlp_grpc_port"], "http": server.ready["otlp_http_port"]}
        senders = [Sender(ledger, lambda p=port: p, name, pause_s=0.02, timeout_s=30.0) for name, port in ports.items()]  # type: ignore[misc, arg-type]
        with sending(*senders):
            assert wait_for(lambda: len(ledger.acknowledged) > 500, 60)
            before, sent = set(ledger.acknowledged), len(ledger.sent)
            # The journal is read in its order: once so many are there, all that were acknowledged by then are.
            assert wait_for(lambda: server.get("/api/v1/pulse")["requests"] >= sent, 60)
            done = phasewise("db", "backup", "--data", data, "--out", backup)
            assert done.returncode == 0, done.stderr
            begun = set(ledger.sent)
            assert wait_for(lambda: len(ledger.acknowledged) > len(begun) + 200, 60)
        assert server.stop() == 0
    assert set(ledger.answers) == {"acknowledged"}
    assert_account(data, ledger)
    restored = phasewise("db", "restore", backup, "--data", again)
    assert restored.returncode == 0, restored.stderr
    checked = phasewise("db", "check", "--data", again)
    assert checked.returncode == 0, checked.stderr
    counted = settle(again)["counters"]
    with Store(again / "phasewise.duckdb") as store:
        found = store.query("SELECT span_id FROM requests")["span_id"].to_list()
    assert len(found) == len(set(found)) == counted["spans"]
    assert before <= set(found) <= begun
    print(f"{len(found):,} spans of {len(ledger.acknowledged):,} in a backup that was taken between them")
