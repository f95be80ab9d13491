"""A store, a journal and a writer in a temporary folder, with a clock that tests move by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from span_tables import span_table

from phasewise.collector import finisher, first_answers, refresher, rollups
from phasewise.collector.context import Attribute, Context
from phasewise.collector.journal import JournalWriter
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.rules.load import Rulebook, load_rulebook

NOW = 1_796_000_000 * 10**9
SECOND = 10**9


@cache
def rulebook() -> Rulebook:
    return load_rulebook()


def plain_attribute(context: Context) -> pl.DataFrame:
    """An attribution that says which row it saw in how large a context."""
    keys = sorted(context.targets)
    seen = context.requests.height
    return pl.DataFrame(
        {"request_key": keys, "primary_class": ["queueing"] * len(keys), "concurrency_at_arrival": [seen] * len(keys)},
        schema={"request_key": pl.String, "primary_class": pl.String, "concurrency_at_arrival": pl.Int64},
    )


def each(attribute: Callable[[Context], pl.DataFrame]) -> Attribute:
    """An attribution that looks at one context after the other."""
    return lambda contexts: pl.concat([attribute(context) for context in contexts])


PLAIN = each(plain_attribute)


@dataclass
class Clock:
    now: int = NOW

    def __call__(self) -> int:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class Instant:
    """A monotonic clock on which nothing takes any time: attribution and rollups never rest, however slow the machine is."""

    @staticmethod
    def monotonic() -> float:
        return 0.0


def give_time(monkeypatch: pytest.MonkeyPatch, clock: object) -> None:
    """The clock that attribution measures its own time with."""
    for module in (refresher, finisher, first_answers):
        monkeypatch.setattr(module, "time", clock)


def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes while rows are attributed or rolled up."""
    give_time(monkeypatch, Instant())
    monkeypatch.setattr(rollups, "time", Instant())


@dataclass
class Bench:
    """What a test of the writer holds in its hands."""

    folder: Path
    attribute: Attribute = PLAIN
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.journal = JournalWriter(self.folder / "journal", segment_age_s=1e9)
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder / "phasewise.duckdb")
        self.writer = Writer(self.store, self.folder, rulebook(), self.attribute, clock=self.clock)

    def reopen(self) -> None:
        """What a restart after a crash does: memory is gone, files stay."""
        self.store.close()
        self.open()

    def receive(self, spans: Sequence[Mapping[str, Any]], trace_id: str = "0af7651916cd43dd8448eb211c80319c") -> None:
        """Spans acknowledged now."""
        self.journal.append("spans", span_table(spans, trace_id, received_unix_ns=self.clock.now))
        self.journal.sync()

    def run(self, seconds: float = 0.0) -> int:
        """Steps until the journal is read, `seconds` later."""
        self.clock.forward(seconds)
        written = 0
        for _ in range(4):
            written += self.writer.step()
        return written

    def rows(self, sql: str = "SELECT * FROM requests ORDER BY arrival_unix_ns, request_key") -> list[dict[str, Any]]:
        return list(self.store.query(sql).iter_rows(named=True))

    def counter(self, name: str) -> int:
        counters = self.writer.health()["counters"]
        assert isinstance(counters, dict)
        return int(counters.get(name, 0))


@contextmanager
def bench(folder: Path, **options: Any) -> Iterator[Bench]:
    opened = Bench(folder, **options)
    try:
        yield opened
    finally:
        opened.store.close()
        opened.journal.close()


def engine_span(start_s: float = 0.0, e2e_s: float = 2.0, **changes: Any) -> dict[str, Any]:
    """A vLLM request span: 0.25 s queue, 0.25 s prefill, the rest decode."""
    attributes = {
        "gen_ai.latency.e2e": e2e_s,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": e2e_s - 0.5,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 4,
    }
    return {
        "name": "llm_request",
        "scope": "vllm.tracing.otel",
        "start_s": start_s,
        "end_s": start_s + e2e_s,
        **changes,
        "attributes": attributes | changes.get("attributes", {}),
    }


def traces(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Requests one second apart, each in a trace of its own."""
    return [
        engine_span(start_s=float(i), trace=f"{i + 1:032x}", span_id=f"{i + 1:016x}", **changes) for i in range(count)
    ]


# A request of SGLang, told by its slices.
SLICES = [
    {"name": " Req 1", "id": "a", "scope": "sglang server", "kind": 1, "start_s": 0, "end_s": 3,
     "attributes": {"gen_ai.usage.completion_tokens": 3, "gen_ai.latency.e2e": 3.0}},
    {"name": "prefill_waiting", "parent": "a", "scope": "sglang server", "kind": 1, "start_s": 0, "end_s": 1},
    {"name": "prefill_forward", "parent": "a", "scope": "sglang server", "kind": 1, "start_s": 1, "end_s": 2},
    {"name": "decode_forward", "parent": "a", "scope": "sglang server", "kind": 1, "start_s": 2, "end_s": 3},
]  # fmt: skip
