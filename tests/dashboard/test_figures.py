"""Figures by their data: gaps stay gaps, strangers' text stays text, inferred looks different from measured."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from builders import SECOND_NS, START_UNIX_NS, attributed, make_request, make_span

from phasewise.dashboard import figures
from phasewise.dashboard.figures import Limit, Line
from phasewise.dashboard.waterfall import EngineCourse, pieces, span_rows, waterfall

WINDOW = (START_UNIX_NS, START_UNIX_NS + 100 * SECOND_NS)
STARTS = [START_UNIX_NS + i * 10 * SECOND_NS for i in range(10)]
HOSTILE = '<a href="http://evil.example">x</a><img src=x onerror=alert(1)>'


def drawn(values: list[float | None], **more: Any) -> dict[str, Any]:
    return figures.time_lines(STARTS, [Line("p95", values, "#56B4E9")], WINDOW, bin_s=10, unit="seconds", **more)


def test_a_gap_is_a_gap_and_never_zero_or_joined() -> None:
    trace = drawn([1.0, 1.1, None, None, None, None, None, 2.0, 2.1, 2.2])["data"][0]
    assert trace["connectgaps"] is False
    assert trace["y"] == [1.0, 1.1, None, 2.0, 2.1, 2.2]
    assert 0 not in trace["y"]


def test_a_scrape_slower_than_the_bins_is_no_gap() -> None:
    trace = drawn([1.0, None, 1.1, None, 1.2, None, 1.3, None, 1.4, None])["data"][0]
    assert trace["y"] == [1.0, 1.1, 1.2, 1.3, 1.4]


def test_axes_and_hover_carry_units() -> None:
    figure = drawn([0.1, 0.2, 0.4] + [None] * 7)
    assert figure["data"][0]["text"][0] == "100\u202fms"
    assert figure["layout"]["yaxis"]["ticktext"][0] == "0\u202fs"
    assert figure["layout"]["xaxis"]["range"] == [WINDOW[0] / 1e6, WINDOW[1] / 1e6]


def test_a_limit_is_a_dashed_line_with_its_name() -> None:
    figure = drawn([1.0] * 10, limits=[Limit(2.0, "SLO 2 s")])
    assert figure["layout"]["shapes"][0]["line"]["dash"] == "dash"
    assert figure["layout"]["annotations"][0]["text"] == "SLO 2 s"
    assert figure["layout"]["yaxis"]["range"][1] > 2.0


def heat(select: bool = True, box: tuple[float, ...] | None = None) -> dict[str, Any]:
    found = {
        "starts_unix_ns": STARTS[:3], "bin_s": 10.0, "edges_s": [0.5, 1.0, 2.0], "counts": [[4, 0, 1], [0, 9, 0]], "n": 14,
    }  # fmt: skip
    return figures.heatmap(found, WINDOW, limit_s=1.5, box=box, select=select)


def test_a_heatmap_leaves_empty_cells_open_and_scales_by_the_root() -> None:
    trace = heat()["data"][0]
    assert trace["z"] == [[2.0, None, 1.0], [None, 3.0, None]]
    assert len(trace["x"]) == 4 and len(trace["y"]) == 3


def test_a_box_from_the_address_is_drawn_again() -> None:
    layout = heat(box=(1000.0, 2000.0, 1.0, 10.0))["layout"]
    assert layout["dragmode"] == "select"
    assert [layout["selections"][0][key] for key in ("x0", "x1", "y0", "y1")] == [1000.0, 2000.0, 0.0, 1.0]
    assert heat(select=False)["layout"]["dragmode"] == "zoom"


def test_causes_stack_to_one_and_empty_bins_stay_open() -> None:
    over_time = {
        "starts_unix_ns": STARTS[:3], "bin_s": 10.0,
        "series": {"n": [2, None, 1], "e2e_s": [4.0, None, 1.0], "queue.slots": [3.0, None, 0.0], "decode.kv": [1.0, None, 2.0]},
    }  # fmt: skip
    traces = figures.cause_areas(over_time, WINDOW)["data"]
    assert [trace["y"] for trace in traces] == [[0.75, None, 0.0], [0.25, None, 1.0]]


def test_the_histogram_keeps_slow_ones_apart() -> None:
    found = {"edges_s": [1.0, 2.0, 4.0], "n": [5, 3], "slow_n": [0, 2]}
    others, slow = figures.histogram(found, 1.5)["data"]
    assert (others["y"], slow["y"]) == ([5, 1], [0, 2])


def test_telemetry_text_reaches_plotly_escaped() -> None:
    spans, _ = span_rows([make_dict(name=HOSTILE)])
    row = attributed(make_request(at_s=0))
    figure, _ = waterfall(row, spans, EngineCourse((), (), (), ()), [])
    line = drawn([1.0] * 10)
    line["data"][0]["name"] = figures.safe(HOSTILE)
    for text in (json.dumps(figure), json.dumps(line)):
        assert "<a" not in text and "<img" not in text


def make_dict(**fields: Any) -> dict[str, Any]:
    span = make_span(**fields)
    return {name: getattr(span, name) for name in span.__slots__}


def test_phases_lie_end_to_end_and_the_rest_is_unexplained() -> None:
    row = attributed(
        make_request(queue_s=1.0, prefill_s=0.5, first_token_s=0.1, decode_s=2.0, e2e_s=4.0, context_s=None)
    )
    row["provenance"] = json.dumps({"prefill_s": "inferred:overlap", "queue_s": "measured:attribute"})
    found = pieces(row)
    assert [(one.phase, one.source) for one in found] == [
        ("queue", "measured"), ("prefill", "inferred"), ("first_token", "measured"), ("decode", "measured"), ("residual", "unexplained"),
    ]  # fmt: skip
    assert found[-1].end_s == 4.0 and all(a.end_s == b.start_s for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("covers", "order"),
    [("C,F", ["combined", "queue", "prefill"]), ("C,P,F", ["queue", "combined", "decode"])],
)
def test_what_the_engine_cannot_split_stands_where_it_happened(covers: str, order: list[str]) -> None:
    prefill = 0.5 if "P" not in covers else 0.0
    row = attributed(
        make_request(queue_s=1.0, prefill_s=prefill, first_token_s=0.0, combined_s=0.7, combined_covers=covers)
    )
    assert [one.phase for one in pieces(row) if one.phase in order] == order


def test_measured_is_solid_inferred_outlined_unexplained_hatched() -> None:
    row = attributed(make_request(queue_s=1.0, prefill_s=0.5, decode_s=2.0, e2e_s=5.0))
    row["provenance"] = json.dumps({"prefill_s": "inferred:overlap"})
    figure, _ = waterfall(row, [], EngineCourse((), (), (), ()), [])
    marks = {trace["name"]: trace["marker"] for trace in figure["data"]}
    assert marks["Queue"]["line"]["width"] == 0
    assert marks["Prefill"]["line"]["width"] > 0 and marks["Prefill"]["color"].startswith("rgba")
    assert marks["Unattributed"]["pattern"]["shape"] == "/"


def test_all_lanes_share_one_axis() -> None:
    row = attributed(make_request(at_s=0, decode_s=4.0))
    course = EngineCourse([START_UNIX_NS, START_UNIX_NS + SECOND_NS], [1.0, 2.0], [0.0, 3.0], [0.5, 0.9])
    near = {"trace_id": "ab", "request_key": "k", "input_tokens": 900, "prefill_s": 0.5,
            "prefill_from_unix_ns": START_UNIX_NS, "prefill_to_unix_ns": START_UNIX_NS + SECOND_NS // 2}  # fmt: skip
    spans, _ = span_rows([make_dict(at_s=0)])
    figure, height = waterfall(row, spans, course, [near])
    assert {trace["xaxis"] for trace in figure["data"]} == {"x"}
    domains = [figure["layout"][key]["domain"] for key in figure["layout"] if key.startswith("yaxis")]
    assert len(domains) == 5 and height > 250
    ordered = sorted(domains)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))


def test_spans_are_a_tree_and_missing_parents_are_counted() -> None:
    root = make_dict(span_id="a", name="root", at_s=0)
    child = make_dict(span_id="b", parent_span_id="a", name="child", at_s=1)
    lost = make_dict(span_id="c", parent_span_id="zz", name="lost", at_s=2)
    loop = make_dict(span_id="d", parent_span_id="d", name="its own parent", at_s=3)
    rows, missing = span_rows([lost, child, root, loop])
    assert [(row.label, row.depth) for row in rows] == [("root", 0), ("child", 1), ("lost", 0)]
    assert missing == 1
