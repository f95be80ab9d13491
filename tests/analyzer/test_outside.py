"""Time of calls outside their engine: whose it is, in the attribution of a request and in the verdict of a window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from analyzer_contexts import frame, make_context
from builders import make_request
from writing import bench, engine_span, rulebook

from phasewise.analyzer.attribution import attribute_instance, attributor
from phasewise.analyzer.outside import held_back_s, outside_s
from phasewise.analyzer.report import request_report, window_verdict
from phasewise.analyzer.signals import _in_front
from phasewise.analyzer.window import Window
from phasewise.rules.vocabulary import CAUSE_COLUMNS

ONE = make_request(queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=0.9)


@pytest.mark.parametrize(("side", "cause", "name"), [("server", "host", "host"), ("client", "client", "external")])
def test_most_seconds_outside_make_the_class_and_no_cause_of_the_engine_s_time(
    side: str, cause: str, name: str
) -> None:
    row = replace(ONE, entry_e2e_s=4.0, entry_side=side)
    (answer,) = attribute_instance(make_context([row]), rulebook()).iter_rows(named=True)
    assert (answer["primary_class"], answer["cause"]) == (name, cause)
    assert sum(answer[column] for column in CAUSE_COLUMNS) == pytest.approx(1.0)
    assert answer["margin_ratio"] == pytest.approx((3.0 - 0.9) / 4.0)


def test_few_seconds_outside_leave_the_engine_s_class() -> None:
    row = replace(ONE, entry_e2e_s=1.5, entry_side="server")
    (answer,) = attribute_instance(make_context([row]), rulebook()).iter_rows(named=True)
    assert answer["primary_class"] == "bandwidth"


def test_a_boundary_shorter_than_the_engine_s_time_takes_nothing_away() -> None:
    row = replace(ONE, entry_e2e_s=0.25, entry_side="client")
    (answer,) = attribute_instance(make_context([row]), rulebook()).iter_rows(named=True)
    assert answer["margin_ratio"] == pytest.approx(0.8)
    assert outside_s(frame([row])) == {}


def test_of_the_client_s_first_token_what_the_server_held_before_is_the_host_s() -> None:
    server = replace(ONE, entry_e2e_s=4.0, entry_side="server", entry_before_s=2.0, entry_ttft_s=2.6)
    client = replace(server, entry_side="client", entry_before_s=None)
    assert outside_s(frame([server]), "ttft") == pytest.approx({"host": 2.0, "client": 0.5})
    assert outside_s(frame([client]), "ttft") == pytest.approx({"client": 2.5})


def test_the_share_before_the_queue_is_of_requests_that_tell_both() -> None:
    """One without a time to first token adds to neither side, nor does one whose queue is not known."""
    told = replace(ONE, ttft_s=2.0, queued_unix_ns=ONE.arrival_unix_ns + 10**9)
    no_first_token = replace(told, ttft_s=None, queued_unix_ns=ONE.arrival_unix_ns + 5 * 10**9)
    no_queue = replace(told, queued_unix_ns=None)
    assert _in_front(frame([told, no_first_token, no_queue]))["frontend_ratio"] == pytest.approx(0.5)
    assert _in_front(frame([no_queue]))["frontend_ratio"] is None


def test_a_first_token_that_is_held_back_is_told_where_it_matters() -> None:
    held = replace(ONE, ttft_s=0.1, entry_ttft_s=0.9)
    assert held_back_s(frame([held])) == pytest.approx(0.8)
    assert held_back_s(frame([replace(held, entry_ttft_s=0.2)])) is None
    assert held_back_s(frame([ONE])) is None


def server_around(end_s: float) -> dict[str, Any]:
    return {"name": "POST", "id": "a", "kind": 2, "start_s": 0.0, "end_s": end_s,
            "resource": {"host.name": "one"}, "attributes": {"http.request.method": "POST"}}  # fmt: skip


def test_a_server_in_front_is_named_with_the_spans_it_lacks_and_no_change_to_decoding(tmp_path: Path) -> None:
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        b.receive([server_around(20.0), engine_span(start_s=17.5, parent="a", resource={"host.name": "one"})])
        b.run(2.0)
        (row,) = b.rows()
        verdict: dict[str, Any] = window_verdict(b.store, rulebook(), Window(0, b.clock.now), now_unix_ns=b.clock.now)
        (told,) = request_report(b.store, rulebook(), row["request_key"])
    assert (verdict["status"], verdict["primary"], verdict["cause"]) == ("slow", "host", "host")
    assert verdict["affected"]["matching"] == 1
    assert verdict["signals"]["host_before_queue_ratio"] == pytest.approx(17.5 / 18.0)
    assert {one["technique"] for one in verdict["recommend"]} == {"scale_api_servers"}
    assert "frontend_spans" in {one["signal"] for one in verdict["missing"]}
    assert (told["entry_side"], told["entry_before_s"], told["outside"]) == ("server", 17.5, {"host": 18.0})
    sentence = "18 s of 20 s (90%): pass in the server in front of the engine, 17.5 s of it before the engine gets the request."
    assert (told["verdict"]["primary"], told["verdict"]["sentence"]) == ("host", sentence)  # type: ignore[index]


def test_attributes_that_the_sender_dropped_are_asked_for(tmp_path: Path) -> None:
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        b.receive([{"name": "chat m", "kind": 3, "start_s": 0.0, "end_s": 4.0, "dropped": 37}])
        b.run(2.0)
        verdict: dict[str, Any] = window_verdict(b.store, rulebook(), Window(0, b.clock.now), now_unix_ns=b.clock.now)
    (asked,) = [one for one in verdict["missing"] if one["signal"] == "span_attributes"]
    assert "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in asked["how"] and asked["why"].startswith("1 of 1 requests")
