"""The waterfall of one request: phases, spans, its tokens' neighbours and the engine around it, on one time axis.

Phases that were measured are solid, phases that a model inferred are outlined, what no phase explains is hatched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.dashboard import format as fmt
from phasewise.dashboard.figures import MUTED, Figure, _axis, _layout, nice_ticks, safe, tint, with_gaps
from phasewise.dashboard.wording import PHASES, Phase

ROW_PX = 22
_MOST_SPANS = 60
_LABEL_CHARACTERS = 34
_CHARACTER_RATIO = 0.01  # of the lane's width: a narrower bar would shrink its text until nobody can read it


@dataclass(frozen=True, slots=True)
class Piece:
    """One stretch of the phase lane, seconds from arrival. source: measured, inferred or unexplained."""

    phase: str
    start_s: float
    end_s: float
    source: str


def pieces(row: Mapping[str, Any]) -> list[Piece]:
    """The phases of a request laid end to end from its arrival; what is left until its end is unexplained."""
    provenance = _provenance(row)
    found: list[Piece] = []
    at = 0.0
    e2e = row.get("e2e_s")
    for name, phase in _in_time(row):
        seconds = row.get(phase.column)
        if name == "residual" or not seconds or seconds <= 0:
            continue
        told = str(provenance.get(phase.column) or provenance.get(name) or "measured")
        source = "inferred" if told.startswith("inferred") else "measured"
        found.append(Piece(name, at, at + seconds, source))
        at += seconds
    if e2e is not None and e2e - at > 1e-6:
        found.append(Piece("residual", at, e2e, "unexplained"))
    return found


def _in_time(row: Mapping[str, Any]) -> list[tuple[str, Phase]]:
    """Phases in the order of time: a combined one that holds the prefill stands in its place, else before the queue."""
    ordered = list(PHASES.items())
    if "P" in str(row.get("combined_covers") or ""):
        combined = ordered.pop(next(i for i, (name, _) in enumerate(ordered) if name == "combined"))
        ordered.insert(next(i for i, (name, _) in enumerate(ordered) if name == "prefill"), combined)
    return ordered


def _provenance(row: Mapping[str, Any]) -> Mapping[str, Any]:
    text = row.get("provenance")
    if isinstance(text, Mapping):
        return text
    try:
        told = json.loads(text) if text else {}
    except ValueError:
        return {}
    return told if isinstance(told, Mapping) else {}


@dataclass(frozen=True, slots=True)
class SpanRow:
    """One line of the span lane."""

    label: str
    depth: int
    start_unix_ns: int
    end_unix_ns: int
    error: bool
    detail: str


def span_rows(spans: Sequence[Mapping[str, Any]]) -> tuple[list[SpanRow], int]:
    """Spans as a tree in order of time, and how many name a parent that is not there. Long traces are cut."""
    known = {span["span_id"] for span in spans}
    children: dict[str | None, list[Mapping[str, Any]]] = {}
    missing = 0
    for span in sorted(spans, key=lambda one: (one["start_unix_ns"], one["span_id"])):
        parent = span["parent_span_id"] or None
        if parent is not None and parent not in known:
            missing += 1
            parent = None
        children.setdefault(parent, []).append(span)
    rows: list[SpanRow] = []
    stack = [(span, 0) for span in reversed(children.get(None, []))]
    seen: set[str] = set()
    while stack and len(rows) < _MOST_SPANS:
        span, depth = stack.pop()
        if span["span_id"] in seen:
            continue
        seen.add(span["span_id"])
        rows.append(
            SpanRow(
                str(span["name"]),
                depth,
                span["start_unix_ns"],
                max(span["end_unix_ns"], span["start_unix_ns"]),
                span["status_code"] == 2,
                f"{fmt.seconds((span['end_unix_ns'] - span['start_unix_ns']) / 1e9)}, scope {span.get('scope_name') or 'unknown'}",
            )
        )
        stack.extend((child, depth + 1) for child in reversed(children.get(span["span_id"], [])))
    return rows, missing


@dataclass(frozen=True, slots=True)
class EngineCourse:
    """Samples of the request's instance around it; times in Unix ns."""

    unix_ns: Sequence[int]
    running: Sequence[float | None]
    waiting: Sequence[float | None]
    kv_usage_ratio: Sequence[float | None]

    @property
    def known(self) -> bool:
        return any(
            value is not None for values in (self.running, self.waiting, self.kv_usage_ratio) for value in values
        )


def waterfall(
    row: Mapping[str, Any],
    spans: Sequence[SpanRow],
    engine: EngineCourse,
    neighbours: Sequence[Mapping[str, Any]],
) -> tuple[Figure, int]:
    """The figure and its height. Seconds from arrival on the axis; every lane has its own band."""
    origin = int(row["arrival_unix_ns"])
    end_s = max((row["finished_unix_ns"] - origin) / 1e9, row.get("e2e_s") or 0.0, 1e-3)
    start_s = min(0.0, *((span.start_unix_ns - origin) / 1e9 for span in spans), 0.0)
    end_s = max(end_s, *((span.end_unix_ns - origin) / 1e9 for span in spans), end_s)
    pad = (end_s - start_s) * 0.02
    lanes = [("phases", 44.0), ("spans", max(ROW_PX * len(spans), 0) + (8.0 if spans else 0.0))]
    if neighbours:
        lanes.append(("neighbours", 16.0 * len(neighbours) + 10))
    if engine.known:
        lanes += [("queue", 92.0), ("kv", 72.0)]
    lanes = [(name, size) for name, size in lanes if size > 0]
    gap = 26.0
    height = sum(size for _, size in lanes) + gap * len(lanes) + 26
    figure: Figure = {
        "data": [],
        "layout": _layout(
            height=height,
            margin={"l": 190, "r": 14, "t": 22, "b": 26},
            hovermode="closest",
            barmode="overlay",
            bargap=0.25,
        ),
    }
    inner = height - 48
    at = 1.0
    for index, (name, size) in enumerate(lanes, 1):
        domain = [max(at - size / inner, 0.0), at]
        at -= (size + gap) / inner
        axis = "y" if index == 1 else f"y{index}"
        figure["layout"]["yaxis" if index == 1 else f"yaxis{index}"] = _axis(domain=domain, anchor="x", showgrid=False)
        _LANES[name](figure, axis, row, spans, engine, neighbours, origin)
        figure["layout"].setdefault("annotations", []).append(_lane_title(name, domain[1], engine))
    figure["layout"]["xaxis"] = _axis(
        range=[start_s - pad, end_s + pad], tickvals=(ticks := _ticks(start_s, end_s)), ticktext=[fmt.seconds(t) for t in ticks],
        side="bottom", fixedrange=False, anchor="free", position=0, showspikes=True, spikemode="across", spikethickness=1,
        spikecolor=MUTED, spikedash="dot", spikesnap="cursor",
    )  # fmt: skip
    return figure, round(height)


def _ticks(start: float, end: float) -> list[float]:
    return [tick for tick in nice_ticks(end, 8) if start <= tick <= end]


_TITLES = {
    "phases": "Phases",
    "spans": "Spans",
    "neighbours": "Others' prefill on this instance",
    "queue": "Running and waiting",
    "kv": "KV cache in use",
}


def _lane_title(name: str, top: float, engine: EngineCourse) -> dict[str, Any]:
    return {
        "xref": "paper", "yref": "paper", "x": 0, "xshift": -190, "y": top, "yanchor": "bottom", "xanchor": "left", "yshift": 3,
        "text": _TITLES[name], "showarrow": False, "font": {"size": 11, "color": MUTED},
    }  # fmt: skip


def _bar(y: Any, start: float, end: float, axis: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "y": [y],
        "base": [start],
        "x": [end - start],
        "yaxis": axis,
        "xaxis": "x",
        **more,
    }


def _phases_lane(figure: Figure, axis: str, row: Mapping[str, Any], _s: Any, _e: Any, _n: Any, _o: int) -> None:
    for piece in pieces(row):
        phase = PHASES[piece.phase]
        inferred = piece.source == "inferred"
        marker: dict[str, Any] = {
            "color": tint(phase.colour, 0.16) if inferred else phase.colour,
            "line": {"color": phase.colour, "width": 1.5 if inferred else 0},
        }
        if piece.source == "unexplained":
            marker = {
                "color": "rgba(0,0,0,0)",
                "line": {"color": phase.colour, "width": 1},
                "pattern": {"shape": "/", "fgcolor": phase.colour, "size": 6, "solidity": 0.25},
            }
        length = piece.end_s - piece.start_s
        label = f"{phase.title} {fmt.seconds(length)}"
        wide = length > _CHARACTER_RATIO * len(label) * (row.get("e2e_s") or 1.0)
        figure["data"].append(
            _bar(
                0, piece.start_s, piece.end_s, axis, name=phase.title, marker=marker, width=0.8,
                text=[label if wide else ""], textposition="inside", insidetextanchor="middle",
                textangle=0, textfont={"color": "#c9d2df" if inferred or piece.source == "unexplained" else "#0d1117", "size": 11},
                constraintext="both", customdata=[piece.source],
                hovertemplate=f"{phase.title}: {fmt.seconds(length)}<br>{piece.source}<extra></extra>",
            )
        )  # fmt: skip
    figure["layout"][_layout_key(axis)] |= {"range": [-0.5, 0.5], "tickvals": [], "showticklabels": False}


def _layout_key(axis: str) -> str:
    return f"yaxis{axis[1:]}"


def _spans_lane(figure: Figure, axis: str, _r: Any, spans: Sequence[SpanRow], _e: Any, _n: Any, origin: int) -> None:
    labels = []
    for i, span in enumerate(spans):
        start, end = (span.start_unix_ns - origin) / 1e9, (span.end_unix_ns - origin) / 1e9
        name = ("\u2007\u2007" * min(span.depth, 6)) + span.label.strip()
        labels.append(safe(name if len(name) <= _LABEL_CHARACTERS else name[: _LABEL_CHARACTERS - 1] + "…"))
        colour = "#D55E00" if span.error else "#6f8fb8"
        figure["data"].append(
            _bar(
                i, start, max(end, start + 1e-6), axis, name="span", width=0.62,
                marker={"color": tint(colour, 0.85), "line": {"width": 0}},
                hovertemplate=f"{safe(span.label[:200])}<br>{safe(span.detail[:200])}<extra></extra>",
            )
        )  # fmt: skip
    figure["layout"][_layout_key(axis)] |= {
        "range": [len(spans) - 0.5, -0.5], "tickvals": list(range(len(spans))), "ticktext": labels, "ticklabelposition": "outside",
    }  # fmt: skip


def _neighbours_lane(
    figure: Figure, axis: str, _r: Any, _s: Any, _e: Any, neighbours: Sequence[Mapping[str, Any]], origin: int
) -> None:
    labels = []
    for i, one in enumerate(neighbours):
        start, end = (one["prefill_from_unix_ns"] - origin) / 1e9, (one["prefill_to_unix_ns"] - origin) / 1e9
        labels.append(safe(f"{str(one['trace_id'] or one['request_key'])[:8]}  {fmt.compact(one['input_tokens'])} tok"))
        figure["data"].append(
            _bar(
                i, start, end, axis, name="prefill", width=0.6, marker={"color": tint(PHASES["prefill"].colour, 0.7)},
                customdata=[one["request_key"]],
                hovertemplate=f"prefill {fmt.seconds(one['prefill_s'])}, {fmt.count(one['input_tokens'])} tokens<extra></extra>",
            )
        )  # fmt: skip
    figure["layout"][_layout_key(axis)] |= {
        "range": [len(neighbours) - 0.5, -0.5],
        "tickvals": list(range(len(neighbours))),
        "ticktext": labels,
    }


def _course(
    figure: Figure,
    axis: str,
    name: str,
    unix_ns: Sequence[int],
    values: Sequence[float | None],
    origin: int,
    colour: str,
    *,
    filled: bool,
    ratio: bool,
) -> None:
    xs, ys = with_gaps([(t - origin) / 1e9 for t in unix_ns], values, 1e-6)
    figure["data"].append(
        {
            "type": "scatter", "mode": "lines", "x": xs, "y": ys, "yaxis": axis, "xaxis": "x", "name": name, "connectgaps": False,
            "line": {"color": colour, "width": 1.6, "shape": "hv"}, "fill": "tozeroy" if filled else "none", "fillcolor": tint(colour, 0.16),
            "text": ["" if y is None else fmt.share(y) if ratio else fmt.number(y) for y in ys],
            "hovertemplate": f"{name} %{{text}}<extra></extra>",
        }
    )  # fmt: skip


def _queue_lane(figure: Figure, axis: str, _r: Any, _s: Any, engine: EngineCourse, _n: Any, origin: int) -> None:
    _course(figure, axis, "running", engine.unix_ns, engine.running, origin, "#8EA4C8", filled=False, ratio=False)
    _course(figure, axis, "waiting", engine.unix_ns, engine.waiting, origin, "#E69F00", filled=True, ratio=False)
    highest = max([value for value in (*engine.running, *engine.waiting) if value is not None], default=1.0)
    ticks = nice_ticks(max(highest, 1.0), 3)
    figure["layout"][_layout_key(axis)] |= {
        "range": [0, max(highest * 1.1, 1.0)], "tickvals": ticks, "ticktext": [fmt.compact(t) for t in ticks], "showgrid": True,
    }  # fmt: skip


def _kv_lane(figure: Figure, axis: str, _r: Any, _s: Any, engine: EngineCourse, _n: Any, origin: int) -> None:
    _course(
        figure, axis, "KV in use", engine.unix_ns, engine.kv_usage_ratio, origin, "#D98CC0", filled=True, ratio=True
    )
    figure["layout"][_layout_key(axis)] |= {
        "range": [0, 1.05], "tickvals": [0, 0.5, 1], "ticktext": [fmt.percent(t) for t in (0.0, 0.5, 1.0)], "showgrid": True,
    }  # fmt: skip


_LANES = {
    "phases": _phases_lane,
    "spans": _spans_lane,
    "neighbours": _neighbours_lane,
    "queue": _queue_lane,
    "kv": _kv_lane,
}
