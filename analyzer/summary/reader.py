"""The document as a Summary: sections become points, stages become seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phasewise.analyzer.summary.points import Point, Settings, Stage, Summary, finite


def read_summary(document: Mapping[str, object]) -> Summary:
    """The valid document as a Summary."""
    settings = Settings({name: _mapping(document.get(name)) for name in ("hardware", "engine", "model", "workload")})

    def point(name: str) -> Point | None:
        values = document.get(name)
        if not isinstance(values, Mapping):
            return None
        return Point(name, values, settings, _mapping(values.get("differs")) if name == "baseline" else None)

    def points(name: str, compared: bool) -> tuple[Point, ...]:
        entries = document.get(name)
        rows = entries if isinstance(entries, list) else []
        return tuple(
            Point(f"{name}[{i}]", row, settings, _mapping(row.get("differs")) if compared else None)
            for i, row in enumerate(rows)
            if isinstance(row, Mapping)
        )

    return Summary(
        id=str(document.get("id", "")),
        settings=settings,
        observed=point("observed") or Point("observed", {}, settings),
        client=point("client"),
        server=point("server"),
        baseline=point("baseline"),
        sweep=points("sweep", True),
        arms=points("arms", True),
        timeline=points("timeline", False),
        requests=points("requests", False),
        stages=_stages(document.get("stages")),
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _stages(value: object) -> tuple[Stage, ...]:
    found: list[Stage] = []
    entries: Sequence[object] = value if isinstance(value, list) else []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            continue
        middle, least, most = (finite(entry.get(key)) for key in ("ms_p50", "ms_min", "ms_max"))
        if middle is None and least is not None and most is not None:
            middle = (least + most) / 2
        parent, parallel = entry.get("parent"), entry.get("parallel")
        found.append(
            Stage(
                name=str(entry.get("name", "")),
                kind=entry["kind"],
                parent=parent if isinstance(parent, str) else None,
                seconds=None if middle is None else middle / 1000,
                least_s=None if least is None else least / 1000,
                most_s=None if most is None else most / 1000,
                calls=finite(entry.get("calls_count")),
                parallel=parallel if isinstance(parallel, bool) else None,
                place=f"stages[{index}]",
            )
        )
    return tuple(found)
