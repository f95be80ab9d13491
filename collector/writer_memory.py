"""What the writer knows between two passes: read from what is committed, and committed with the rows it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phasewise.collector.archive import SpanArchive
from phasewise.collector.assembly import Assembly
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.ledger import Ledger
from phasewise.collector.places import Places
from phasewise.collector.profiles import Profiles
from phasewise.collector.refresher import Refresher
from phasewise.collector.registry import Registry
from phasewise.collector.restarts import Restarts
from phasewise.collector.rollups import POSITION, DirtyRollups
from phasewise.collector.skews import POSITION as SKEWS
from phasewise.collector.skews import Skews
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction
from phasewise.collector.watermarks import FUTURE_NS, HOUR_NS, MINUTE_NS, Watermarks

# Of each instance its own last hour: one that was silent for long may have rows that are not final yet. What is sealed is final.
_LAST_HOURS = """
WITH newest AS (
    SELECT instance, max(finished_unix_ns) FILTER (finished_unix_ns <= ?) AS past_unix_ns, max(finished_unix_ns) AS any_unix_ns
    FROM main.requests GROUP BY instance
)
SELECT r.instance, max(finished_unix_ns) AS finished_unix_ns, max(e2e_s) AS e2e_s
FROM main.requests r JOIN newest n ON r.instance IS NOT DISTINCT FROM n.instance
WHERE finished_unix_ns BETWEEN coalesce(past_unix_ns, any_unix_ns) - ? AND coalesce(past_unix_ns, any_unix_ns)
GROUP BY r.instance, finished_unix_ns // ?
"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the writer is given and never changes. clock: Unix nanoseconds; stated: settings that the operator states.
    ledger: what it remembers of its table holds whatever is rolled back."""

    store: Store
    reader: JournalReader
    archive: SpanArchive
    profiles: Profiles
    attribute: Attribute
    stated: Mapping[str, object]
    clock: Callable[[], int]
    ledger: Ledger


@dataclass(slots=True)
class Memory:
    """position: up to which the journal has been read."""

    position: Position | None
    counters: Counters
    registry: Registry
    watermarks: Watermarks
    dirty: DirtyRollups
    refresher: Refresher
    assembly: Assembly
    restarts: Restarts = field(default_factory=Restarts)
    places: Places = field(default_factory=Places)
    skews: Skews = field(default_factory=Skews)
    rejoined_ns: int = 0
    marked: dict[str, bool] = field(default_factory=dict)  # scrapes without a name -> how their samples are marked
    commit: str = ""  # the number of the last one, as the store has it
    _told: list[tuple[str, str]] = field(default_factory=list)  # positions as they were stored last

    def store(self, transaction: Transaction, now_unix_ns: int) -> None:
        """Positions, counters, instances and what is dirty go with the rows they belong to."""
        self.registry.store(transaction)
        self.counters.store(transaction)
        self.dirty.store(transaction)
        self.refresher.store(transaction)
        skews = self.skews.to_store(now_unix_ns)
        if skews is not None:
            transaction.replace("positions", ("name",), ("name", "position"), [(SKEWS, skews)])
        if self.position is None:
            return
        start = self.assembly.open_from(self.position)
        told = [("journal", str(self.position)), ("open_from", str(start))]
        if told != self._told:
            transaction.replace("positions", ("name",), ("name", "position"), told)
            self._told = told


def recalled(around: Surroundings) -> Memory:
    """Memory of what is committed; spans that had not settled are read from the journal again."""
    store, now = around.store, around.clock()
    positions = {r["name"]: str(r["position"]) for r in store.query("SELECT * FROM positions").iter_rows(named=True)}
    position = Position.parse(positions["journal"]) if "journal" in positions else None
    counters = Counters(store.query("SELECT * FROM counters"))
    registry = Registry(store.query("SELECT * FROM instances"), around.stated)
    watermarks = Watermarks()
    watermarks.see(store.query(_LAST_HOURS, [now + FUTURE_NS, HOUR_NS, MINUTE_NS]), now)
    dirty = DirtyRollups(positions.get(POSITION))
    refresher = Refresher(around.attribute, registry, watermarks, counters, dirty)
    refresher.recall(store)
    assembly = Assembly(around.profiles, around.archive, counters, around.clock, around.ledger)
    if "open_from" in positions and position is not None:
        assembly.reload(around.reader, Position.parse(positions["open_from"]), position)
    return Memory(
        position,
        counters,
        registry,
        watermarks,
        dirty,
        refresher,
        assembly,
        skews=Skews.recalled(positions.get(SKEWS, ""), now),
        commit=positions.get("commit", ""),
    )
