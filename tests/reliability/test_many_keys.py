"""F27 (b) and (c) at full size: ten thousand attribute keys over many spans, a value of its own in each of a million. No column, no row and
no list grows with them, and questions take no longer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from otlp_messages import span_message, trace_request
from span_ledger import ANSWERED
from writing import NOW, SECOND, Bench, bench, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.scan import scan_traces
from phasewise.dashboard.answers import GuardedReader

KEYS, OF_A_SPAN = 10_000, 10
AT_ONCE = 10_000
QUESTIONS = 20
Attributes = Callable[[int], dict[str, object]]


def plain(number: int) -> dict[str, object]:
    return {"a": number % 7}


def many_keys(number: int) -> dict[str, object]:
    """Ten keys of ten thousand, others in the next span."""
    return {f"key.{(number * OF_A_SPAN + i) % KEYS}": f"value {i}" for i in range(OF_A_SPAN)}


def own_value(number: int) -> dict[str, object]:
    return {"user.id": f"user-{number:012d}"}


def rows_of(first: int, count: int, extra: Attributes) -> pa.Table:
    """Requests of vLLM that end a millisecond after each other. What the scanner makes of them is proved elsewhere (and by the first)."""
    end = NOW + first * 10**6
    span = span_message(
        {**ANSWERED, **extra(first)}, start_time_unix_nano=end - SECOND // 2, end_time_unix_nano=end, name="llm_request"
    )
    resource = {"service.name": "vllm", "service.instance.id": f"engine-{first // AT_ONCE % 4}"}
    one = scan_traces(trace_request(span, resource=resource).SerializeToString(), end).rows
    rest = json.loads(one["attributes"][0].as_py())
    for name in extra(first):
        assert rest.pop(name) is not None
    numbers = range(first, first + count)
    columns = {
        "trace_id": [f"{n + 1:032x}" for n in numbers],
        "span_id": [f"{n + 1:016x}" for n in numbers],
        "start_unix_ns": [NOW + n * 10**6 - SECOND // 2 for n in numbers],
        "end_unix_ns": [NOW + n * 10**6 for n in numbers],
        "attributes": [json.dumps({**rest, **extra(n)}, separators=(",", ":")) for n in numbers],
        "received_unix_ns": [NOW + n * 10**6 for n in numbers],
    }
    rows = one.take(pa.array([0] * count))
    for name, values in columns.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))
    return rows


@contextmanager
def stored(folder: Path, spans: int, extra: Attributes) -> Iterator[Bench]:
    folder.mkdir()
    with bench(folder, attribute=attributor(rulebook())) as b:
        for first in range(0, spans, AT_ONCE):
            rows = rows_of(first, min(AT_ONCE, spans - first), extra)
            b.clock.now = rows["received_unix_ns"][-1].as_py() + SECOND
            b.journal.append("spans", rows)
            b.journal.sync()
            while b.writer.step() or b.writer.behind:
                pass
        b.run(700.0)
        assert b.counter("spans") == b.counter("requests") == spans
        assert b.counter("broken_traces") == 0
        yield b


def asked(b: Bench) -> float:
    """CPU-seconds of a verdict."""
    began = time.process_time()
    reader = GuardedReader(b.store)
    window_verdict(reader, rulebook(), Window(NOW - 3600 * SECOND, NOW + 7200 * SECOND), now_unix_ns=b.clock.now)
    return time.process_time() - began


def p95(times: list[float]) -> float:
    return sorted(times)[math.ceil(0.95 * len(times)) - 1]


def columns_of(b: Bench) -> int:
    return len(b.rows("SELECT * FROM duckdb_columns()"))


def health_bytes(b: Bench) -> int:
    return len(json.dumps(b.writer.health(), default=str))


def cost_nothing(folder: Path, spans: int, extra: Attributes, questions: int = QUESTIONS) -> None:
    with stored(folder / "plain", spans, plain) as usual, stored(folder / "odd", spans, extra) as odd:
        assert columns_of(odd) == columns_of(usual)
        assert health_bytes(odd) < health_bytes(usual) + 1000  # nothing lists them
        counts = "SELECT count(*) AS n FROM rollups"
        assert odd.rows(counts) == usual.rows(counts)
        asked(usual), asked(odd)
        times = [(asked(usual), asked(odd)) for _ in range(questions)]
        before, after = (p95([pair[i] for pair in times]) for i in (0, 1))
        print(
            f"{spans:,} spans: a verdict took {before:.3f} CPU-seconds without and {after:.3f} with them (p95 of {questions})"
        )
        assert after < 2 * before


@pytest.mark.slow
def test_ten_thousand_keys_over_twenty_thousand_spans(tmp_path: Path) -> None:
    cost_nothing(tmp_path, 20_000, many_keys)


@pytest.mark.nightly
def test_ten_thousand_keys_over_a_hundred_thousand_spans(tmp_path: Path) -> None:
    cost_nothing(tmp_path, 100_000, many_keys)


@pytest.mark.slow
def test_thirty_thousand_values_of_one_key(tmp_path: Path) -> None:
    cost_nothing(tmp_path, 30_000, own_value)


@pytest.mark.nightly
def test_a_million_values_of_one_key(tmp_path: Path) -> None:
    cost_nothing(tmp_path, 1_000_000, own_value, questions=5)
