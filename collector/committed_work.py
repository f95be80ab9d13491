"""Work on the store that counts once it is committed: what memory knows goes with the rows it belongs to, and memory of what was rolled
back is forgotten, and read anew from what is committed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from phasewise.collector.archive import SpanArchive
from phasewise.collector.cold import thaw
from phasewise.collector.completion import Identifiers
from phasewise.collector.context import Attribute
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.ledger import Ledger
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import Annotation
from phasewise.collector.row_writer import RowWriter
from phasewise.collector.sidecar import WITNESS, CommitLog
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction
from phasewise.collector.writer_memory import Surroundings, recalled
from phasewise.rules.errors import InputError, MachineError
from phasewise.rules.load import Rulebook

log = logging.getLogger(__name__)
T = TypeVar("T")


class CommittedWork:
    """The store, what is remembered of it, and transactions that keep the two together. Those who work on it take turns: `_lock`."""

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        rulebook: Rulebook,
        attribute: Attribute,
        clock: Callable[[], int],
        stated: Mapping[str, object],
    ) -> None:
        self._store = store
        self._clock = clock
        self._profiles = Profiles(rulebook.engines)
        self._identifiers = Identifiers(rulebook.engines.values())
        self._archive = SpanArchive(data_dir)
        self._journal = data_dir / "journal"
        self._reader = JournalReader(self._journal)
        self._around = Surroundings(
            store, self._reader, self._archive, self._profiles, attribute, stated, clock, Ledger()
        )
        self._lock = threading.RLock()
        self._wrote = False
        self._guards = False
        self._write_error = ""
        self._commits = CommitLog(data_dir / WITNESS)
        self._losses: list[str] = []
        self._stale = True  # memory must be read anew from the store
        self._recover()
        self.report_loss(self._commits.missing())

    def annotate(self, marks: Iterable[Annotation]) -> None:
        """Marks on the time axis; the same mark twice is one."""

        def add() -> None:
            with self._writing() as (_, rows):
                rows.write_events(list(marks))

        with self._lock:
            self._guarded(add)

    def report_loss(self, text: str) -> None:
        """Something that was stored is not there any more: said in health and as a mark on the time axis."""
        if text:
            log.error("%s", text)
            self._losses.append(text)
            with contextlib.suppress(MachineError):  # where nothing can be written, health says both
                self.annotate([Annotation(unix_ns=self._clock(), kind="loss", text=text, source="store")])

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._guards:  # part of a work whose transaction commits at its end
            return work()
        if self._stale:
            self._recover()
        self._wrote = False
        self._guards = True
        try:
            done = work()
        except BaseException as error:
            self._stale = True  # what was rolled back must be neither counted nor taken for read
            if isinstance(error, Exception) and not isinstance(error, InputError):
                self._write_error = f"nothing can be stored: {type(error).__name__}: {error}"[:300]
            self._memory.counters.roll_back()
            with contextlib.suppress(Exception):  # where reading fails too, the next call tries again and says so
                self._recover()
            raise
        finally:
            self._guards = False
        if self._wrote:
            self._write_error = ""
            self._memory.counters.commit()
            self._commits.commit()
        return done

    def _recover(self) -> None:
        """Read memory from what is committed."""
        self._memory = recalled(self._around)
        self._commits.recall(self._memory.commit)
        self._stale = False

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[Transaction, RowWriter]]:
        with self._store.write() as transaction:
            yield transaction, RowWriter(self._around, self._identifiers, self._memory, transaction)

    def _commit_state(self, transaction: Transaction) -> None:
        """What memory knows goes with the rows it belongs to."""
        if self._write_error:  # a write of any kind tells whether writing works again
            transaction.execute("DELETE FROM positions WHERE name = 'tried'")
            transaction.execute("INSERT INTO positions VALUES ('tried', ?)", [str(self._clock())])
        self._memory.store(transaction, self._clock())
        self._number(transaction)

    def _number(self, transaction: Transaction) -> None:
        self._wrote = True
        self._commits.store(transaction, self._clock(), str(self._memory.position or Position(0, 0)))

    def _thaw(self, transaction: Transaction, hours: set[int]) -> None:
        """Sealed hours that something late touches become hot again."""
        thaw(transaction, self._store.cold_files, hours, self._clock())
