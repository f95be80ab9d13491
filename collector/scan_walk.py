"""Where the spans of an ExportTraceServiceRequest lie, and the pieces of the resources and scopes above them, compiled."""

from __future__ import annotations

from phasewise.collector.scan_fields import field
from phasewise.collector.scan_numbers import entry, inlined

# Kinds of pieces: bytes of a group's resource, a new scope of a group, bytes of it.
RESOURCE, SCOPE_SPANS, SCOPE = 0, 1, 2
_MAX_PARTS = 250_000  # as in wire.py: beyond it the plain scanner says so


@inlined
def _put_piece(pieces, found, kind, owner, start, stop):
    pieces[found, 0], pieces[found, 1], pieces[found, 2], pieces[found, 3] = kind, owner, start, stop
    return found + 1


@entry
def walk(data, items, owners, pieces):
    """Find spans (start, stop), the scope each belongs to, and the pieces (kind, owner, start, stop) of resources and scopes.

    Returns the counts of spans, pieces and scopes; spans -1 where the plain scanner has to say what is wrong.
    """
    parts, spans, found, scopes, groups = 0, 0, 0, 0, 0
    at, end = 0, data.size
    while at < end:
        tag, group, group_stop, _ = field(data, at, end)
        parts += 1
        if group_stop < 0 or parts > _MAX_PARTS:
            return -1, 0, 0
        at = group_stop
        if tag != 0x0A:
            continue
        for take_scopes in (False, True):
            inner = group
            while inner < group_stop:
                tag, first, last, _ = field(data, inner, group_stop)
                if last < 0:
                    return -1, 0, 0
                inner = last
                if not take_scopes:
                    parts += 1
                    if parts > _MAX_PARTS:
                        return -1, 0, 0
                    if tag == 0x0A:
                        found = _put_piece(pieces, found, RESOURCE, groups, first, last)
                elif tag == 0x12:
                    found = _put_piece(pieces, found, SCOPE_SPANS, groups, first, last)
                    while first < last:
                        tag, begin, stop, _ = field(data, first, last)
                        parts += 1
                        if stop < 0 or parts > _MAX_PARTS:
                            return -1, 0, 0
                        first = stop
                        if tag == 0x12:
                            items[spans, 0], items[spans, 1], owners[spans] = begin, stop, scopes
                            spans += 1
                        elif tag == 0x0A:
                            found = _put_piece(pieces, found, SCOPE, scopes, begin, stop)
                    scopes += 1
        groups += 1
    return spans, found, scopes
