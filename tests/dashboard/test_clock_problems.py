"""Clocks of hosts that stand apart, in data health and among what a reader should know first."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
from stocked import Served

from phasewise.collector.skews import SCHEMA
from phasewise.dashboard.data_health import problems
from phasewise.dashboard.state import View


def test_a_clock_that_is_certainly_off_is_a_problem(serve: Callable[..., Served]) -> None:
    served = serve()
    bounds = [
        ("gateway", host, at * 10**9, ahead_ns - 10**6, ahead_ns + 10**6)
        for host, ahead_ns in (("node-1", -5 * 10**9), ("node-2", 10**7), ("node-3", 2 * 10**8))
        for at in range(8)
    ]
    served.writer._memory.skews.see(pl.DataFrame(bounds, schema=SCHEMA, orient="row"))
    told = {one["other_host"]: one for one in served.client.get("/api/v1/data-health").json()["writer"]["clock_skews"]}
    assert (told["node-1"]["ahead_s"], told["node-1"]["certain"], told["node-1"]["calls"]) == (-5.0, True, 8)
    titles = [title for title, _ in problems(served.app.state.answers, View("api", None, (("from", "0"),)))]
    assert "The clock of node-1 is 5\u202fs behind that of gateway" in titles
    assert "The clock of node-3 is 200\u202fms ahead of that of gateway" in titles
    assert not any("node-2" in title for title in titles)  # ten milliseconds
