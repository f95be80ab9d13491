"""The address is the state: reading it, and making addresses from it."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest

from phasewise.analyzer.window import Filter
from phasewise.dashboard.state import parse_typed_filter, parse_view
from phasewise.dashboard.states import without_filter
from phasewise.rules.errors import InputError


def test_grafana_addresses_are_taken_as_they_are() -> None:
    view = parse_view(
        "/triage",
        "?from=1764424800000&to=now&var-model_name=a&var-model_name=b&var-instance=$__all&var-namespace=prod&refresh=30s&orgId=1",
    )
    assert view.filters == (Filter("model_name", "eq", "a"), Filter("model_name", "eq", "b"))
    assert view.window(1764425800 * 10**9).from_unix_ns == 1764424800 * 10**9
    assert view.refresh_s == 30
    assert ("orgId", "1") in view.pairs


def test_the_front_door_is_triage_over_the_last_quarter_of_an_hour() -> None:
    view = parse_view("/", "")
    assert view.page == "triage" and view.relative and view.refresh_s == 10
    assert view.window(10**18).seconds == 900


def test_windows_that_ended_are_not_refreshed() -> None:
    assert parse_view("/triage", "from=1764424800&to=1764424900").refresh_s is None
    assert parse_view("/triage", "refresh=off").refresh_s is None


def test_links_keep_what_they_do_not_change() -> None:
    view = parse_view("/triage", "from=now-1h&f=model:eq:a&unknown=kept&f=ttft:gt:2s")
    parts = urlsplit(view.link("requests", sort="e2e:desc"))
    assert parts.path == "/requests"
    assert parse_qsl(parts.query) == [*view.pairs, ("sort", "e2e:desc")]


def test_a_link_quotes_what_it_carries() -> None:
    view = parse_view("/requests", "")
    link = view.with_filters("triage", [Filter("model", "eq", 'a&b="<x>')])
    assert parse_view("/triage", urlsplit(link).query).filters == (Filter("model", "eq", 'a&b="<x>'),)
    assert urlsplit(view.link("trace", identifier="a/b?c")).path == "/trace/a%2Fb%3Fc"


def test_an_identifier_may_hold_anything() -> None:
    assert parse_view("/trace/a%2Fb%3Fc", "").identifier == "a/b?c"


@pytest.mark.parametrize(("index", "kept"), [(0, ["b", "ttft"]), (1, ["a", "ttft"]), (2, ["a", "b"])])
def test_one_filter_can_be_taken_away(index: int, kept: list[str]) -> None:
    view = parse_view("/triage", "var-model=a&var-job=All&f=model:eq:b&f=ttft:gt:1")
    left = parse_view("/triage", urlsplit(without_filter(view, index)).query).filters
    assert [one.value if one.key == "model" else one.key for one in left] == kept


@pytest.mark.parametrize(
    ("search", "ask", "remedy"),
    [
        ("f=modl:eq:a", "filters", "did you mean 'model'"),
        ("f=model", "filters", "op is one of"),
        ("slo=ttft", "slo", "limit like 2s"),
        ("metric=tfft", "metric", "did you mean 'ttft'"),
        ("rows=inptu", "rows", "did you mean 'input'"),
        ("cell=p42", "cell", "p50, p95"),
        ("sel=1,2,3", "box", "four numbers"),
        ("sort=nothing", "order", "it is one of"),
    ],
)
def test_a_wrong_address_says_what_to_write(search: str, ask: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        getattr(parse_view("/slices", search), ask)


def test_a_box_is_the_same_whichever_way_it_was_drawn() -> None:
    one, other = parse_view("/slices", "sel=2000,1000,3,0.5").box, parse_view("/slices", "sel=1000,2000,0.5,3").box
    assert one == other
    assert one is not None and one.from_unix_ns == 1_000_000_000


@pytest.mark.parametrize(
    ("typed", "filter_text"),
    [
        ("model=llama 8b", "model:eq:llama 8b"),
        ("ttft > 2s", "ttft:gt:2s"),
        ("route^=/chat", "route:prefix:/chat"),
        ("a:eq:b", "a:eq:b"),
    ],
)
def test_filters_as_people_type_them(typed: str, filter_text: str) -> None:
    assert parse_typed_filter(typed) == filter_text


def test_a_typed_filter_without_operator_is_refused() -> None:
    with pytest.raises(InputError, match="like model=NAME"):
        parse_typed_filter("llama")


@pytest.mark.parametrize(
    "sel", ["nan,2,1,2", "1,nan,1,2", "1,2,nan,2", "inf,2,1,2", "1,2,1,inf", "1e300,2,1,2", "-5,2,1,2"]
)
def test_a_box_that_no_heatmap_holds_is_refused(sel: str) -> None:
    with pytest.raises(InputError, match="four numbers"):
        assert parse_view("/slices", f"sel={sel}").box


@pytest.mark.parametrize("refresh", ["²", "9" * 5000, "0", "x"])
def test_a_refresh_that_cannot_be_is_none(refresh: str) -> None:
    assert parse_view("/triage", f"refresh={refresh}").refresh_s is None


def test_filter_is_another_name_of_f() -> None:
    view = parse_view("/triage", "filter=model:eq:a&f=route:eq:b")
    assert view.filters == (Filter("model", "eq", "a"), Filter("route", "eq", "b"))
    assert parse_view("/triage", urlsplit(without_filter(view, 0)).query).filters == view.filters[1:]
    more = view.with_filters("requests", [Filter("model", "eq", "a"), Filter("tenant", "eq", "c")])
    assert [one.key for one in parse_view("/requests", urlsplit(more).query).filters] == ["model", "route", "tenant"]


def test_a_variable_that_nobody_knows_filters_nothing_and_is_named() -> None:
    view = parse_view("/triage", "var-foo=bar&var-model_name=a&var-datasource=prom&var-baz=All&var-a:b=c")
    assert view.filters == (Filter("model_name", "eq", "a"),)
    assert view.unused_variables == (("foo", "bar"), ("a:b", "c"))
    assert ("var-foo", "bar") in view.pairs
    left = parse_view("/triage", urlsplit(without_filter(view, 0)).query)
    assert left.filters == () and left.unused_variables == view.unused_variables


def test_a_page_reads_only_what_is_its_own() -> None:
    for page in ("triage", "trace"):
        parse_view(f"/{page}", "sort=nope&rows=nope").check()
    for page, wrong in (
        ("requests", "sort=nope"),
        ("slices", "rows=nope"),
        ("triage", "slo=nope"),
        ("requests", "metric=nope"),
    ):
        with pytest.raises(InputError):
            parse_view(f"/{page}", wrong).check()
