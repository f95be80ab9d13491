"""What files say of engine processes: rows of `instances` of kind `facts`, under the name of the process and since when they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from phasewise.collector.facts import Statement, merged, noted, valid_facts
from phasewise.collector.records import Instance


class StatedFacts:
    """Rows by name and time; what several sources say since one time stands side by side."""

    def __init__(self, rows: Iterable[Instance]) -> None:
        self._rows = {(one.instance, one.first_seen_unix_ns): one for one in rows if one.kind == "facts"}

    def add(self, name: str, said: Statement) -> bool:
        """Take a statement in; whether it says anything new."""
        since = said.unix_ns or 0
        own = self._rows.get((name, since))
        known = json.loads(own.settings) if own and own.settings else {}
        told = merged(known, noted(said.settings, said.source, said.unix_ns))
        row = Instance(
            instance=name,
            engine=said.engine,
            engine_version=text_of(told, "engine_version"),
            model=text_of(told, "model"),
            kind="facts",
            first_seen_unix_ns=since,
            last_seen_unix_ns=since,
            settings=json.dumps(told, sort_keys=True),
        )
        self._rows[name, since] = row
        return row != own

    def of(self, names: Iterable[str]) -> list[Instance]:
        """Rows of some processes, in order of name and time."""
        wanted = set(names)
        return [one for (name, _), one in sorted(self._rows.items()) if name in wanted]

    def settings(self, names: Iterable[str], last_unix_ns: int) -> list[Mapping[str, object]]:
        """What holds of some processes at the end of some time, the oldest first."""
        rows = [
            {"instance": one.instance, "first_seen_unix_ns": one.first_seen_unix_ns, "settings": one.settings}
            for one in self.of(names)
        ]
        return [json.loads(row["settings"]) for row in valid_facts(rows, last_unix_ns)]


def text_of(settings: Mapping[str, object], name: str) -> str | None:
    """The believed value of a setting that is text."""
    entry = settings.get(name)
    value = entry.get("value") if isinstance(entry, Mapping) else None
    return value if isinstance(value, str) else None
