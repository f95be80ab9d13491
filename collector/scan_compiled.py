"""OTLP traces to columns, compiled: the same table as `scan.scan_traces`, without a Python loop over ordinary spans.

Compiled code reads every span that needs nothing changed (scan_kernel.py, scan_walk.py); the others, and requests that are not whole, go through
the plain scanner, so that what is cut, flagged, refused and said about it is decided in one place. Importing this module takes
numba; `scanners.py` decides when.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from phasewise.collector import scan
from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.records import SPAN_SCHEMA, Scanned
from phasewise.collector.scan_kernel import Columns, scan_spans, workspace
from phasewise.collector.scan_walk import RESOURCE, SCOPE, SCOPE_SPANS, walk

_CHUNK_SPANS = 4096  # read into one set of buffers
_KEPT_BYTES = 4 << 20  # of spans on the wire, from which on a thread does not keep the buffers it read them into
_MOST_PARTS = 250_001
_ROOM_BYTES = 1 << 14  # on top of what a chunk's own bytes give: six times the longest text is looked for ahead
_JSON_FACTOR = 3  # JSON text over its bytes on the wire, unless it is full of control characters: such spans are odd
_MAX_UNIX_NS = (1 << 63) - 1
_STRING, _INT64 = pa.string(), pa.int64()
_ENDS_32, _ENDS_16 = (np.arange(0, width * _CHUNK_SPANS + 1, width, dtype=np.int32) for width in (32, 16))


def scan_traces(body: bytes, received_unix_ns: int) -> Scanned:
    """As `scan.scan_traces`, to the byte."""
    data = np.frombuffer(body, np.uint8)
    items, owners, pieces = _room.items, _room.owners, _room.pieces
    spans, found, scopes = walk(data, items, owners, pieces)
    if spans < 0:
        return scan.scan_traces(body, received_unix_ns)
    reader = scan.SpanReader(received_unix_ns)
    shared = _shared(body, pieces[:found], scopes, reader)
    chunks = [
        _chunk(
            body, data, items, owners[first : min(first + _CHUNK_SPANS, spans)], first, shared, reader, received_unix_ns
        )
        for first in range(0, spans, _CHUNK_SPANS)
    ]
    rows = pa.concat_tables([table for table, _ in chunks]) if chunks else SPAN_SCHEMA.empty_table()
    return reader.scanned(rows, _all_names(names for _, names in chunks))


def _all_names(chunks: Iterable[set[str] | None]) -> set[str] | None:
    found: set[str] = set()
    for names in chunks:
        if names is None:
            return None
        found |= names
    return found


def _shared(body: bytes, pieces: NDArray[np.int64], scopes: int, reader: scan.SpanReader) -> list[scan.Shared]:
    """What the spans of each scope share. One resource or scope may come in pieces: they merge by being joined."""
    resources: dict[int, bytes] = {}
    names: list[bytes] = [b""] * scopes
    groups: list[int] = []
    for kind, owner, start, stop in pieces.tolist():
        if kind == SCOPE_SPANS:
            groups.append(owner)
        elif kind == RESOURCE:
            resources[owner] = resources.get(owner, b"") + body[start:stop]
        elif kind == SCOPE:
            names[owner] += body[start:stop]
    known: dict[tuple[bytes, bytes], scan.Shared] = {}
    shared = []
    for group, name in zip(groups, names, strict=True):
        key = (resources.get(group, b""), name)
        if key not in known:
            known[key] = reader.shared(*key)
        shared.append(known[key])
    return shared


def _chunk(
    body: bytes,
    data: NDArray[np.uint8],
    items: NDArray[np.int64],
    owners: NDArray[np.int64],
    first: int,
    shared: list[scan.Shared],
    reader: scan.SpanReader,
    received_unix_ns: int,
) -> tuple[pa.Table, set[str] | None]:
    """The rows, and the names in them where the compiled code saw them all."""
    last = first + len(owners)
    size = int((items[first:last, 1] - items[first:last, 0]).sum())
    found = _room.columns(len(owners), size)
    future_unix_ns = min(received_unix_ns + int(SPAN_LIMITS.future_s) * 10**9, _MAX_UNIX_NS)
    rows, odd = scan_spans(data, items, first, last, future_unix_ns, found)
    ordinary = found.ordinary[:rows]
    table = _table(found, rows, _scopes(owners[ordinary - first], shared, reader), received_unix_ns)
    if not odd:
        return table, _names(body, found)
    numbers = found.odd[:odd].tolist()
    read = [(n, reader.row(body[items[n, 0] : items[n, 1]], shared[owners[n - first]], n + 1)) for n in numbers]
    kept = [(n, row) for n, row in read if row is not None]
    if not kept:
        return table, None
    both = pa.concat_tables([table, pa.Table.from_batches([scan.columns([row for _, row in kept])])])
    order = np.argsort(np.concatenate([ordinary, np.array([n for n, _ in kept], np.int64)]))
    return both.take(pa.array(order)), None


def _names(body: bytes, found: Columns) -> set[str] | None:
    count, places = int(found.names.found[0]), found.names.places
    if count > len(places):
        return None
    return {body[start:stop].decode() for start, stop in places[:count].tolist()}


class _Room(threading.local):
    """What a thread fills again and again, since fresh pages cost more than what is written into them. Rows are copied out."""

    def __init__(self) -> None:
        self.items = np.empty((_MOST_PARTS, 2), np.int64)
        self.owners = np.empty(_MOST_PARTS, np.int64)
        self.pieces = np.empty((_MOST_PARTS, 4), np.int64)
        self._columns: Columns | None = None
        self._size_bytes = 0

    def columns(self, spans: int, size_bytes: int) -> Columns:
        """Empty columns with room for so many spans, which have so many bytes on the wire."""
        if size_bytes > _KEPT_BYTES:
            return _columns(spans, size_bytes)
        if self._columns is None or self._size_bytes < size_bytes:
            self._size_bytes = min(_KEPT_BYTES, 2 * size_bytes)
            self._columns = _columns(_CHUNK_SPANS, self._size_bytes)
        else:
            self._columns.names.found[0] = 0
            self._columns.names.slots.fill(0)
        return self._columns


_room = _Room()


def _columns(spans: int, size: int) -> Columns:
    json_bytes = _JSON_FACTOR * size + _ROOM_BYTES

    def text(room_bytes: int) -> NDArray[np.uint8]:
        return np.empty(room_bytes, np.uint8)

    def ends() -> NDArray[np.int32]:
        return np.zeros(spans + 1, np.int32)

    return Columns(
        text(32 * spans),
        text(16 * spans),
        text(16 * spans),
        ends(),
        text(size + _ROOM_BYTES),
        ends(),
        text(size + _ROOM_BYTES),
        ends(),
        text(json_bytes),
        ends(),
        text(json_bytes),
        ends(),
        text(json_bytes),
        ends(),
        np.empty((5, spans), np.int64),
        np.empty(spans, np.int64),
        np.empty(spans, np.int64),
        *workspace(),
    )


def _scopes(owners: NDArray[np.int64], shared: list[scan.Shared], reader: scan.SpanReader) -> Iterator[pa.Array]:
    """Columns of what is shared: scope name and version, resource, flags; the flags are counted."""
    if not len(owners):
        return iter([pa.array([], pa.string())] * 4)
    first, last = int(owners[0]), int(owners[-1])
    used = shared[first : last + 1]
    counts = [len(owners)] if first == last else np.bincount(owners - first).tolist()
    for scope, spans in zip(used, counts, strict=True):
        if scope.flags and spans:
            reader.warn(scope.flags, spans)
    columns = (
        [scope.scope_name for scope in used],
        [scope.scope_version for scope in used],
        [scope.resource for scope in used],
        [scan.flags_json(scope.flags) for scope in used],
    )
    if first == last:
        return (_repeated(column[0], len(owners)) for column in columns)
    which = pa.array(owners - first)
    return (pa.array(column, pa.string()).take(which) for column in columns)


def _table(found: Columns, rows: int, scopes: Iterator[pa.Array], received_unix_ns: int) -> pa.Table:
    scope_name, scope_version, resource, flags = scopes
    numbers = found.numbers[:, :rows].copy()
    columns = [
        _texts(found.trace_id, _ENDS_32[: rows + 1]),
        _texts(found.span_id, _ENDS_16[: rows + 1]),
        _present_texts(found.parent, found.parent_ends[: rows + 1]),
        _texts(found.name, found.name_ends[: rows + 1].copy()),
        *(_numbers(numbers[i]) for i in range(4)),
        _present_texts(found.message, found.message_ends[: rows + 1]),
        scope_name,
        scope_version,
        resource,
        _texts(found.attributes, found.attributes_ends[: rows + 1].copy()),
        _present_texts(found.events, found.events_ends[: rows + 1]),
        _present_texts(found.links, found.links_ends[: rows + 1]),
        _numbers(numbers[4]),
        flags,
        _numbers(np.full(rows, received_unix_ns, np.int64)),
    ]
    return pa.Table.from_arrays(columns, schema=SPAN_SCHEMA)


def _repeated(text: str | None, rows: int) -> pa.Array:
    return pa.nulls(rows, _STRING) if text is None else pa.repeat(text, rows)


def _numbers(values: NDArray[np.int64]) -> pa.Array:
    """These values, which nobody changes any more."""
    return pa.Array.from_buffers(_INT64, len(values), [None, pa.py_buffer(values)], 0)


def _texts(
    data: NDArray[np.uint8], ends: NDArray[np.int32], valid: pa.Buffer | None = None, nulls: int = 0
) -> pa.Array:
    """A copy of the text; the ends are taken as they are, and nobody may change them any more."""
    size = int(ends[-1])
    whole = pa.allocate_buffer(size)
    np.frombuffer(whole, np.uint8)[:] = data[:size]
    return pa.Array.from_buffers(_STRING, len(ends) - 1, [valid, pa.py_buffer(ends), whole], nulls)


def _present_texts(data: NDArray[np.uint8], ends: NDArray[np.int32]) -> pa.Array:
    """An empty text is none."""
    present = ends[1:] != ends[:-1]
    filled = int(np.count_nonzero(present))
    if not filled:
        return pa.nulls(len(present), _STRING)
    if filled == len(present):
        return _texts(data, ends.copy())
    return _texts(data, ends.copy(), pa.py_buffer(np.packbits(present, bitorder="little")), len(present) - filled)
