"""F40: a store that is being brought up to date. Until it is, spans are acknowledged, and who asks is told why not and when to ask again."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_messages import span_message, trace_request
from receive_process import receiving
from waiting import until, wait_for

from phasewise.collector import migration
from phasewise.collector.recovery import FILE
from phasewise.collector.store import Store
from phasewise.collector.tables import SCHEMA_VERSION
from phasewise.dashboard.commands import serve
from phasewise.dashboard.commands.serve import ServeSettings, Supervisor
from phasewise.dashboard.commands.store_process import StoreService, StoreSettings
from phasewise.dashboard.commands.supervisor import Child
from phasewise.dashboard.opening import Opening
from phasewise.rules.errors import MachineError


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()


def spans_counted(port: int) -> int | None:
    """None while the writer is too busy to say."""
    told: dict[str, int] = json.loads(get(port, "/api/v1/health")[2])["writer"].get("counters", {})
    return told.get("spans")


def older(path: Path) -> None:
    with Store(path) as store, store.write() as transaction:
        transaction.execute("INSERT INTO counters BY NAME SELECT 'spans' AS name, '' AS label, 7 AS value")
        transaction.execute("DELETE FROM schema_version")
        transaction.execute("INSERT INTO schema_version VALUES (1, 0)")


class Migrating:
    """A service whose file is being copied, until it may go on."""

    def __init__(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.ports = threading.Event(), list[int]()
        self._failed: list[Exception] = []
        real = migration.keep_copy

        def held(path: Path, version: int) -> Path:
            assert self.go.wait(60)
            return real(path, version)

        monkeypatch.setattr("phasewise.collector.store.keep_copy", held)
        self.service = StoreService(StoreSettings(data, port=0), tell=self.ports.append)
        self._thread = threading.Thread(target=self._start)
        self._thread.start()
        until(lambda: self.ports or self._failed)

    def _start(self) -> None:
        try:
            self.service.start()
        except Exception as error:
            self._failed.append(error)

    def finish(self) -> None:
        self.go.set()
        self._thread.join(60)
        if self._failed:
            raise self._failed[0]

    @property
    def port(self) -> int:
        return self.ports[0]


@pytest.fixture
def migrating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Migrating]:
    older(tmp_path / FILE)
    running = Migrating(tmp_path, monkeypatch)
    try:
        yield running
    finally:
        running.go.set()
        running._thread.join(60)
        running.service.stop()


@pytest.mark.live
def test_who_asks_while_a_store_is_brought_up_to_date_is_told_to_come_again(
    tmp_path: Path, migrating: Migrating
) -> None:
    with receiving(tmp_path) as senders:
        for path in ("/api/v1/verdict?from=0", "/api/v1/health", "/readyz", "/metrics", "/no/such"):
            status, headers, body = get(migrating.port, path)
            assert (status, headers["retry-after"]) == (503, "2"), path
            assert "brings it up to date" in json.loads(body)["error"]
            assert headers["x-content-type-options"] == "nosniff"
        status, headers, body = get(migrating.port, "/triage", accept="text/html,*/*")
        assert (status, headers["refresh"], headers["content-type"]) == (503, "2", "text/plain; charset=utf-8")
        assert "the store is not open yet" in body
        status, headers, body = get(migrating.port, "/livez")  # or an orchestrator would end it, again and again
        assert (status, json.loads(body)) == (200, {"status": "alive"})
        assert senders.post(trace_request(span_message()).SerializeToString()).status == 200
        assert (tmp_path / f"{FILE}.bak-1").exists() is False
        migrating.finish()
        status, _, body = get(migrating.port, "/api/v1/health")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        # What was stored is there, and so is what was acknowledged meanwhile.
        assert wait_for(lambda: spans_counted(migrating.port) == 8, 60)
        status, _, body = get(migrating.port, "/triage", accept="text/html,*/*")
        assert status == 200 and "<html" in body
    assert (tmp_path / f"{FILE}.bak-1").exists()
    migrating.service.stop()
    with Store(tmp_path / FILE) as store:
        assert store.query("SELECT max(version) AS v FROM schema_version")["v"].item() == SCHEMA_VERSION


def test_a_store_that_cannot_be_opened_leaves_nobody_behind_who_says_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older(tmp_path / FILE)
    running = Migrating(tmp_path, monkeypatch)
    assert get(running.port, "/readyz")[0] == 503

    def full(*_: object) -> Path:
        raise MachineError("no room for a copy")

    monkeypatch.setattr(migration, "put_in_place", full)
    with pytest.raises(MachineError, match="no room for a copy"):
        running.finish()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", running.port), timeout=5):
        pass


class Part(Child):
    """A child that lives and says what it is told to say."""

    @property
    def exit_code(self) -> int | None:
        return None


@pytest.mark.parametrize("opening", [True, False])
def test_only_a_store_that_opens_is_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: bool
) -> None:
    monkeypatch.setattr(serve, "READY_TIMEOUT_S", -1.0)
    supervisor = Supervisor(ServeSettings(tmp_path))
    child = Part("store", "", {})
    if opening:
        child._lines.put(json.dumps({"opening": True, "port": 1}))
    turns = []

    def wait(_: float) -> bool:
        turns.append(1)
        if len(turns) == 5:
            child._lines.put(json.dumps({"ready": True, "port": 1}))
        return False

    monkeypatch.setattr(supervisor.stopping, "wait", wait)
    assert supervisor._until_ready([child]) is opening
    assert len(turns) == (5 if opening else 0)


def test_pages_that_do_not_start_are_said_and_end_with_the_server() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.failed", "message": "no pages"})

    async def run() -> list[str]:
        opening, sent, said = Opening(), list[str](), list[str]()

        async def receive() -> dict[str, str]:
            if not sent:
                return {"type": "lifespan.startup"}
            await asyncio.sleep(60)
            return {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        living = asyncio.ensure_future(opening({"type": "lifespan"}, receive, send))
        while not sent:
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(opening.show, broken)
        except MachineError as error:
            said.append(str(error))
        await living
        return sent + said

    assert asyncio.run(run()) == ["lifespan.startup.complete", "the pages did not start: no pages"]
