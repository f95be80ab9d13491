"""Spans and samples to rows inside a transaction: what is new is taken in, whole traces become rows, joins are made anew.

Nothing here begins or ends a transaction; whatever fails undoes all of it together with the memory it changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from phasewise.collector import lone_halves
from phasewise.collector.cold import hours_touched, thaw, unknown
from phasewise.collector.completion import NEAR_NS, Identifiers
from phasewise.collector.device_table import add_devices, error_marks
from phasewise.collector.exposition import Exposition, samples_of_points
from phasewise.collector.frames import SeenSettings, devices_frame, frame_of, samples_frame
from phasewise.collector.identity import identities
from phasewise.collector.journal import Entry
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.normalize import startup_events
from phasewise.collector.recordings import note_recordings
from phasewise.collector.records import Annotation
from phasewise.collector.registry import SEEN
from phasewise.collector.request_table import changes_of, delete_rows, replace_turns
from phasewise.collector.sample_parts import complete_samples
from phasewise.collector.sample_table import add_samples, deviations, hours_marked_otherwise, mark_joined
from phasewise.collector.steps import steps_of
from phasewise.collector.time_units import in_nanoseconds
from phasewise.collector.transaction import Transaction
from phasewise.collector.watermarks import FUTURE_NS
from phasewise.collector.writer_memory import Memory, Surroundings

REJOIN_NS = 5 * 10**9
REJOINED_NS = 6 * 3600 * 10**9  # a join that came late is of use for the last hours
SAMPLE_GAP_NS = 30 * 10**9
_TIMES = ("arrival_unix_ns", "finished_unix_ns")


class RowWriter:
    """The tables of one transaction, and the memory that goes with them."""

    def __init__(
        self, around: Surroundings, identifiers: Identifiers, memory: Memory, transaction: Transaction
    ) -> None:
        self._profiles = around.profiles
        self._clock = around.clock
        self._cold_files = around.store.cold_files
        self._identifiers = identifiers
        self._memory = memory
        self._transaction = transaction

    def take(self, entries: Sequence[Entry]) -> int:
        """Spans and metric points of journal entries into memory; the newest time of receipt among them."""
        spans = []
        for entry in entries:
            number = self._memory.assembly.next_entry(self._memory.position)
            self._memory.position = entry.position
            frame = frame_of(entry.rows)
            if entry.kind == "spans":
                spans.append(frame.with_columns(pl.lit(number, dtype=pl.Int64).alias("entry")))
            else:
                self._take_points(frame)
        if not spans:
            return 0
        received = pl.concat(spans)
        self.take_spans(received)
        newest = received["received_unix_ns"].max()
        return int(newest) if isinstance(newest, int) else 0

    def take_spans(self, received: pl.DataFrame) -> None:
        new, named = self._memory.assembly.take(self._transaction, received)
        note_recordings(self._transaction, new)
        self._memory.places.see_resources(self._transaction, new["resource"])
        if not named.is_empty():
            self._write_steps(named.filter(pl.col("role") == "steps"))
            self.write_events(startup_events(named))

    def settle(self, due: pl.DataFrame, now: int, *, ended: bool = False, behind: bool = False) -> int:
        """Rows out of whole traces, written and marked for attribution; how many are new or changed. ended: of an import; behind: more of
        them wait in the journal."""
        if due.is_empty():
            return 0
        memory = self._memory
        made = memory.assembly.rows_of(due)
        due = in_nanoseconds(due)
        # Of a span whose end is missing, or is not what its engine says, the row lies elsewhere than the span.
        rows = made.requests.select(_TIMES), made.supplements.select(_TIMES)
        self._thaw(
            hours_touched(due, "start_unix_ns", "end_unix_ns", NEAR_NS)
            | hours_touched(pl.concat(rows).drop_nulls(), *_TIMES, NEAR_NS)
        )
        branched = due.filter(pl.col("parent_span_id").is_not_null()).select("trace_id").unique()
        if not branched.is_empty():
            replace_turns(self._transaction, branched, made.turns)
        if memory.counters.value(lone_halves.HALVES):
            back = lone_halves.taken_back(self._transaction, made.requests)
            memory.counters.add(lone_halves.HALVES, -back.height)
            memory.counters.add("requests", -back.height)
            memory.dirty.add(back, now)
            made = lone_halves.renewed(self._transaction, made)
        changes = changes_of(self._transaction, self._identifiers, made.requests, made.supplements, made.superseded)
        if changes.gone:
            self._delete(changes.gone, due, now)
        past = changes.rows.select(SEEN).filter(pl.col("finished_unix_ns") <= now + FUTURE_NS)
        memory.registry.see_requests(past)
        for instance, settings in made.settings:
            memory.registry.see_settings(instance, settings, "resource")
        memory.skews.see(made.skews)
        memory.watermarks.see(changes.rows, now, ended)
        memory.refresher.take(self._transaction, changes.rows, changes.stored, now, ended=ended, behind=behind)
        memory.counters.add("requests", changes.rows.height - len(changes.stored))
        return changes.rows.height

    def give_up_waiting(self, now: int) -> int:
        """Supplements that waited for an hour in vain are counted; halves of requests become rows. How many there were."""
        memory = self._memory
        rows, others = lone_halves.given_up(self._transaction, now - NEAR_NS)
        memory.counters.add(lone_halves.OTHERS, others)
        if not rows.is_empty():
            self._thaw(hours_touched(rows, "arrival_unix_ns", "finished_unix_ns", NEAR_NS))
            rows = unknown(self._transaction, "requests", rows)
        if not rows.is_empty():
            memory.registry.see_requests(rows.filter(pl.col("finished_unix_ns") <= now + FUTURE_NS))
            memory.watermarks.see(rows, now)
            memory.refresher.take(self._transaction, rows, [], now)
            memory.counters.add(lone_halves.HALVES, rows.height)
            memory.counters.add("requests", rows.height)
        return rows.height + others

    def write_events(self, marks: list[Annotation]) -> None:
        """Marks on the time axis, each once."""
        if not marks:
            return
        frame = pl.DataFrame(
            [(m.unix_ns, m.kind, m.text, m.source) for m in marks],
            schema={"unix_ns": pl.Int64, "kind": pl.String, "text": pl.String, "source": pl.String},
            orient="row",
        )
        self._transaction.run(
            "INSERT INTO annotations BY NAME SELECT DISTINCT * FROM marks m WHERE NOT EXISTS (SELECT 1 FROM annotations a "
            "WHERE a.unix_ns = m.unix_ns AND a.kind = m.kind AND a.text = m.text)",
            marks=frame,
        )

    def write_samples(self, samples: pl.DataFrame, settings: list[SeenSettings]) -> int:
        """Samples that are not there yet, and the settings that came with them; how many are new."""
        self._thaw(hours_touched(samples, "unix_ns", "unix_ns", NEAR_NS))
        parted = self.apart(samples)
        names = dict(zip(samples.select("instance", "unix_ns").iter_rows(), parted["instance"], strict=True))
        new = add_samples(self._transaction, parted)
        more = (
            new.clear() if new.height == parted.height else complete_samples(self._transaction, parted, self._profiles)
        )
        self.write_events(self._memory.restarts.marks(self._transaction, new))
        if new.is_empty() and more.is_empty() and not settings:
            return 0
        last = self._clock() + FUTURE_NS
        past = pl.concat([new, more]).filter(pl.col("unix_ns") <= last)
        self._memory.counters.add("future_samples", new.filter(pl.col("unix_ns") > last).height)
        self._memory.registry.see_samples(past)
        for instance, unix_ns, values in settings:
            self._memory.registry.see_scraped_settings(names.get((instance, unix_ns), instance), unix_ns, values)
        self._memory.counters.add("samples", new.height)
        for (name,), own in past.group_by("instance"):
            self.touch_sampled(str(name), own)
        return new.height

    def apart(self, samples: pl.DataFrame) -> pl.DataFrame:
        """Samples of a balanced address, by the process that answered."""
        return self._memory.registry.apart(self._transaction, samples)

    def write_devices(self, found: Iterable[Exposition]) -> int:
        """Readings of devices, and where the targets stand that told them; how many readings are new."""
        own = list(found)
        for one in own:
            if not one.samples.is_empty():
                self._memory.places.see_labels(self._transaction, str(one.samples["instance"][0]), one.labels)
        readings = devices_frame(own)
        self._thaw(hours_touched(readings, "unix_ns", "unix_ns", 0))  # else one that is sealed would come twice
        new = add_devices(self._transaction, readings)
        self._memory.counters.add("device_readings", new.height)
        self.write_events(error_marks(self._transaction, new))
        return new.height

    def touch_sampled(self, name: str, samples: pl.DataFrame) -> None:
        """Rows of the time these samples tell of: since the sample before them, a scrape interval or two."""
        first, last = samples["unix_ns"].min(), samples["unix_ns"].max()
        assert isinstance(first, int) and isinstance(last, int)
        for instance in self._memory.registry.spans_of(name, first - SAMPLE_GAP_NS, last):
            self._memory.refresher.touch(instance, first - SAMPLE_GAP_NS, last)

    def rejoin(self, now: int, force: bool = False) -> bool:
        """Join spans and scrapes anew where instances came, or after a while; rows of new joins are attributed anew. Whether any
        changed."""
        memory = self._memory
        if not (force or memory.registry.has_new or now - memory.rejoined_ns > REJOIN_NS):
            return False
        memory.rejoined_ns = now
        changed = memory.registry.join(self._profiles.family, deviations(self._transaction))
        for instance in changed:
            self.touch_recent(instance)
        self._mark(memory.registry.unnamed(self._profiles.family))
        return bool(changed)

    def _mark(self, joined: Mapping[str, bool]) -> None:
        """Note on samples whether it is known whose they are, on those of sealed hours for the last hours of a scrape."""
        memory = self._memory
        for name, value in joined.items():
            if memory.marked.get(name) != value:
                last = memory.registry.last_sample(name)
                self._thaw(hours_marked_otherwise(self._transaction, name, value, last - REJOINED_NS, last))
        mark_joined(self._transaction, joined)
        memory.marked = dict(joined)

    def touch_recent(self, instance: str) -> None:
        """What is known of an engine only now is of use for its last hours: sealed ones among them become hot again."""
        low, high = self._memory.registry.sampled_range(instance)
        low = max(low, high - REJOINED_NS)
        self._thaw(set(range((low - NEAR_NS) // HOUR_NS, (high + NEAR_NS) // HOUR_NS + 1)))
        self._memory.refresher.touch(instance, low, high)

    def _thaw(self, hours: set[int]) -> bool:
        """Sealed hours that something late touches become hot again; whether any of these hours ever was sealed."""
        return thaw(self._transaction, self._cold_files, hours, self._clock())

    def _delete(self, keys: list[str], spans: pl.DataFrame, now: int) -> None:
        times = pl.concat([spans["start_unix_ns"], spans["end_unix_ns"].filter(spans["end_unix_ns"] > 0)])
        low, high = times.min(), times.max()
        assert isinstance(low, int) and isinstance(high, int)
        gone = pl.DataFrame({"request_key": keys}, schema={"request_key": pl.String})
        window = (low - NEAR_NS, high + NEAR_NS)
        stored = self._transaction.query(
            "SELECT r.request_key, r.finished_unix_ns FROM requests r SEMI JOIN gone g USING (request_key) "
            "WHERE r.finished_unix_ns BETWEEN ? AND ?",
            list(window),
            gone=gone,
        )
        if not stored.is_empty():  # most never had a row
            delete_rows(self._transaction, stored.select("request_key"), *window)
            self._memory.dirty.add(stored, now)
            self._memory.counters.add("requests", -stored.height)

    def _take_points(self, points: pl.DataFrame) -> None:
        names = dict(identities(points["resource"]).select("resource", "instance").iter_rows())
        found, strange = samples_of_points(points, names, self._profiles)
        self._memory.counters.add("metric_points", points.height)
        self._memory.counters.add("unmapped_metric_points", strange)
        self.write_samples(*samples_frame(found))
        self.write_devices(found)

    def _write_steps(self, spans: pl.DataFrame) -> None:
        steps, broken = steps_of(spans)
        if self._thaw(hours_touched(steps, "start_unix_ns", "start_unix_ns", NEAR_NS)):
            steps = unknown(self._transaction, "engine_steps", steps)  # older than what the ledger knows
        self._memory.counters.add("broken_step_spans", broken)
        self._memory.counters.add("steps", steps.height)
        self._transaction.insert("engine_steps", steps)
