"""Sealed samples of a balanced address get the names of its processes: hour by hour, beside the writer."""

from __future__ import annotations

from phasewise.collector.balanced import CHOSEN, RENAMED, note_pending, pending, rename_hot
from phasewise.collector.lake import HOUR_NS, Lake
from phasewise.collector.rewriting import rewrite
from phasewise.collector.store import Store

KIND = "engine_samples"
HOURS_A_RUN = 8
_COLUMNS = f"* REPLACE (CASE WHEN {CHOSEN} THEN {RENAMED} ELSE instance END AS instance)"


def rename_sealed(store: Store, lake: Lake, most: int = HOURS_A_RUN) -> int:
    """Rename what is sealed in up to `most` hours; how many were written anew. Raises MachineError where the disk refuses."""
    addresses = pending(store)
    if not addresses:
        return 0
    found = store.query(
        f"SELECT DISTINCT unix_ns // {HOUR_NS} AS hour FROM engine_samples WHERE {CHOSEN} ORDER BY hour", [addresses]
    )
    hours = found["hour"].to_list()
    done = 0
    for hour in hours[:most]:
        rewritten = rewrite(store, lake, KIND, hour, _COLUMNS, "TRUE", [addresses])
        with store.write() as transaction:
            done += rewritten is not None and rewritten.show(transaction)
    with store.write() as transaction:
        rename_hot(transaction, addresses)
        if not hours:
            note_pending(transaction, [name for name in pending(transaction) if name not in addresses])
    return done
