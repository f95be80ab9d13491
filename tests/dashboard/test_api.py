"""The HTTP API over a real store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders import SECOND_NS, START_UNIX_NS
from machine_speed import slowness
from stocked import NOW_UNIX_NS, Served, make_served

from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.rules.load import Rulebook

ALL = {"from": "0", "to": "now"}


def get(served: Served, path: str, **parameters: object) -> Any:
    answer = served.client.get(f"/api/v1/{path}", params=ALL | parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_verdict_is_the_one_of_the_report(morning: Served, rulebook: Rulebook) -> None:
    told = get(morning, "verdict", **{"from": str(START_UNIX_NS), "to": str(NOW_UNIX_NS)})
    own = window_verdict(morning.store, rulebook, Window(START_UNIX_NS, NOW_UNIX_NS), now_unix_ns=NOW_UNIX_NS)
    assert told == json.loads(json.dumps(own))
    assert told["status"] == "slow" and told["primary"] == "queueing"


def test_equal_questions_are_computed_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def counted(*args: Any, **more: Any) -> dict[str, object]:
        calls.append(args)
        return window_verdict(*args, **more)

    monkeypatch.setattr("phasewise.dashboard.answers.window_verdict", counted)
    asked = {"from": str(START_UNIX_NS), "to": str(NOW_UNIX_NS)}
    first, second = get(served, "verdict", **asked), get(served, "verdict", **asked)
    get(served, "verdict", f="model:eq:qwen-7b", **asked)
    assert first == second
    assert len(calls) == 2


def test_filters_narrow_and_variables_of_grafana_are_filters(morning: Served) -> None:
    every = get(morning, "verdict")["requests"]
    some = get(morning, "verdict", f="model:eq:qwen-7b")["requests"]
    assert 0 < some < every
    assert get(morning, "verdict", **{"var-model_name": "qwen-7b"})["requests"] == some


@pytest.mark.parametrize(
    ("path", "parameters", "field", "remedy"),
    [
        ("verdict", {"from": "yesterday-ish"}, "from", "now-15m"),
        ("verdict", {"from": "now", "to": "now-1h"}, "from", "swap"),
        ("verdict", {"f": "modl:eq:a"}, "filter", "did you mean 'model'"),
        ("verdict", {"slo": "ttft"}, "slo", "limit like 2s"),
        ("requests", {"sort": "size"}, "sort", "one of"),
        ("requests", {"cursor": "?"}, "cursor", "start without one"),
        ("requests", {"limit": "0"}, "limit", "between 1 and"),
        ("slices", {"by": "inptu"}, "by", "did you mean 'input'"),
        ("slices", {"metric": "speed"}, "metric", "one of"),
        ("turns", {"limit": "-1"}, "limit", "between 1 and"),
        ("turns", {"limit": "x"}, "limit", "integer"),
        ("requests", {"limit": "9" * 40}, "limit", "between 1 and"),
        ("requests", {"display": "perhaps"}, "display", "bool"),
        ("work", {}, "tab", "send tab="),
        ("verdict", {"from": "²"}, "from", "now-15m"),
        ("verdict", {"from": "now-1000000w"}, "from", "between 1970 and 2100"),
        ("verdict", {"slo": "ttft:.."}, "slo", "limit like 2s"),
        ("verdict", {"filtre": "model:eq:x"}, "filtre", "did you mean filter=? known are from, to, f, filter"),
        ("verdict", {"limit": "3"}, "limit", "known are from"),
        ("turns", {"f": "model:eq:x"}, "f", "known are from, to, limit"),
        ("health", {"deep": "1"}, "deep", "takes none"),
        ("slices", {"sel": "nan,1,1,1"}, "sel", "four numbers"),
    ],
)
def test_a_wrong_question_is_400_with_field_and_remedy(
    morning: Served, path: str, parameters: dict[str, str], field: str, remedy: str
) -> None:
    answer = morning.client.get(f"/api/v1/{path}", params=parameters)
    told = answer.json()
    assert answer.status_code == 400, told
    assert told["field"] == field and remedy in told["remedy"] and told["error"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, rulebook: Rulebook) -> Iterator[Served]:
    """Its start-up has run, where Dash adds a route that takes every address."""
    made = make_served(tmp_path_factory.mktemp("started") / "data", rulebook)
    made.client.started = True
    yield made
    made.store.close()


@pytest.mark.parametrize(
    "path",
    ["/api/nope", "/api", "/api/v1/nope", "/v1/traces", "/v1", "/metrics/nope", "/livez/x", "/nope", "/trace", "/docs"],
)
def test_unknown_addresses_are_404_json_and_never_a_page(started: Served, path: str) -> None:
    answer = started.client.get(path)
    if path == "/trace":
        assert answer.status_code == 200
        return
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("application/json")
    assert set(answer.json()) == {"error", "field", "remedy"}


@pytest.mark.parametrize("path", ["/", "/triage", "/slices", "/requests", "/trace/abc", "/trace/a%2Fb"])
def test_pages_are_one_document(started: Served, path: str) -> None:
    answer = started.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "skeleton" in answer.text and "phasewise.js" in answer.text


def test_requests_are_paged_by_cursor(morning: Served) -> None:
    seen: list[str] = []
    cursor: str | None = None
    while True:
        told = get(morning, "requests", sort="ttft:desc", limit=50, **({"cursor": cursor} if cursor else {}))
        seen += [row["request_key"] for row in told["requests"]]
        if (cursor := told["next"]) is None:
            break
    assert len(seen) == len(set(seen)) == 160
    assert get(morning, "requests", limit=1)["total"] == 160


def test_display_rows_are_text(morning: Served) -> None:
    row = get(morning, "requests", display="true", limit=1)["requests"][0]
    assert row["ttft"].endswith("s") and row["cached_tokens"] in ("unknown", row["cached_tokens"])
    assert sum(part["seconds"] for part in row["bar"]) == pytest.approx(row["e2e_s"])


def test_one_request_by_any_name_and_404_for_none(morning: Served) -> None:
    row = get(morning, "requests", limit=1)["requests"][0]
    for name in (row["request_key"], row["trace_id"], row["request_id"]):
        assert get(morning, f"requests/{name}")["request_key"] == row["request_key"]
    answer = morning.client.get("/api/v1/requests/nobody")
    assert answer.status_code == 404 and "retention" in answer.json()["remedy"]


def test_slices_and_the_unknown_cache(morning: Served) -> None:
    told = get(morning, "slices", by=["cache", "model"])
    values = {cell["values"]["cache"] for cell in told["cells"]}
    assert "unknown" in values and "0 %" not in values
    assert told["prefix_hit_ratio"] == pytest.approx(0.25)
    assert sum(cell["n"] for cell in told["cells"]) == 160
    assert all(
        cell["few"] == [p for p, n in (("p50", 2), ("p95", 20), ("p99", 100)) if cell["metric_n"] < n]
        for cell in told["cells"]
    )


def test_differences_rank_the_replica_that_queues(morning: Served) -> None:
    told = get(morning, "differences", slo="ttft:1s")
    best = told["differences"][0]
    assert told["selection_n"] >= 30
    assert (best["field"], best["value"], best["faint"]) == ("instance", "gpu-1", False)
    assert best["explains_ratio"] > 0.9 and best["lift"] > 2


def test_the_timeline_keeps_silence_apart_from_zero(morning: Served) -> None:
    told = get(morning, "timeline", **{"from": str(START_UNIX_NS), "to": str(START_UNIX_NS + 540 * SECOND_NS)})
    running = told["engine"]["series"]["running"]
    assert None in running and 0 not in running
    assert told["annotations"][0]["kind"] == "deploy"


def test_data_health_counts_what_is_there(morning: Served) -> None:
    told = get(morning, "data-health")
    assert told["coverage"]["phases"] == 1.0
    assert 0 < told["coverage"]["cached_tokens"] < 1
    assert told["engine_samples"] > 100 and told["engine_samples_unjoined"] == 0
    assert {row["joined_to"] for row in told["instances"] if row["kind"] == "scrape"} == {"gpu-0", "gpu-1"}


def test_annotations_come_back(served: Served) -> None:
    sent = {"kind": "config", "text": "max_num_seqs 128", "time": "2025-11-29T14:05:00Z"}
    answer = served.client.post("/api/v1/annotations", json=sent)
    assert answer.status_code == 201
    texts = [mark["text"] for mark in get(served, "annotations")["annotations"]]
    assert texts == ["<b>router 1.8</b>", "max_num_seqs 128"]


def test_what_people_say_of_a_verdict_is_kept_off_the_time_axis(served: Served) -> None:
    answer = served.client.post(
        "/api/v1/outcomes", json={"right": False, "cause": "queue.slots", "note": "it was the router"}
    )
    assert answer.status_code == 201 and answer.json()["text"] == "queue.slots: wrong; it was the router"
    assert len(get(served, "annotations")["annotations"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("annotations", "{", "body"), ("annotations", "[]", "body"), ("annotations", '{"text": 1.5}', "body"),
        ("annotations", '{"kind": "party", "text": "x"}', "kind"), ("annotations", '{"text": "x", "time": "soon"}', "time"),
        ("outcomes", '{"right": "yes"}', "right"), ("outcomes", '{"right": true, "cause": "moon"}', "cause"),
        ("explain-summary", '"text"', "body"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_400(morning: Served, path: str, body: str, field: str) -> None:
    answer = morning.client.post(f"/api/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["field"] == field


def test_scrapes_can_be_sent(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    text = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 3\n'
    lines = [
        json.dumps({"unix_ns": START_UNIX_NS + i * SECOND_NS, "text": text, "instance": "gpu-0:8000"}) for i in range(3)
    ]
    answer = served.client.post(
        "/api/v1/ingest?kind=scrapes&name=s.jsonl",
        content="\n".join(lines),
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["kind"] == "scrapes" and answer.json()["problems"] == []
    assert get(served, "health")["samples"] == 3


@pytest.mark.parametrize(
    ("query", "body", "word"), [("kind=moon", b"x", "kind"), ("", b"", "body"), ("kind=scrapes", b'{"a": 1}', "")]
)
def test_files_that_cannot_be_used_are_400(morning: Served, query: str, body: bytes, word: str) -> None:
    answer = morning.client.post(
        f"/api/v1/ingest?{query}", content=body, headers={"Content-Type": "application/octet-stream"}
    )
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["field"]


def test_metrics_are_counted_for_prometheus(morning: Served) -> None:
    get(morning, "verdict")
    text = morning.client.get("/metrics").text
    assert "phasewise_up 1.0" in text
    assert "phasewise_stored_requests 160.0" in text
    assert 'phasewise_verdicts_total{cause="' in text
    assert all(line.startswith(("#", "phasewise_")) for line in text.splitlines() if line)


def test_probes(morning: Served) -> None:
    assert morning.client.get("/livez").json() == {"status": "alive"}
    assert morning.client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["verdict", "requests", "slices", "timeline", "data-health", "turns", "health", "annotations", "differences"],
)
def test_a_broken_store_is_503_with_a_sentence(broken: Served, path: str) -> None:
    answer = broken.client.get(f"/api/v1/{path}")
    told = answer.json()
    assert answer.status_code == 503
    assert "store" in told["error"] and told["remedy"]
    assert path == "health" or answer.headers["retry-after"] == "2"
    assert "Traceback" not in answer.text
    assert broken.client.get("/livez").status_code == 200
    assert broken.client.get("/readyz").status_code == 503
    assert "phasewise_up 0.0" in broken.client.get("/metrics").text
    assert broken.client.get("/api/v1/pulse").json()["status"] == "degraded"


def test_an_empty_store_has_an_unknown_verdict(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    told = get(served, "verdict")
    assert told["status"] == "unknown" and told["requests"] == 0
    assert get(served, "requests")["requests"] == []
    assert get(served, "timeline", **{"from": "now-15m"})["requests"]["series"]["n"] == [None] * len(
        get(served, "timeline", **{"from": "now-15m"})["requests"]["starts_unix_ns"]
    )


@pytest.mark.alone
def test_a_busy_writer_does_not_hold_up_the_pulse(served: Served) -> None:
    free = threading.Event()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(served.writer), "health", lambda self: free.wait(20) or {})
        began = time.monotonic()
        assert served.client.get("/api/v1/pulse").json()["status"] == "ok"
        assert time.monotonic() - began < 10 * slowness()
        free.set()


def test_the_site_s_objectives_hold_where_the_address_names_none(served: Served) -> None:
    """`[slo]` of phasewise.toml: the same for every reader, until a request says otherwise."""
    served.app.state.answers.site_slo = "ttft:1ms"
    assert get(served, "verdict")["objective"]["text"] == "ttft 0.001 s"
    assert get(served, "verdict", slo="e2e:9s")["objective"]["text"] == "e2e 9 s"
    assert get(served, "verdict", slo="none")["objective"]["limit_s"] is None


def test_filter_is_another_name_of_f(morning: Served) -> None:
    assert get(morning, "verdict", filter="model:eq:qwen-7b") == get(morning, "verdict", f="model:eq:qwen-7b")


def test_what_a_board_and_a_page_put_into_an_address_is_taken(morning: Served) -> None:
    every = get(morning, "verdict")["requests"]
    board = {
        "orgId": "1",
        "refresh": "30s",
        "timezone": "browser",
        "tz": "UTC",
        "v": "1",
        "var-foo": "bar",
        "viewPanel": "3",
    }
    assert get(morning, "verdict", **board, sort="e2e:desc", metric="e2e", rows="input")["requests"] == every
    assert get(morning, "health", **board)["status"] == "ok"


def test_an_error_says_its_remedy_once(morning: Served) -> None:
    told = morning.client.get("/api/v1/verdict", params={"f": "nothing_like_it:eq:x"}).json()
    assert "keys are model" in told["remedy"] and "keys are" not in told["error"]
