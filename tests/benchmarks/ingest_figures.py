"""The figures of `ingest.py`: what each says, its floor, and whether it was met. The table and the JSON object have the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """least, most: its floor, None where it has none."""

    name: str
    what: str
    least: float | None = None
    most: float | None = None

    @property
    def floor(self) -> str:
        if self.least is not None:
            return f"at least {_number(self.least)}"
        return "-" if self.most is None else f"at most {_number(self.most)}"

    def judged(self, found: Mapping[str, Any]) -> str:
        """met, missed, or - where there is no floor or nobody measured. Measured without a result is missed: the load was too much to
        tell."""
        if self.name not in found or (self.least is None and self.most is None):
            return "-"
        value = found[self.name]
        if value is None:
            return "missed"
        enough = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return "met" if enough else "missed"


FIGURES = (
    Figure("scan_spans_per_s", "scanner, spans a second of one core", least=600_000),
    Figure("durable_spans_per_s", "durable and acknowledged spans a second, closed loop", least=80_000),
    Figure("indexed_per_cpu_s_8", "spans indexed, settled, attributed per CPU-second, 8 a request", least=60_000),
    Figure("indexed_per_cpu_s_1", "the same, one a request", least=30_000),
    Figure("backlog_drain_s", "until the backlog is gone, the longer of both loads", most=60),
    Figure("ack_p50_ms", "acknowledgement, half of them, the worst load", most=100),
    Figure("ack_p99_ms", "acknowledgement, all but a hundredth, the worst load", most=1000),
    Figure("visible_p99_s", "from acknowledged to visible, 8 a request", most=2),
    Figure("visible_p99_s_1", "the same, one a request", most=2),
    Figure("visible_p99_at_half_rate_s", "the same at half the rate, 8 a request", most=2),
    Figure("receive_rss_mb", "peak memory of receive", most=400),
    Figure("store_rss_mb", "peak memory of store", most=2048),
    Figure("analysis_requests", "stored requests that the analysis is about"),
    Figure("analysis_s", "the analysis, all its questions"),
    Figure("ack_p99_during_analysis_ms", "acknowledgement beside it, all but a hundredth", most=1000),
    Figure("rotel_spans_per_cpu_s", "rotel, which stores nothing, spans per CPU-second"),
    Figure("phoenix_stored_spans_per_cpu_s", "arize-phoenix, stored spans per CPU-second"),
)


def worst(values: list[float | None]) -> float | None:
    """The largest; None, which is worse, where one of them is."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def missed(found: Mapping[str, Any]) -> list[str]:
    """Names of the floors that were measured and not met."""
    return [figure.name for figure in FIGURES if figure.judged(found) == "missed"]


def named(found: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure, None where it was not measured or gave no result."""
    return {figure.name: found.get(figure.name) for figure in FIGURES}


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """One line a figure, and one more for each that was missed."""
    lines = [("figure", "value", "floor", "", "what")]
    for figure in FIGURES:
        value = found.get(figure.name)
        told = _number(value) if value is not None else "unknown" if figure.name in found else "not measured"
        lines.append((figure.name, told, figure.floor, figure.judged(found), figure.what))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for line in lines:
        name, told, floor, judged = (cell.ljust(width) for cell, width in zip(line[:4], widths, strict=True))
        yield f"{name}  {told.strip():>{widths[1]}}  {floor}  {judged}  {line[4]}"
    for figure in FIGURES:
        if figure.judged(found) == "missed":
            value = found[figure.name]
            told = "unknown, since nothing was seen in time" if value is None else _number(value)
            yield f"MISSED {figure.name}: {told}, the floor is {figure.floor}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.2f}"
