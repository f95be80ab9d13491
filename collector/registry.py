"""The instances seen: who, when, with which settings, and which scrape belongs to which spans. Kept in memory, stored when changed.

In the table a span instance has one row. A scrape has one row a life and span instance, over the time that its samples are of
that instance; `joined_to` is null where nothing tells whose they are. What files say of engine processes stands beside them (kind `facts`), under the
name a file gives the process and since when it holds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import polars as pl

from phasewise.collector import joins
from phasewise.collector.balanced import PROCESS, RENAMED, note_pending, pending, rename_hot
from phasewise.collector.context import Setting
from phasewise.collector.facts import Statement, as_settings, merged, noted
from phasewise.collector.joins import Deviation, Join, SampleRange, joins_of, until
from phasewise.collector.lives import Life, with_samples, with_settings
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import Instance, columns
from phasewise.collector.schemas import polars_schema
from phasewise.collector.stated_facts import StatedFacts, text_of
from phasewise.collector.transaction import Transaction
from phasewise.rules.errors import InputError

_FIELDS = list(columns(Instance))
_KEY = ("instance", "kind")
_OTHERS = [name for name in _FIELDS if name not in _KEY]
# What rows of `requests` tell of their instance.
SEEN = ("instance", "engine", "engine_version", "model", "service", "arrival_unix_ns", "finished_unix_ns")


class Registry:
    """Instances by name: those of spans, and the lives of scrapes.

    stated: settings that the operator states for every engine (accelerator, model); they win over what telemetry says.
    """

    def __init__(self, rows: pl.DataFrame, stated: Mapping[str, object] = MappingProxyType({})) -> None:
        found = [Instance(**row) for row in rows.iter_rows(named=True)]
        self._spans = {one.instance: one for one in found if one.kind == "spans"}
        self._lives: dict[str, list[Life]] = {}
        self._joins: dict[str, list[Join]] = {}  # by scrape
        self._facts = StatedFacts(found)
        self._changed: set[tuple[str, str]] = set()
        self._balanced = {one.instance.partition(PROCESS)[0] for one in found if PROCESS in one.instance}
        self._unseen = True
        self._stated = stated
        for one in sorted(found, key=lambda i: i.first_seen_unix_ns):
            if one.kind == "scrape":
                self._recall(one)
        self._recall_joins([one for one in found if one.kind == "scrape"])
        for name in list(self._spans):
            self._see_stated(name)

    def __len__(self) -> int:
        """Names of spans and of scrapes."""
        return len(self._spans) + len(self._lives)

    def see_requests(self, rows: pl.DataFrame) -> None:
        """Engine replicas behind rows of `requests`."""
        known = rows.filter(pl.col("instance").is_not_null())
        facts = known.group_by("instance").agg(
            pl.col("engine").last(),
            pl.col("engine_version").drop_nulls().last(),
            pl.col("model").drop_nulls().last(),
            pl.col("service").drop_nulls().last(),
            pl.col("arrival_unix_ns").min(),
            pl.col("finished_unix_ns").max(),
        )
        for name, engine, version, model, service, first, last in facts.iter_rows():
            self._see(
                Instance(
                    instance=name,
                    engine=engine,
                    engine_version=version,
                    model=model,
                    service=service,
                    kind="spans",
                    first_seen_unix_ns=first,
                    last_seen_unix_ns=last,
                )
            )
            self._see_stated(name)

    def see_samples(self, samples: pl.DataFrame) -> None:
        facts = samples.group_by("instance", "process_start_unix_s").agg(
            pl.col("engine").last(),
            pl.col("model").drop_nulls().last(),
            pl.col("unix_ns").min().alias("first"),
            pl.col("unix_ns").max().alias("last"),
        )
        for name, started, engine, model, first, last in facts.sort("first").iter_rows():
            starts = frozenset() if started is None else frozenset({float(started)})
            before = self._lives.get(name, [])
            after = with_samples(before, Life(name, engine, first, last, model, starts))
            self._unseen = self._unseen or len(after) != len(before)
            self._put_lives(name, after)

    def apart(self, transaction: Transaction, samples: pl.DataFrame) -> pl.DataFrame:
        """Samples of an address behind which several processes answer in turn (a balancer), each named `ADDRESS#START` by the start of
        its process: counters of two engines under one name would tell nothing. Those stored before this was seen are renamed."""
        starts = samples.filter(pl.col("process_start_unix_s").is_not_null())
        for (name,), own in starts.group_by("instance", maintain_order=True):
            if str(name) not in self._balanced and self._is_balanced(str(name), own):
                self._balanced.add(str(name))
                self._part(transaction, str(name))
        if not self._balanced:
            return samples
        chosen = pl.col("instance").is_in(list(self._balanced)) & pl.col("process_start_unix_s").is_not_null()
        named = pl.concat_str("instance", pl.lit(PROCESS), pl.col("process_start_unix_s").round(2).cast(pl.String))
        return samples.with_columns(pl.when(chosen).then(named).otherwise("instance").alias("instance"))

    def _is_balanced(self, name: str, own: pl.DataFrame) -> bool:
        """Whether the times of two processes overlap: after a restart the one before answers no more."""
        times = {
            start: (life.first_unix_ns, life.last_unix_ns)
            for life in self._lives.get(name, [])
            for start in life.starts_unix_s
        }
        if any(len(life.starts_unix_s) > 1 for life in self._lives.get(name, [])):
            return True
        for start, at in own.select("process_start_unix_s", "unix_ns").iter_rows():
            low, high = times.get(start, (at, at))
            times[start] = min(low, at), max(high, at)
        ordered = sorted(times.values())
        return any(later[0] < before[1] for before, later in itertools.pairwise(ordered))

    def _part(self, transaction: Transaction, name: str) -> None:
        """The samples and the life of a balanced address divided among the processes that answered. Sealed samples are renamed later."""
        rename_hot(transaction, [name])
        note_pending(transaction, [*pending(transaction), name])
        lives = self._lives.pop(name, [])
        self._joins.pop(name, None)
        self._changed.add((name, "scrape"))
        seen = (
            min((one.first_unix_ns for one in lives), default=0),
            max((one.last_unix_ns for one in lives), default=0),
        )
        transaction.look_back("engine_samples", within=seen)
        stored = transaction.query(
            f"SELECT CASE WHEN instance = ? THEN {RENAMED} ELSE instance END AS instance, engine, model, process_start_unix_s, unix_ns "
            "FROM whole.engine_samples WHERE process_start_unix_s IS NOT NULL AND (instance = ? OR starts_with(instance, ?))",
            [name, name, name + PROCESS],
        )
        if not stored.is_empty():
            self.see_samples(stored)

    def see_settings(self, instance: str, settings: Mapping[str, object], source: str) -> None:
        """Settings of a span instance already seen; what another source said of a name is kept beside it."""
        own = self._spans.get(instance)
        if own is None or not settings:
            return
        known = json.loads(own.settings) if own.settings else {}
        told = merged(known, noted(settings, source))
        if told != known:
            self._put(replace(own, settings=json.dumps(told, sort_keys=True)))

    def see_scraped_settings(
        self, scrape: str, unix_ns: int, settings: Mapping[str, object], source: str = "scrape"
    ) -> bool:
        """Settings that a scrape already seen showed at a time, or the server behind it; they hold for that life of it. Whether they say
        anything new."""
        if not settings or scrape not in self._lives:
            return False
        # Every scrape says them again: the time is kept where it tells when somebody asked.
        told = noted(settings, source, None if source == "scrape" else unix_ns)
        before = self._lives[scrape]
        after = with_settings(before, unix_ns, told)
        self._put_lives(scrape, after)
        return [as_settings(one.settings) for one in after] != [as_settings(one.settings) for one in before]

    def see_statement(self, name: str, said: Statement) -> list[str]:
        """What a file says of the process of that name (of spans or of a scrape), seen or not yet; the span instances it is about."""
        if self._facts.add(name, said):
            self._changed.add((name, "facts"))
        joined = [join.spans for join in self._joins.get(name, [])]
        return list(dict.fromkeys([*joined, *([name] if name in self._spans else [])]))

    def alone_of(
        self, family: str | None, family_of: Callable[[str | None], str | None]
    ) -> tuple[str | None, list[str]]:
        """The only engine process of a family that is known, None where there are several or none; and the names of all."""
        spans = [one.instance for one in self._spans.values() if family_of(one.engine) == family]
        scrapes = [name for name, lives in self._lives.items() if family_of(lives[-1].engine) == family]
        free = [name for name in scrapes if not self._joins.get(name)]
        names = sorted({*spans, *scrapes})
        processes = [*spans, *(name for name in free if name not in spans)]
        return (processes[0] if len(processes) == 1 else None), names

    def _see_stated(self, instance: str) -> None:
        self.see_settings(instance, self._stated, "user")

    @property
    def has_new(self) -> bool:
        """Whether an instance or a life came that no join has looked at."""
        return self._unseen

    def join(self, family: Callable[[str | None], str | None], deviation: Deviation) -> set[str]:
        """Join spans and scrapes anew; returns the span instances whose join changed."""
        self._unseen = False
        lives = [life for own in self._lives.values() for life in own]
        found = joins_of(self._spans.values(), lives, family, deviation)
        before = _by(self._joins.values(), lambda join: join.spans)
        after = _by([found], lambda join: join.spans)
        for scrape, own in (by_scrape := _by([found], lambda join: join.scrape)).items():
            if own != self._joins.get(scrape, []):
                self._changed.add((scrape, "scrape"))
        self._changed |= {(scrape, "scrape") for scrape in self._joins if scrape not in by_scrape}
        self._joins = by_scrape
        for name, one in self._spans.items():
            last = after[name][-1] if name in after else None
            to, by = (last.scrape, last.by) if last else (None, None)
            if (one.joined_to, one.joined_by) != (to, by):
                self._put(replace(one, joined_to=to, joined_by=by))
        return {name for name in {*before, *after} if before.get(name) != after.get(name)}

    def sample_ranges(self, spans_instance: str) -> list[SampleRange]:
        """Where the samples of a span instance stand, in order of time."""
        names = {join.scrape for own in self._joins.values() for join in own if join.spans == spans_instance}
        return joins.sample_ranges(self._rows_of({*names, spans_instance}), spans_instance)

    def peers(self, spans_instance: str) -> list[str]:
        """Span instances that are one replica with this one, itself included."""
        names = {join.scrape for own in self._joins.values() for join in own if join.spans == spans_instance}
        return joins.peers(self._rows_of(names), spans_instance)

    def spans_of(self, scrape: str, first_unix_ns: int, last_unix_ns: int) -> list[str]:
        """Span instances that samples of that name and time belong to."""
        found = [
            join.spans
            for join in self._joins.get(scrape, [])
            if join.from_unix_ns <= last_unix_ns and first_unix_ns <= join.to_unix_ns
        ]
        return list(dict.fromkeys([*found, *([scrape] if scrape in self._spans else [])]))

    def last_sample(self, scrape: str) -> int:
        """When a scrape already seen was read last (Unix nanoseconds)."""
        return max(life.last_unix_ns for life in self._lives[scrape])

    def sampled_range(self, spans_instance: str) -> tuple[int, int]:
        """Time that the scrapes of a replica cover; without scrapes, when it was seen itself."""
        ranges = self.sample_ranges(spans_instance)
        if ranges:
            return ranges[0].from_unix_ns, max(one.to_unix_ns for one in ranges)
        own = self._spans[spans_instance]
        return own.first_seen_unix_ns, own.last_seen_unix_ns

    def settings(self, spans_instance: str, first_unix_ns: int = 0, last_unix_ns: int = 2**62) -> dict[str, Setting]:
        """Settings of a replica in some time: what its spans, its scrapes and files about either say, the most believed first."""
        columns: list[Mapping[str, object]] = []
        ranges = self.sample_ranges(spans_instance)
        for one in ranges:
            for life in self._lives[one.scrape]:
                inside = max(life.first_unix_ns, one.from_unix_ns, first_unix_ns)
                if inside <= min(life.last_unix_ns, one.to_unix_ns, last_unix_ns):
                    columns.append(life.settings)
        own = self._spans.get(spans_instance)
        if own is not None and own.settings:
            columns.append(json.loads(own.settings))
        names = {spans_instance, *(one.scrape for one in ranges)}
        return as_settings(merged(*columns, *self._facts.settings(names, last_unix_ns)))

    def unnamed(self, family: Callable[[str | None], str | None]) -> dict[str, bool]:
        """Scrapes without a name -> whether it is known whose they are."""
        engines = [(one.instance, one.engine) for one in self._spans.values()]
        engines += [(name, lives[-1].engine) for name, lives in self._lives.items()]
        found = {}
        for name, lives in self._lives.items():
            if name.startswith("unnamed:"):
                same = [one for one, engine in engines if one != name and family(engine) == family(lives[-1].engine)]
                found[name] = bool(self._joins.get(name)) or not same
        return found

    def store(self, transaction: Transaction) -> None:
        """Write what changed."""
        if not self._changed:
            return
        # Instances of spans are one row each, and every pass over the journal changes some: others are rare.
        spans = [self._row(self._spans[name]) for name, kind in sorted(self._changed) if kind == "spans"]
        others = sorted((name, kind) for name, kind in self._changed if kind != "spans")
        transaction.replace(
            "instances", _KEY, [*_KEY, *_OTHERS], [[row[n] for n in (*_KEY, *_OTHERS)] for row in spans]
        )
        if others:
            rows = [self._row(one) for one in self._facts.of(name for name, kind in others if kind == "facts")]
            rows += self._rows_of({name for name, kind in others if kind == "scrape"})
            transaction.run(
                "DELETE FROM instances WHERE EXISTS (SELECT 1 FROM changed c WHERE c.instance = instances.instance "
                "AND c.kind = instances.kind)",
                changed=pl.DataFrame(others, schema={"instance": pl.String, "kind": pl.String}, orient="row"),
            )
            transaction.insert("instances", pl.DataFrame(rows, schema=polars_schema(Instance), orient="row"))
        self._changed.clear()

    @staticmethod
    def _row(one: Instance) -> dict[str, object]:
        return {name: getattr(one, name) for name in _FIELDS}

    def _rows_of(self, scrapes: set[str]) -> list[dict[str, object]]:
        """Rows of some scrapes: each life, divided among the span instances it is joined to."""
        rows = []
        for scrape in sorted(scrapes & self._lives.keys()):
            for life in self._lives[scrape]:
                parts: list[tuple[int, int, Join | None]] = [
                    (max(life.first_unix_ns, join.from_unix_ns), min(life.last_unix_ns, join.to_unix_ns), join)
                    for join in self._joins.get(scrape, [])
                ]
                meeting = [part for part in parts if part[0] <= part[1]]
                for first, last, join in meeting or [(life.first_unix_ns, life.last_unix_ns, None)]:
                    row = Instance(
                        instance=scrape,
                        engine=life.engine,
                        model=life.model,
                        kind="scrape",
                        first_seen_unix_ns=first,
                        last_seen_unix_ns=last,
                        engine_version=text_of(life.settings, "engine_version"),
                        settings=json.dumps(dict(life.settings), sort_keys=True) if life.settings else None,
                        joined_to=join.spans if join else None,
                        joined_by=join.by if join else None,
                        process_start_unix_s=life.started_unix_s,
                    )
                    rows.append(self._row(row))
        return rows

    def _recall(self, row: Instance) -> None:
        """A life, or a part of it, out of a stored row."""
        starts = frozenset() if row.process_start_unix_s is None else frozenset({row.process_start_unix_s})
        name, first, last = row.instance, row.first_seen_unix_ns, row.last_seen_unix_ns
        life = Life(name, row.engine, first, last, row.model, starts, json.loads(row.settings) if row.settings else {})
        self._lives[name] = with_samples(self._lives.get(name, []), life)

    def _recall_joins(self, rows: list[Instance]) -> None:
        """Joins as `join` made them: the last of a life holds until the next one begins."""
        for row in sorted(rows, key=lambda one: (one.first_seen_unix_ns, one.joined_to or "")):
            own = self._lives[row.instance]
            life = max((one for one in own if one.first_unix_ns <= row.first_seen_unix_ns), key=_first)
            if row.joined_to:
                end = until(life, own) if row.last_seen_unix_ns >= life.last_unix_ns else row.last_seen_unix_ns
                join = Join(row.joined_to, row.instance, row.joined_by or "", row.first_seen_unix_ns, end)
                self._joins.setdefault(row.instance, []).append(join)

    def _see(self, seen: Instance) -> None:
        own = self._spans.get(seen.instance)
        if own is None:
            self._unseen = True
            self._put(seen)
            return
        updated = replace(
            own,
            engine=seen.engine or own.engine,
            engine_version=seen.engine_version or own.engine_version,
            model=seen.model or own.model,
            service=seen.service or own.service,
            first_seen_unix_ns=min(own.first_seen_unix_ns, seen.first_seen_unix_ns),
            last_seen_unix_ns=max(own.last_seen_unix_ns, seen.last_seen_unix_ns),
        )
        if updated != own:
            self._put(updated)

    def _put(self, one: Instance) -> None:
        self._spans[one.instance] = one
        self._changed.add((one.instance, one.kind))

    def _put_lives(self, scrape: str, lives: list[Life]) -> None:
        before = self._lives.get(scrape, [])
        if lives != before or [dict(one.settings) for one in lives] != [dict(one.settings) for one in before]:
            self._lives[scrape] = lives
            self._changed.add((scrape, "scrape"))


def facts_names(registry: Registry, profiles: Profiles, said: Statement, instance: str | None) -> list[str]:
    """Under which names a statement is kept. Raises InputError where it names no process and several, or none, could be meant."""
    if instance or said.names:
        return [instance] if instance else list(said.names)
    alone, known = registry.alone_of(profiles.family(said.engine), profiles.family)
    if alone is None:
        listed = f"known are {', '.join(known[:8])}" if known else "none has been seen yet"
        raise InputError("--instance", "", f"is needed: which {said.engine} process this is about is not told", listed)
    return [alone]


def _first(life: Life) -> int:
    return life.first_unix_ns


def _by(found: Iterable[Iterable[Join]], name: Callable[[Join], str]) -> dict[str, list[Join]]:
    """Joins by one of their names, in their order."""
    grouped: dict[str, list[Join]] = {}
    for own in found:
        for join in own:
            grouped.setdefault(name(join), []).append(join)
    return grouped
