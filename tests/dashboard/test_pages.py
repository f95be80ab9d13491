"""Every region of every page, built from a real store: with data, without, with a wrong address, with a broken store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
from builders import START_UNIX_NS, attributed, make_request, record_table, request_table
from dash import no_update
from plotly.utils import PlotlyJSONEncoder
from span_tables import span_table
from stocked import Served, make_served

from phasewise.collector.records import EngineStep, Run, arrow_schema
from phasewise.dashboard import shell
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.app import PAGES
from phasewise.dashboard.cards import ends_now
from phasewise.dashboard.pages import requests, trace
from phasewise.dashboard.pages.triage import recorded_badges
from phasewise.dashboard.regions import Region, filled
from phasewise.dashboard.state import View, parse_view
from phasewise.dashboard.verdict_card import verdict_card
from phasewise.dashboard.wording import dataset_kind
from phasewise.rules.load import Rulebook

HOSTILE = '<img src=x onerror="window.hit=1"><a href="http://evil.example">click</a> **bold** [x](javascript:alert(1))'
REGIONS = [(page, one) for page in PAGES for one in page.REGIONS]
BOUND = {"from": "2025-11-29T14:00:00Z", "to": "2025-11-29T14:10:00Z"}


def view(page: ModuleType, served: Served, **changes: str) -> View:
    path = f"/{page.NAME}"
    if page.NAME == "trace":
        found = served.store.query("SELECT request_key FROM requests ORDER BY e2e_s DESC LIMIT 1")
        path += f"/{found['request_key'][0]}" if found.height else "/nobody"
    return parse_view(path, "&".join(f"{key}={value}" for key, value in (BOUND | changes).items()))


def answers(served: Served) -> Answers:
    found: Answers = served.app.state.answers
    return found


def texts(content: object) -> Iterator[str]:
    """Every piece of text a browser would show of a component."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple):
        for one in content:
            yield from texts(one)
    elif isinstance(content, Mapping):
        yield from texts(content.get("props", {}).get("children"))


def plain(content: object) -> Any:
    return json.loads(json.dumps(content, cls=PlotlyJSONEncoder))


def shown(content: object) -> str:
    return " ".join(texts(plain(content)))


def page_text(served: Served, page: ModuleType, at: View) -> str:
    return " ".join(shown(filled(answers(served), at, one, False)[0]) for one in page.REGIONS)


@pytest.mark.parametrize(("page", "one"), REGIONS, ids=lambda value: value.name if isinstance(value, Region) else "")
def test_a_region_shows_its_data(morning: Served, page: ModuleType, one: Region) -> None:
    content, notice, loaded = filled(answers(morning), view(page, morning), one, False)
    assert (notice, loaded) == (None, True)
    assert len(json.dumps(plain(content))) < 1_000_000
    assert shown(content)


def test_triage_says_it_in_a_sentence_with_numbers_and_changes(morning: Served) -> None:
    page = PAGES[0]
    told = page_text(morning, page, view(page, morning))
    for words in (
        "slow",
        "of their time",
        "Evidence",
        "Change",
        "up to −",
        "Do not",
        "Verify",
        "Proven if",
        "160 requests",
    ):
        assert words in told, words
    assert "for" in told and "against" in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
def test_before_the_first_data_the_commands_stand_there(serve: Callable[..., Served], page: ModuleType) -> None:
    served = serve(filled=False)
    told = page_text(served, page, view(page, served))
    if page.NAME == "trace":
        assert "not stored" in told and "sampled out" in told
        return
    assert "Waiting for the first request" in told
    assert "--otlp-traces-endpoint http://127.0.0.1:4317" in told and "phasewise demo" in told


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.NAME)
def test_no_traffic_is_told_with_the_last_request(morning: Served, page: ModuleType) -> None:
    told = page_text(
        morning, page, view(page, morning, **{"from": "2025-11-28T10:00:00Z", "to": "2025-11-28T11:00:00Z"})
    )
    assert "No traffic in this window" in told and "Nov 29 14:0" in told


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.NAME)
def test_a_filter_that_matches_nothing_offers_its_removal(morning: Served, page: ModuleType) -> None:
    told = page_text(morning, page, view(page, morning, f="instance:eq:gpu-9"))
    assert "0 of 160 requests match" in told and "Remove instance = gpu-9" in told


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.NAME)
def test_a_wrong_address_is_a_sentence(morning: Served, page: ModuleType) -> None:
    told = page_text(morning, page, view(page, morning, f="modl:eq:a"))
    assert told.count("cannot be answered") == 1 and "did you mean 'model'" in told


@pytest.mark.parametrize("wrong", ["²", "now-1000000w", "9" * 40, "yesterday-ish"])
@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.NAME)
def test_a_wrong_time_is_a_sentence_and_the_way_on_stays(morning: Served, page: ModuleType, wrong: str) -> None:
    at = view(page, morning, **{"from": wrong})
    told = page_text(morning, page, at)
    assert told.count("cannot be answered") == 1 and "from: " in told and "Last 15 minutes" in told
    assert {link.split("?")[0] for link in links(plain(shell.nav_links(at)))} == {"/triage", "/requests", "/slices"}
    assert "Time range" in shown(shell.range_picker(at, answers(morning).now()))


@pytest.mark.parametrize(
    ("page", "wrong"), [(PAGES[1], "sort"), (PAGES[1], "metric"), (PAGES[2], "cell")], ids=lambda one: getattr(one, "NAME", one)
)  # fmt: skip
def test_a_page_that_cannot_read_its_address_says_so_with_a_way_out(
    morning: Served, page: ModuleType, wrong: str
) -> None:
    at = view(page, morning, **{wrong: "nope"})
    content = plain([filled(answers(morning), at, one, False)[0] for one in page.REGIONS])
    told = shown(content)
    assert f"{wrong}: nope: is not a" in told and "Leave it out" in told
    assert not any(f"{wrong}=" in link for link in links(content))


def test_a_table_goes_where_its_address_cannot_be_read(morning: Served) -> None:
    there = {"type": "Section"}
    assert requests._mounted(answers(morning), view(requests, morning), None) is not None
    assert requests._mounted(answers(morning), view(requests, morning), there) is no_update
    assert requests._mounted(answers(morning), view(requests, morning, sort="nope"), there) is None


def test_a_variable_that_filters_nothing_is_noted(morning: Served) -> None:
    page = PAGES[0]
    at = view(page, morning, **{"var-foo": "bar"})
    assert "160 requests" in page_text(morning, page, at)
    assert "foo = bar filters nothing" in shown(shell.chips(at))
    assert "filter" not in shown(shell.chips(view(page, morning, **{"var-model": "qwen-7b", "var-datasource": "x"})))


def test_spans_that_no_profile_knows_are_named(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    strangers = [{"name": f"<b>job {i}", "scope": "acme", "start_s": 0, "end_s": 1} for i in range(50)]
    served.writer.add_spans(span_table(strangers))
    page = PAGES[0]
    at = view(page, served)
    told = page_text(served, page, at)
    assert "50 spans received, none is of a known engine" in told and "acme / <b>job #" in told and "vLLM V1" in told
    strip = shown(shell.health_strip(answers(served), at))
    assert "50 spans received, none is of a known engine" in strip and "acme / <b>job #" in strip


def test_a_strange_span_beside_requests_is_only_a_note(served: Served) -> None:
    served.writer.add_spans(span_table([{"name": "job", "scope": "acme", "start_s": 0, "end_s": 1}]))
    at = view(PAGES[0], served)
    assert "1 span received of no known engine" in shown(shell.health_strip(answers(served), at))
    assert "160 requests" in page_text(served, PAGES[0], at)


def test_requests_are_open_still_only_in_a_window_that_ends_now() -> None:
    told = {"status": "slow", "primary": "queueing", "cause": "queue.slots", "requests": 9, "open": 3, "in_flight": {"open": 3, "running": 3.0}}  # fmt: skip
    for current, words in ((True, "3 requests still open"), (False, "3 requests open at the end of the window")):
        assert words in shown(verdict_card(told, parse_view("/triage", ""), current=current))
    assert ends_now(told | {"window": {"to_unix_ns": START_UNIX_NS}}, START_UNIX_NS + 119 * 10**9)
    assert not ends_now(told | {"window": {"to_unix_ns": START_UNIX_NS}}, START_UNIX_NS + 121 * 10**9)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
def test_a_broken_store_is_told_once_with_a_number(morning: Served, broken: Served, page: ModuleType) -> None:
    at = view(page, morning)
    told = page_text(broken, page, at)
    assert told.count("The store cannot be read") == 1
    assert "error " in told and "Retry" in told and "Traceback" not in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
def test_what_was_loaded_stays_when_the_store_breaks(morning: Served, broken: Served, page: ModuleType) -> None:
    at = view(page, morning)
    for one in page.REGIONS:
        content, notice, loaded = filled(answers(broken), at, one, True)
        assert content is no_update and loaded is no_update
        assert (notice is not None) == one.lead


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory, rulebook: Rulebook) -> Iterator[Served]:
    """Forty requests with markup in every text of theirs."""
    made = make_served(tmp_path_factory.mktemp("strange") / "data", rulebook, filled=False)
    names = ("model", "instance", "route", "tenant", "finish_reason", "dataset")
    rows = [attributed(make_request(at_s=i, **dict.fromkeys(names, HOSTILE))) for i in range(40)]
    with made.store.write() as transaction:
        transaction.insert("requests", request_table(rows))
    yield made
    made.store.close()


@pytest.mark.parametrize(("page", "one"), REGIONS, ids=lambda value: value.name if isinstance(value, Region) else "")
def test_strangers_text_is_text_and_never_markup(strange: Served, page: ModuleType, one: Region) -> None:
    content = plain(filled(answers(strange), view(page, strange), one, False)[0])
    kinds = set(types(content))
    assert not kinds & {"Markdown", "Script", "Iframe", "Link", "DangerouslySetInnerHTML"}
    for href in links(content):
        assert href.startswith("/"), href
    for figure in figures(content):
        assert "<img" not in json.dumps(figure) and "<a " not in json.dumps(figure)


def types(content: object) -> Iterator[str]:
    for node in nodes(content):
        yield str(node["type"])


def links(content: object) -> Iterator[str]:
    for node in nodes(content):
        if "href" in node["props"]:
            yield str(node["props"]["href"])


def figures(content: object) -> Iterator[object]:
    for node in nodes(content):
        if node["type"] == "Graph":
            yield node["props"]["figure"]


def nodes(content: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, list):
        for one in content:
            yield from nodes(one)
    elif isinstance(content, Mapping) and "type" in content and "props" in content:
        yield content
        yield from nodes(content["props"].get("children"))


def test_recordings_wear_a_badge(serve: Callable[..., Served]) -> None:
    import pyarrow as pa

    served = serve(filled=False)
    facts = json.dumps({"engine": "vLLM 0.32.0", "machine": "2 cores", "requests": 40})
    run = {
        "run": "r",
        "name": "overload",
        "from_unix_ns": START_UNIX_NS,
        "to_unix_ns": START_UNIX_NS + 1,
        "facts": facts,
    }
    rows = [attributed(make_request(at_s=i, dataset="overload")) for i in range(40)]
    with served.store.write() as transaction:
        transaction.insert("requests", request_table(rows))
        transaction.insert("runs", pa.Table.from_pylist([run], schema=arrow_schema(Run)))
    page = PAGES[0]
    told = page_text(served, page, view(page, served))
    assert "recorded" in told and "vLLM 0.32.0" in told and "40 requests" in told
    assert "simulated" not in told


def test_what_a_simulated_executor_made_is_badged_as_simulated() -> None:
    facts = {"engine": "phasewise engine 0.1.0", "machine": "simulated NVIDIA L4"}
    told = str([child.to_plotly_json() for child in recorded_badges({"simulated-full_seats-0-1a2b3c": facts})])
    assert "'simulated'" in told and "simulated NVIDIA L4" in told
    assert dataset_kind("vllm-overload") == "recorded"


def test_a_healthy_window_says_so_and_too_little_traffic_is_marked(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([attributed(make_request(at_s=i * 5)) for i in range(12)]))
    page = PAGES[0]
    told = page_text(served, page, view(page, served))
    assert "healthy" in told
    assert "Only 12 requests in this window" in told and "few (n=12)" in told


def test_engine_metrics_that_are_not_there_are_not_drawn_as_zero(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([attributed(make_request(at_s=i)) for i in range(40)]))
    page = PAGES[0]
    assert "No engine metrics in this window" in page_text(served, page, view(page, served))


def test_the_cache_axis_says_what_engines_count_instead(serve: Callable[..., Served]) -> None:
    page = PAGES[2]
    served = serve()
    told = page_text(served, page, view(page, served, rows="cache"))
    assert "unknown" in told and "cache per request unknown" in told and "25\u202f% of prompt tokens hit" in told


def test_a_small_box_asks_for_a_larger_one(morning: Served) -> None:
    page = PAGES[2]
    start = START_UNIX_NS // 10**6
    told = page_text(morning, page, view(page, morning, sel=f"{start},{start + 20_000},0.001,100"))
    assert "Draw a larger one" in told and "Clear the box" in told


def test_a_card_shows_what_it_does_not_know() -> None:
    verdict = {
        "status": "slow", "primary": "kv", "cause": "kv.wait", "requests": 4, "affected": {"count": 3, "of": 4, "slo": None},
        "recommend": [{"technique": "t", "title": "T", "ceiling": {"direct": None, "induced": None}, "flags": {"vllm": "--x"}, "current": None, "risk": {}}],
        "missing": [{"signal": "kv_usage", "how": "scrape the engine"}], "stage": "measured", "provenance": {},
    }  # fmt: skip
    told = shown(verdict_card(verdict, parse_view("/triage", "")))
    assert "ceiling unknown" in told and "current value unknown" in told and "1 signal would sharpen this" in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
def test_a_page_has_few_components(morning: Served, page: ModuleType) -> None:
    """Dash tells every component of every change: with thousands of them one change takes the browser seconds."""
    at = view(page, morning)
    built = [plain(filled(answers(morning), at, one, False)[0]) for one in page.REGIONS]
    assert sum(1 for content in built for _ in nodes(content)) < 900


def test_many_runs_share_one_badge() -> None:
    facts = {"engine": "phasewise engine 0.1.0", "machine": "simulated NVIDIA L4"}
    few = recorded_badges({f"simulated-{k}": facts for k in range(2)})
    assert shown(few).count("simulated NVIDIA L4") == 2
    many = recorded_badges({f"simulated-{k}": facts for k in range(15)})
    assert len(many) == 1 and shown(many) == "simulated, 15 runs"
    assert "simulated-14" in str(many[0].to_plotly_json())


def stepping(served: Served, count: int = 480) -> None:
    """Steps of one engine, one a second: five run, seven wait, a quarter of the KV pool is in use."""
    none = {f"waiting_{reason}": 0 for reason in ("kv", "budget", "window", "policy")}
    ran = [
        EngineStep(
            instance="gpu-0", step=k, start_unix_ns=START_UNIX_NS + k * 10**9, duration_s=1.0, prefill_tokens=0,
            decode_sequences=5, running=5, waiting_slot=7, kv_blocks_used=25, kv_blocks_total=100, preemptions=0, **none,
        )
        for k in range(count)
    ]  # fmt: skip
    with served.store.write() as transaction:
        transaction.insert("engine_steps", record_table(EngineStep, ran))


def test_an_engine_that_sends_steps_needs_no_scrape_for_its_charts(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    stepping(served)
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([attributed(make_request(at_s=i * 10)) for i in range(40)]))
    page = PAGES[0]
    told = page_text(served, page, view(page, served))
    assert "No engine metrics" not in told and "no engine metrics" not in told
    lines = str([plain(filled(answers(served), view(page, served), one, False)[0]) for one in page.REGIONS])
    assert "Waiting and running waiting stayed at 7" in lines and "KV cache in use KV in use stayed at 25" in lines
    assert "no preemptions" in told
    assert "No engine metrics" not in shown(shell.health_strip(answers(served), view(page, served)))


def test_the_trace_of_a_request_shows_its_engine_by_steps(serve: Callable[..., Served]) -> None:
    served = serve(filled=False)
    stepping(served)
    row = attributed(make_request(at_s=100))
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([row]))
    course = trace._engine(answers(served), row)
    assert set(course.running) == {5.0} and set(course.waiting) == {7.0} and set(course.kv_usage_ratio) == {0.25}
    assert len(course.unix_ns) >= 5
    other = attributed(make_request(at_s=100, instance="gpu-1"))
    assert not trace._engine(answers(served), other).unix_ns


@pytest.mark.parametrize("quality", [None, '["clock_skew"]'])
def test_spans_that_do_not_line_up_are_explained(serve: Callable[..., Served], quality: str | None) -> None:
    served = serve(filled=False)
    row = attributed(make_request(at_s=100)) | {"quality": quality}
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([row]))
    told = shown(trace._one(answers(served), view(trace, served), row))
    assert ("clocks of its hosts stand apart" in told) == (quality is not None)
