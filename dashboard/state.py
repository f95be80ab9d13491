"""The state of a page is its URL. This module reads it; `assets/phasewise.js` is the only writer.

Grafana's names are taken as they are (`from`, `to`, `refresh`, `tz`, `var-NAME`, repeated for several values, `$__all` for no
filter); our own are `f=key:op:value` (or `filter=`), `slo`, `metric`, `sel`, `rows`, `cols`, `cell`, `sort` and `v`. Keys and
variables that nobody knows are kept by the browser and filter nothing; the pages name the variables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import parse_qsl, quote, unquote, urlencode

from phasewise.analyzer.dimensions import dimension, metric
from phasewise.analyzer.filters import FILTER_KEYS, filter_key
from phasewise.analyzer.listing import Order, parse_order
from phasewise.analyzer.window import (
    LATEST_UNIX_NS,
    Filter,
    Objective,
    Window,
    parse_filter,
    parse_slo,
    parse_window,
)
from phasewise.rules.errors import InputError

PAGES = ("triage", "requests", "slices", "trace")
CELLS = ("p50", "p95", "p99", "slow", "share")
_ALL_VALUES = frozenset({"$__all", "All", "all", ""})
# Variables of common Grafana boards that say nothing about requests here.
_IGNORED_VARIABLES = frozenset({"namespace", "datasource", "DS_PROMETHEUS", "interval", "cluster"})
_REFRESH = re.compile(r"([0-9]{1,9})(s|m|h)?")
_MOST_REFRESH_S = 86_400
FILTER_NAMES = ("f", "filter")
OWN_KEYS = ("from", "to", *FILTER_NAMES, "slo", "metric", "sel", "rows", "cols", "cell", "sort", "v")
# What Grafana writes into the address of a board besides the variables, and our own look.
FOREIGN_KEYS = frozenset(
    "refresh tz timezone theme orgId kiosk viewPanel editPanel panelId fullscreen autofitpanels inspect tab dashboardId "
    "time time.window folderUid".split()
)
_READ_BY = {
    "triage": ("filters", "slo"),
    "requests": ("filters", "slo", "metric", "box", "order"),
    "slices": ("filters", "slo", "metric", "box", "rows", "columns", "cell"),
}
QUICK_RANGES = (
    ("now-5m", "Last 5 minutes"),
    ("now-15m", "Last 15 minutes"),
    ("now-1h", "Last hour"),
    ("now-3h", "Last 3 hours"),
    ("now-6h", "Last 6 hours"),
    ("now-24h", "Last 24 hours"),
    ("now-2d", "Last 2 days"),
    ("now-7d", "Last 7 days"),
    ("now-30d", "Last 30 days"),
)


@dataclass(frozen=True, slots=True)
class Box:
    """A box drawn on a heatmap: times in Unix ns, metric in seconds."""

    from_unix_ns: int
    to_unix_ns: int
    low_s: float
    high_s: float


@dataclass(frozen=True)
class View:
    """One page with its state. Texts stay as they came, so that a wrong one can be shown beside what is wrong with it."""

    page: str
    identifier: str | None
    pairs: tuple[tuple[str, str], ...]
    site_slo: str = ""  # objectives of phasewise.toml, where the address names none; `slo=none` asks for none

    def _first(self, key: str) -> str | None:
        return next((value for name, value in self.pairs if name == key and value), None)

    @property
    def from_text(self) -> str:
        return self._first("from") or "now-15m"

    @property
    def to_text(self) -> str:
        return self._first("to") or "now"

    @property
    def relative(self) -> bool:
        """The window moves with the clock."""
        return self.to_text.startswith("now")

    def window(self, now_unix_ns: int) -> Window:
        return parse_window(self.from_text, self.to_text, now_unix_ns)

    @property
    def refresh_s(self) -> int | None:
        """Seconds between refreshes; None is off. Without a choice 10 s, for windows that end now."""
        if not self.relative:
            return None
        text = self._first("refresh") or "10s"
        match = _REFRESH.fullmatch(text)
        if not match or int(match[1]) == 0:
            return None
        return min(_MOST_REFRESH_S, max(5, int(match[1]) * {"s": 1, None: 1, "m": 60, "h": 3600}[match[2]]))

    @cached_property
    def filters(self) -> tuple[Filter, ...]:
        """Filters from `f=`, `filter=` and `var-NAME=`; InputError names a wrong one. A variable that nobody knows is none."""
        found = (self.filter_of(name, value) for name, value in self.pairs)
        return tuple(one for one in found if one is not None)

    @staticmethod
    def filter_of(name: str, value: str) -> Filter | None:
        """The filter that one pair of the address stands for."""
        if name in FILTER_NAMES and value:
            asked = parse_filter(value)
            filter_key(asked.key)
            return asked
        if name.startswith("var-") and value not in _ALL_VALUES and is_filter_key(name[4:]):
            return parse_filter(f"{name[4:]}:eq:{value}")
        return None

    @property
    def unused_variables(self) -> tuple[tuple[str, str], ...]:
        """Variables of a Grafana board, with their values, that say nothing about requests and are not known to do so."""
        return tuple(
            (name[4:], value)
            for name, value in self.pairs
            if name.startswith("var-")
            and value not in _ALL_VALUES
            and name[4:] not in _IGNORED_VARIABLES
            and not is_filter_key(name[4:])
        )

    def check(self) -> None:
        """Reads everything that this page takes from its address; InputError for the first that cannot be read."""
        for name in _READ_BY.get(self.page, ()):
            getattr(self, name)

    @property
    def slo_text(self) -> str:
        given = self._first("slo")
        return "" if given == "none" else given or self.site_slo

    @cached_property
    def slo(self) -> tuple[Objective, ...]:
        return parse_slo(self.slo_text) if self.slo_text else ()

    @property
    def metric(self) -> str:
        return metric(self._first("metric") or "ttft").name

    @property
    def rows(self) -> str:
        return dimension(self._first("rows") or "input").name

    @property
    def columns(self) -> str:
        return dimension(self._first("cols") or "concurrency").name

    @property
    def cell(self) -> str:
        text = self._first("cell") or "p95"
        if text not in CELLS:
            raise InputError("cell", text, "is not a figure of a slice", f"it is one of {', '.join(CELLS)}")
        return text

    @property
    def order(self) -> Order:
        return parse_order(self._first("sort"))

    @property
    def box(self) -> Box | None:
        """`sel=x0,x1,y0,y1`: times in Unix ms, metric in seconds."""
        text = self._first("sel")
        if not text:
            return None
        try:
            x0, x1, y0, y1 = (float(part) for part in text.split(","))
            known = (
                all(map(math.isfinite, (x0, x1, y0, y1))) and 0 <= min(x0, x1) <= max(x0, x1) <= LATEST_UNIX_NS / 1e6
            )
        except ValueError:
            known = False
        if not known:
            raise InputError("sel", text, "is not a box", "four numbers: from ms, to ms, low s, high s")
        return Box(round(min(x0, x1) * 1e6), round(max(x0, x1) * 1e6), min(y0, y1), max(y0, y1))

    @property
    def version_known(self) -> bool:
        return (self._first("v") or "1") == "1"

    @property
    def search(self) -> str:
        """The query string again, in the order it came."""
        return urlencode(self.pairs, quote_via=quote, safe=":,$/-")

    def link(self, page: str, *, identifier: str | None = None, **changes: str | Sequence[str] | None) -> str:
        """The address of another page with this state; None drops a key, several values repeat it."""
        kept = [(name, value) for name, value in self.pairs if name not in changes]
        for name, value in changes.items():
            values = [] if value is None else [value] if isinstance(value, str) else list(value)
            kept.extend((name, one) for one in values)
        path = f"/{page}" + (f"/{quote(identifier, safe='')}" if identifier else "")
        return path + (f"?{urlencode(kept, quote_via=quote, safe=':,$/-')}" if kept else "")

    def with_filters(self, page: str, filters: Sequence[Filter]) -> str:
        """The address of a page with more filters."""
        more = [f"{f.key}:{f.op}:{f.value}" for f in filters]
        kept = [value for name, value in self.pairs if name in FILTER_NAMES]
        return self.link(page, filter=None, f=[*kept, *(text for text in more if text not in kept)])


def is_filter_key(name: str) -> bool:
    """It names something to filter by, under its own name or another tool's."""
    try:
        filter_key(name)
    except InputError:
        return False
    return True


def parse_view(path: str, search: str) -> View:
    """The view of an address. Unknown pages keep their name: the shell says that there is no such page."""
    parts = [part for part in path.split("/") if part]
    page = parts[0] if parts else "triage"
    identifier = unquote("/".join(parts[1:])) or None if len(parts) > 1 else None
    pairs = tuple(parse_qsl(search.lstrip("?"), keep_blank_values=False))
    return View(page, identifier, pairs)


def parse_typed_filter(text: str) -> str:
    """`ttft>2s`, `model=llama`, `route^=/chat` or key:op:value, as the filter box takes it; returns key:op:value."""
    cleaned = text.strip()
    if re.match(r"^[A-Za-z_.]+:(eq|ne|in|gt|lt|ge|le|exists|prefix):", cleaned):
        return cleaned
    match = re.match(r"^([A-Za-z_.]+)\s*(!=|>=|<=|\^=|=|>|<)\s*(.+)$", cleaned)
    if not match:
        keys = ", ".join(list(FILTER_KEYS)[:4])
        raise InputError("filter", repr(text), "is not a filter", f"like model=NAME or ttft>2s; keys are {keys}, ...")
    operator = {"=": "eq", "!=": "ne", ">=": "ge", "<=": "le", ">": "gt", "<": "lt", "^=": "prefix"}[match[2]]
    return f"{match[1]}:{operator}:{match[3].strip()}"
