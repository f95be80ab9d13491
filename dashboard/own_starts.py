"""A mark on the time axis where this server itself began anew, and whether it had been stopped: a gap that the pages show then is none of
the engines'."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from phasewise.collector.durable import sync_path
from phasewise.collector.records import OWN_SOURCE, Annotation
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer

RUNS = "store.running"  # in the data folder, from a start of the store's process to its orderly end
STOPPED, ENDED = "Phasewise began anew: it had been stopped", "Phasewise began anew: it had ended without being stopped"
LOG = logging.getLogger("phasewise.store")


class OwnStart:
    """Of one process. The first one of a data folder has no mark."""

    def __init__(self, store: Store, data: Path) -> None:
        """To be made before anything is written. Raises MachineError where the store does not answer."""
        self._runs = data / RUNS
        self._had_ended = self._runs.exists()
        self._was_used = not store.query("SELECT 1 FROM counters LIMIT 1").is_empty()

    def mark(self, writer: Writer, now_unix_ns: int) -> None:
        """Never ends the process: on a full disk the mark is missing, and the next start takes this one for stopped."""
        try:
            if self._had_ended or self._was_used:
                text = ENDED if self._had_ended else STOPPED
                writer.annotate([Annotation(unix_ns=now_unix_ns, kind="restart", text=text, source=OWN_SOURCE)])
            self._runs.touch(mode=0o600)
            sync_path(self._runs.parent)
        except Exception:
            LOG.exception("the start could not be marked")

    def unmark(self) -> None:
        """At an orderly end."""
        with contextlib.suppress(OSError):
            self._runs.unlink(missing_ok=True)
