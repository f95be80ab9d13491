"""Which trace scanner a process uses, and that it says so: compiled, or plain with the reason."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from compiled_scanner import compiled_scan
from otlp_messages import RECEIVED_UNIX_NS, span_message, trace_request
from receive_process import Receiving, receiving, start

from phasewise.collector import scan
from phasewise.collector.scanners import NotCompiled, TraceScanner, load


def body() -> bytes:
    return trace_request(span_message({"a": 1})).SerializeToString()


def fact_within(running: Receiving, kind: str, seconds: float) -> dict[str, object]:
    """The scanner as receive.json tells it, as soon as it is of that kind."""
    until = time.monotonic() + seconds
    while True:
        fact: dict[str, object] = running.counters()["trace_scanner"]
        if fact["kind"] == kind:
            return fact
        assert time.monotonic() < until, fact


def test_a_scanner_that_was_not_asked_is_the_plain_one() -> None:
    scanner = TraceScanner()
    assert scanner(body(), RECEIVED_UNIX_NS).rows.num_rows == 1
    assert scanner.facts() == {"kind": "plain", "reason": "not asked to compile"}


def test_without_numba_there_is_no_compiled_scanner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(NotCompiled, match="numba is not usable"):
        load(tmp_path)


def test_ordinary_spans_are_read_by_compiled_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_scan()
    attributes = {"text": 'a"\n', "whole": -7, "share": 0.1, "is": True, "list": [1, {"a": b"x"}], "none": []}
    request = trace_request(span_message(attributes), span_message(attributes)).SerializeToString()
    expected = scan.scan_traces(request, RECEIVED_UNIX_NS)
    monkeypatch.setattr(scan.SpanReader, "row", lambda *_: pytest.fail("the plain scanner was asked"))
    assert compiled(request, RECEIVED_UNIX_NS).rows.equals(expected.rows)


@pytest.mark.live
def test_a_receiver_reads_with_the_compiled_scanner_from_the_start(tmp_path: Path) -> None:
    with receiving(tmp_path) as running:
        assert running.counters(fresh=False)["trace_scanner"] == {"kind": "compiled", "reason": None}
        assert running.post(body()).status == 200
        assert len(running.stored()) == 1


@pytest.mark.live
def test_a_cache_that_cannot_be_written_leaves_the_plain_scanner_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    running = start(tmp_path / "data", {"NUMBA_CACHE_DIR": str(blocked)})
    try:
        until = time.monotonic() + 60
        while "cannot be used" not in str(running.counters()["trace_scanner"]["reason"]):
            assert time.monotonic() < until
        assert running.counters()["trace_scanner"]["kind"] == "plain"
        assert running.post(body()).status == 200
        assert len(running.stored()) == 1
    finally:
        running.stop()
        _, told = running.process.communicate()
    assert "plain scanner, several times slower" in told


@pytest.mark.live
@pytest.mark.slow
def test_the_first_start_is_ready_on_the_plain_scanner_and_switches(tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for damage in (False, True):
        if damage:
            code = next((tmp_path / "cache").rglob("*.nbc"))
            code.write_bytes(code.read_bytes()[:-100] + bytes(100))
        running = start(tmp_path / "data", environment)
        try:
            assert running.counters(fresh=False)["trace_scanner"] == {"kind": "plain", "reason": "it is being compiled"}
            assert running.post(body()).status == 200
            assert fact_within(running, "compiled", 120) == {"kind": "compiled", "reason": None}
            assert running.post(body()).status == 200
        finally:
            assert running.stop() == 0
            running.process.communicate()
    again = start(tmp_path / "data", environment)
    try:
        assert again.counters(fresh=False)["trace_scanner"]["kind"] == "compiled"
        assert len(again.stored()) == 4
    finally:
        again.stop()
        again.process.communicate()
    shutil.rmtree(tmp_path / "cache")
