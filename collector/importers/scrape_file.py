"""Scrapes written to a file: JSON lines of {"unix_ns", "text", "instance" or nothing, "job" or nothing}."""

from __future__ import annotations

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.importers.lines import Lines
from phasewise.collector.profiles import Profiles

_FIRST_UNIX_NS = 10**17  # 1973: less is surely not nanoseconds


def read(lines: Lines, profiles: Profiles) -> list[Exposition]:
    """One exposition a line; its sample is named by `instance`, with `job` in front where both are given."""
    found = []
    for place, line in lines:
        unix_ns, text = line.get("unix_ns"), line.get("text")
        if not isinstance(unix_ns, int) or isinstance(unix_ns, bool) or unix_ns < _FIRST_UNIX_NS:
            lines.bad(
                place, "unix_ns", f"is {unix_ns!r}, not Unix nanoseconds", "write the time of the scrape in nanoseconds"
            )
        elif not isinstance(text, str):
            lines.bad(place, "text", f"is {type(text).__name__}, not text", "write the whole answer of /metrics")
        else:
            one = read_exposition(text, unix_ns, profiles, instance=_name(line), source="import")
            if one is None:
                lines.bad(place, "text", "holds metrics of no known engine", "scrape the engine's own /metrics")
            else:
                lines.good()
                found.append(one)
    lines.require_some("write lines of {unix_ns, text}, text being what /metrics answers")
    return found


def _name(line: dict[str, object]) -> str | None:
    instance, job = line.get("instance"), line.get("job")
    if not instance:
        return None
    return f"{job}/{instance}" if job else str(instance)
