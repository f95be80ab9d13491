"""The aggregate questions against the same computed in Python."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import SECOND_NS, START_UNIX_NS, attributed, make_request, request_table

from phasewise.analyzer import questions
from phasewise.analyzer.dimensions import UNKNOWN, dimension
from phasewise.analyzer.filters import Condition, rows_in
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.store import Store
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column

WINDOW = Window(START_UNIX_NS, START_UNIX_NS + 600 * SECOND_NS)
SLOW = Condition('"e2e_s" > ?', (3.0,))


def made(n: int = 300) -> list[dict[str, Any]]:
    chance = random.Random(3)
    rows = []
    for _ in range(n):
        prompt = chance.choice([50, 200, 3000, None])
        request = make_request(
            at_s=chance.uniform(0, 500),
            queue_s=chance.choice([0.01, 0.5, 4.0]),
            prefill_s=chance.uniform(0.01, 0.6),
            decode_s=chance.uniform(0.1, 3),
            output_tokens=chance.choice([1, 40, 400]),
            input_tokens=prompt,
            cached_tokens=chance.choice([None, 0, prompt // 2]) if prompt else None,
            model=chance.choice(["a", "b", None]),
            instance=chance.choice(["gpu-0", "gpu-1"]),
        )
        rows.append(attributed(request))
    return rows


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return made()


@pytest.fixture(scope="module")
def store(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path: Path = tmp_path_factory.mktemp("questions")
    with Store(path / "test.duckdb") as opened:
        with opened.write() as transaction:
            transaction.insert("requests", request_table(rows))
        yield opened


def label(row: dict[str, Any], name: str) -> str:
    """The bucket of a row, the slow way."""
    found = dimension(name)
    value = row[found.column] if found.column != "cached_ratio" else None
    if found.column == "cached_ratio" and row["cached_tokens"] is not None and row["input_tokens"]:
        value = row["cached_tokens"] / row["input_tokens"]
    if value is None:
        return UNKNOWN
    if found.edges is None:
        return str(value)
    return found.labels[sum(bool(value >= edge) for edge in found.edges)]


def test_slices_match_python(store: Store, rows: list[dict[str, Any]]) -> None:
    answer = questions.ask(store, questions.slices_sql(("input", "cache"), "ttft"), rows_in(WINDOW), marked=SLOW)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[label(row, "input"), label(row, "cache")].append(row)
    assert {(row["by_0"], row["by_1"]) for row in answer.iter_rows(named=True)} == set(groups)
    for row in answer.iter_rows(named=True):
        own = groups[row["by_0"], row["by_1"]]
        assert row["n"] == len(own)
        assert row["marked_n"] == sum(one["e2e_s"] > 3 for one in own)
        for p in questions.PERCENTILES:
            assert row[f"metric_p{round(p * 100)}_s"] == pytest.approx(np.quantile([one["ttft_s"] for one in own], p))
        for name in CLASSES:
            seconds = sum(one[cause_column(c)] for one in own for c in CAUSES if CLASS_OF_CAUSE[c] == name)
            assert row[f"{name}_s"] == pytest.approx(seconds)


def test_a_cache_axis_without_data_is_unknown_and_never_zero(tmp_path: Path) -> None:
    with Store(tmp_path / "test.duckdb") as store:
        with store.write() as transaction:
            transaction.insert("requests", request_table([make_request(cached_tokens=None) for _ in range(4)]))
        answer = questions.ask(store, questions.slices_sql(("cache",), "ttft"), rows_in(WINDOW))
    assert answer["by_0"].to_list() == [UNKNOWN]


def test_sorted_axes_end_with_unknown(store: Store) -> None:
    found = dimension("input")
    answer = questions.ask(store, questions.slices_sql(("input",), "ttft"), rows_in(WINDOW))
    labels = questions.sorted_by(answer, [found])["by_0"].to_list()
    assert labels == [one for one in (*found.labels, UNKNOWN) if one in labels]


def test_overview_matches_python(store: Store, rows: list[dict[str, Any]]) -> None:
    row = questions.ask(store, questions.overview_sql(), rows_in(WINDOW), marked=SLOW).row(0, named=True)
    assert row["n"] == len(rows)
    assert row["output_tokens"] == sum(one["output_tokens"] for one in rows)
    known = [one["tpot_s"] for one in rows if one["tpot_s"] is not None]
    assert row["tpot_n"] == len(known) < len(rows)
    assert row["tpot_p95_s"] == pytest.approx(np.quantile(known, 0.95))
    assert row["itl_n"] == 0 and row["itl_p95_s"] is None


def test_trend_and_causes_match_python(store: Store, rows: list[dict[str, Any]]) -> None:
    grid = questions.bins(WINDOW)
    trend = questions.ask(store, questions.trend_sql(("ttft",)), rows_in(WINDOW), grid=grid)
    booked = questions.ask(store, questions.causes_over_time_sql(), rows_in(WINDOW), grid=grid)
    expected: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        expected[(row["finished_unix_ns"] - grid.origin_unix_ns) // grid.width_ns].append(row)
    assert trend["bin"].to_list() == booked["bin"].to_list() == sorted(expected)
    for row in trend.iter_rows(named=True):
        assert row["ttft_p50_s"] == pytest.approx(np.median([one["ttft_s"] for one in expected[row["bin"]]]))
    for row in booked.iter_rows(named=True):
        assert row["queue.slots"] == pytest.approx(sum(one["queue_s"] for one in expected[row["bin"]]))


def test_heat_and_histogram_count_every_known_request_once(store: Store, rows: list[dict[str, Any]]) -> None:
    grid = questions.bins(WINDOW)
    heat = questions.ask(store, questions.heat_sql("ttft"), rows_in(WINDOW), grid=grid, marked=SLOW)
    histogram = questions.ask(store, questions.histogram_sql("ttft"), rows_in(WINDOW), marked=SLOW)
    assert heat["n"].sum() == histogram["n"].sum() == len(rows)
    levels: dict[int, int] = defaultdict(int)
    for row in rows:
        levels[math.floor(math.log2(row["ttft_s"]) * questions.STEPS_AN_OCTAVE)] += 1
    assert dict(zip(histogram["level"].to_list(), histogram["n"].to_list(), strict=True)) == dict(levels)


def test_phases_match_python(store: Store, rows: list[dict[str, Any]]) -> None:
    answer = questions.ask(store, questions.phases_sql(), rows_in(WINDOW), marked=SLOW)
    for row in answer.iter_rows(named=True):
        own = [one for one in rows if (one["e2e_s"] > 3) == row["marked"]]
        assert row["n"] == len(own)
        assert row["queue_s"] == pytest.approx(sum(one["queue_s"] for one in own))
        assert row["external_n"] == 0


def test_facets_count_values(store: Store, rows: list[dict[str, Any]]) -> None:
    answer = questions.ask(store, questions.facet_sql("model"), rows_in(WINDOW), marked=SLOW)
    expected: dict[str, int] = defaultdict(int)
    for row in rows:
        expected[row["model"] or UNKNOWN] += 1
    assert dict(zip(answer["value"].to_list(), answer["n"].to_list(), strict=True)) == dict(expected)


def test_filters_and_windows_narrow_every_question(store: Store, rows: list[dict[str, Any]]) -> None:
    half = Window(WINDOW.from_unix_ns, START_UNIX_NS + 200 * SECOND_NS)
    row = questions.ask(store, questions.overview_sql(), rows_in(half, [Filter("model", "eq", "a")])).row(0, named=True)
    kept = [one for one in rows if one["model"] == "a" and one["finished_unix_ns"] < half.to_unix_ns]
    assert row["n"] == len(kept) > 0


def explained(rows: list[dict[str, Any]], field: str, shape: list[str]) -> dict[str, tuple[float, float]]:
    """Excess and explained seconds by value, the slow way."""
    shaped = [
        (tuple(label(row, name) for name in shape), label(row, field), row["ttft_s"], row["e2e_s"] > 3) for row in rows
    ]
    rest = [one for one in shaped if not one[3]]
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for form, value, seconds, marked in shaped:
        found[value]
        same = [one[2] for one in rest if one[0] == form] or [one[2] for one in rest]
        excess = max(seconds - float(np.mean(same)), 0.0) if marked else 0.0
        others = [one[2] for one in shaped if one[0] == form and one[1] != value]
        gone = min(excess, max(seconds - float(np.mean(others)), 0.0)) if others and excess > 0 else 0.0
        found[value][0] += excess
        found[value][1] += gone
    return {value: (excess, gone) for value, (excess, gone) in found.items()}


@pytest.mark.parametrize(("field", "shape"), [("instance", ["input", "output"]), ("input", ["output"])])
def test_differences_match_python(store: Store, rows: list[dict[str, Any]], field: str, shape: list[str]) -> None:
    answer = questions.ask(store, questions.differences_sql(field, "ttft"), rows_in(WINDOW), marked=SLOW)
    expected = explained(rows, field, shape)
    for row in answer.iter_rows(named=True):
        excess, gone = expected[row["value"]]
        assert row["excess_s"] == pytest.approx(excess)
        assert row["explained_s"] == pytest.approx(gone)


def test_a_value_that_all_requests_share_explains_nothing(tmp_path: Path) -> None:
    slow = [make_request(queue_s=9.0) for _ in range(20)]
    with Store(tmp_path / "test.duckdb") as store:
        with store.write() as transaction:
            transaction.insert("requests", request_table([*slow, *(make_request() for _ in range(60))]))
        answer = questions.ask(store, questions.differences_sql("instance", "ttft"), rows_in(WINDOW), marked=SLOW)
    assert answer["excess_s"].sum() > 100
    assert answer["explained_s"].to_list() == [0.0]


@pytest.mark.parametrize(
    ("seconds", "width"), [(60, 1), (900, 10), (86400, 1800), (40 * 86400, 43200), (4000 * 86400, 45 * 86400)]
)
def test_bins_are_round_and_cover_the_window(seconds: int, width: int) -> None:
    window = Window(START_UNIX_NS + 123, START_UNIX_NS + 123 + seconds * SECOND_NS)
    grid = questions.bins(window)
    assert grid.width_ns == width * SECOND_NS
    assert grid.origin_unix_ns <= window.from_unix_ns
    assert grid.starts_unix_ns[-1] < window.to_unix_ns <= grid.starts_unix_ns[-1] + grid.width_ns


def test_few_is_under_one_over_the_tail() -> None:
    assert questions.few(19, 0.95) and not questions.few(20, 0.95)
    assert questions.few(99, 0.99) and not questions.few(100, 0.99)
