"""Rows of `gpu_samples`: each reading once, and a mark on the time axis where a device reports another error than before."""

from __future__ import annotations

import polars as pl

from phasewise.collector.records import Annotation
from phasewise.collector.transaction import Transaction

_KEY = ["device", "instance", "unix_ns"]
_BEFORE_NS = 24 * 3600 * 10**9


def add_devices(transaction: Transaction, readings: pl.DataFrame) -> pl.DataFrame:
    """Insert the readings that are not there yet (device, instance, time); returns them."""
    if readings.is_empty():
        return readings
    once = readings.unique(_KEY, keep="first", maintain_order=True)
    low, high = once["unix_ns"].min(), once["unix_ns"].max()
    known = transaction.query(
        "SELECT DISTINCT device, instance, unix_ns FROM gpu_samples s SEMI JOIN new_readings n USING (device, instance, unix_ns) "
        "WHERE s.unix_ns BETWEEN ? AND ?",
        [low, high],
        new_readings=once.select(_KEY),
    )
    new = once.join(known, on=_KEY, how="anti", maintain_order="left")
    transaction.insert("gpu_samples", new)
    return new


def error_marks(transaction: Transaction, new: pl.DataFrame) -> list[Annotation]:
    """XID errors among readings just stored. A device shows its last error until its driver is loaded again: one mark each."""
    failing = new.filter(pl.col("xid") > 0)
    if failing.is_empty():
        return []
    first, last_time = failing["unix_ns"].min(), failing["unix_ns"].max()
    assert isinstance(first, int) and isinstance(last_time, int)
    transaction.look_back("gpu_samples", within=(first - _BEFORE_NS, last_time))
    told = transaction.query(
        "SELECT device, unix_ns, xid, host FROM whole.gpu_samples WHERE xid IS NOT NULL AND unix_ns >= ? "
        "AND device IN (SELECT device FROM failing) ORDER BY device, unix_ns",
        [first - _BEFORE_NS],
        failing=failing.select("device").unique(),
    )
    last: dict[str, int] = {}
    marks = []
    for device, unix_ns, xid, host in told.iter_rows():
        if xid and last.get(device, 0) != xid and unix_ns >= first:
            where = f" of {host}" if host else ""
            marks.append(
                Annotation(unix_ns=unix_ns, kind="xid", text=f"XID {xid} on {device}{where}", source=f"device:{device}")
            )
        last[device] = xid
    return marks
