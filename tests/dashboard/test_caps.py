"""One question may not ask for everything: each cap with its message."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from builders import SECOND_NS, START_UNIX_NS, attributed, make_request, request_table
from stocked import NOW_UNIX_NS, Served

from phasewise.dashboard import caps
from phasewise.rules.errors import InputError

DAY_NS = 86_400 * SECOND_NS


def test_many_rows_of_a_long_time_are_refused_and_few_are_not() -> None:
    caps.require_range(0, 400 * DAY_NS, caps.MOST_ROWS_OF_ANY_RANGE)
    caps.require_range(0, caps.MOST_DAYS * DAY_NS, 10**9)
    caps.require_range(None, None, 0)
    with pytest.raises(InputError, match=r"1,000,001 requests of 32 days \(ask for at most 31 days") as raised:
        caps.require_range(0, 32 * DAY_NS, caps.MOST_ROWS_OF_ANY_RANGE + 1)
    assert raised.value.source == "from"


@pytest.mark.parametrize("path", ["verdict", "timeline", "requests"])
def test_the_range_counts_only_as_far_as_there_are_data(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    served = serve(filled=False)
    monkeypatch.setattr(caps, "MOST_ROWS_OF_ANY_RANGE", 3)
    rows = [attributed(make_request(at_s=-day * 86_400)) for day in (0, 10, 20, 30, 40)]
    with served.store.write() as transaction:
        transaction.insert("requests", request_table(rows))
    wide = served.client.get(f"/api/v1/{path}?from=0&to=now")
    assert wide.status_code == 400, wide.text
    told = wide.json()
    assert told["field"] == "from" and "5 requests of 40 days" in told["error"] and "31 days" in told["remedy"]
    narrow = f"from={START_UNIX_NS - 29 * DAY_NS}&to={NOW_UNIX_NS}"
    assert served.client.get(f"/api/v1/{path}?{narrow}").status_code == 200
    # A filter that leaves few rows is an answer too, whatever the range.
    few = "f=model:eq:nobody"
    assert served.client.get(f"/api/v1/{path}?from=0&to=now&{few}").status_code == 200


def test_more_groups_than_anybody_reads_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    caps.require_groups(caps.MOST_GROUPS)
    monkeypatch.setattr(caps, "MOST_GROUPS", 2)
    answer = served.client.get("/api/v1/slices?from=0&to=now&by=input&by=output")
    assert answer.status_code == 400
    assert answer.json()["field"] == "by" and "filter" in answer.json()["remedy"]


@pytest.mark.parametrize("limit", [0, 1001, 10**9])
def test_a_page_of_the_list_is_bounded(served: Served, limit: int) -> None:
    answer = served.client.get(f"/api/v1/requests?from=0&to=now&limit={limit}")
    assert answer.status_code == 400 and "between 1 and 1000" in answer.json()["remedy"]


def test_a_chart_has_a_bounded_number_of_series_and_points(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    rows = [attributed(make_request(at_s=i * 40_000.0, model=f"m{i}", route=f"/{i}")) for i in range(300)]
    with served.store.write() as transaction:
        transaction.insert("requests", request_table(rows))
    told = served.client.get("/api/v1/timeline?from=0&to=2100-01-01T00:00:00Z").json()
    lists = [value for part in ("requests", "causes", "engine") for value in told[part]["series"].values()]
    assert len(lists) <= caps.MOST_SERIES
    assert sum(map(len, lists)) <= caps.MOST_POINTS


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"text": "' + b"x" * 3000 + b'"}'])
def test_bodies_that_are_too_deep_or_too_long_are_refused(served: Served, body: bytes) -> None:
    answer = served.client.post("/api/v1/annotations", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and json.loads(answer.text)["error"]
