"""The ordinary spans of a request as columns, compiled.

A span that needs anything but copying (a flag, a cut, a repair, a refusal) is odd: its number is handed back, nothing of it is
kept here, and the plain scanner reads it. So what is written here need only be right for what is accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.scan_fields import Names, field, no_names, note_name, pair, same_bytes, text_hash
from phasewise.collector.scan_numbers import compiled, entry, load_word, put_unsigned, store_word
from phasewise.collector.scan_text import (
    DEPTH,
    SLACK_BYTES,
    copy_text,
    put_attribute_value,
    put_hex,
    put_text,
    put_word,
)

_ATTRIBUTES, _EVENTS, _LINKS = SPAN_LIMITS.attributes, SPAN_LIMITS.events, SPAN_LIMITS.links
_KEY_BYTES = SPAN_LIMITS.key_bytes
_SCRATCH_BYTES = SPAN_LIMITS.value_bytes + SLACK_BYTES
_U0 = np.uint64(0)
_MAX_UNIX_NS = np.uint64((1 << 63) - 1)
_SMALL = np.uint64(1 << 31)
_EVENT_NAME, _EVENT_TIME, _ATTRIBUTES_KEY, _TRACE_KEY, _SPAN_KEY = (
    np.frombuffer(text, np.uint8).copy()
    for text in (b'{"name":', b',"unix_ns":', b',"attributes":{', b'{"trace_id":"', b'","span_id":"')
)


class Columns(NamedTuple):
    """Room for the ordinary spans of a chunk; texts as bytes with the offsets of their ends after a leading 0."""

    trace_id: NDArray[np.uint8]
    span_id: NDArray[np.uint8]
    parent: NDArray[np.uint8]
    parent_ends: NDArray[np.int32]
    name: NDArray[np.uint8]
    name_ends: NDArray[np.int32]
    message: NDArray[np.uint8]
    message_ends: NDArray[np.int32]
    attributes: NDArray[np.uint8]
    attributes_ends: NDArray[np.int32]
    events: NDArray[np.uint8]
    events_ends: NDArray[np.int32]
    links: NDArray[np.uint8]
    links_ends: NDArray[np.int32]
    numbers: NDArray[np.int64]  # [5, rows]: kind, start, end, status code, dropped
    ordinary: NDArray[np.int64]  # numbers of the spans kept here
    odd: NDArray[np.int64]  # numbers of the others
    keys: NDArray[np.int64]  # of a span and the one before: start, stop, where written, size there
    inner_keys: NDArray[np.int64]  # of an event or link
    hashes: NDArray[np.uint64]
    stack: NDArray[np.int64]
    scratch: NDArray[np.uint8]
    names: Names  # of attributes at any depth, and of events


def workspace() -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8], Names
]:
    """The last six of the columns: compiled code here allocates nothing, which lets numba count no references."""
    return (
        np.empty((2, _ATTRIBUTES, 4), np.int64),
        np.empty((_ATTRIBUTES, 2), np.int64),
        np.empty(_ATTRIBUTES, np.uint64),
        np.empty((DEPTH, 5), np.int64),
        np.empty(_SCRATCH_BYTES, np.uint8),
        no_names(),
    )


@compiled
def _is_repeated(data, keys, count, key, key_stop):
    for i in range(count):
        if same_bytes(data, keys[i, 0], keys[i, 1], key, key_stop):
            return True
    return False


@compiled
def _put_attributes(out, at, data, start, stop, wanted, keys, stack, names):
    """Members of a JSON object from the repeated KeyValue field with this tag; -1 refuses."""
    count = 0
    while start < stop:
        tag, first, last, _ = field(data, start, stop)
        start = last
        if tag != wanted:
            continue
        key, key_stop, value, value_stop = pair(data, first, last)
        if value_stop < 0 or key == key_stop or key_stop - key > _KEY_BYTES or count >= _ATTRIBUTES:
            return -1
        if _is_repeated(data, keys, count, key, key_stop):
            return -1
        note_name(data, key, key_stop, text_hash(data, key, key_stop), names)
        keys[count, 0], keys[count, 1] = key, key_stop
        if count:
            out[at] = 44
            at += 1
        at = put_text(out, at, data, key, key_stop)
        if at < 0:
            return -1
        out[at] = 58
        at = put_attribute_value(out, at + 1, data, value, value_stop, key, key_stop, stack, names)
        if at < 0 or at + SLACK_BYTES > out.size:
            return -1
        count += 1
    return at


@compiled
def _put_event(out, at, data, start, stop, keys, stack, names):
    if at + SLACK_BYTES > out.size:
        return -1
    name, name_stop, unix_ns = start, start, _U0
    inner = start
    while inner < stop:
        tag, first, last, bits = field(data, inner, stop)
        if last < 0:
            return -1
        inner = last
        if tag == 0x09:
            unix_ns = load_word(data, first)
        elif tag == 0x12:
            if name != name_stop:
                return -1
            name, name_stop = first, last
        elif tag == 0x20:
            if bits >= _SMALL:
                return -1
        elif tag != 0x1A and tag >> 3 <= 4:
            return -1
    if unix_ns > _MAX_UNIX_NS:
        return -1
    note_name(data, name, name_stop, text_hash(data, name, name_stop), names)
    at = put_word(out, at, _EVENT_NAME)
    at = put_text(out, at, data, name, name_stop)
    if at < 0:
        return -1
    at = put_word(out, at, _EVENT_TIME)
    at = put_unsigned(out, at, unix_ns)
    at = put_word(out, at, _ATTRIBUTES_KEY)
    at = _put_attributes(out, at, data, start, stop, 0x1A, keys, stack, names)
    if at < 0:
        return -1
    out[at], out[at + 1] = 125, 125
    return at + 2


@compiled
def _put_link(out, at, scratch, data, start, stop, keys, stack, names):
    if at + 2 * SLACK_BYTES > out.size:
        return -1
    trace, span, seen = start, start, 0
    inner = start
    while inner < stop:
        tag, first, last, bits = field(data, inner, stop)
        if last < 0:
            return -1
        inner = last
        if tag == 0x0A and seen & 1 == 0 and last - first == 16:
            trace = first
            seen |= 1
        elif tag == 0x12 and seen & 2 == 0 and last - first == 8:
            span = first
            seen |= 2
        elif tag == 0x1A:
            if copy_text(scratch, 0, data, first, last) < 0:
                return -1
        elif tag == 0x28:
            if bits >= _SMALL:
                return -1
        elif tag != 0x22 and tag != 0x35 and tag >> 3 <= 6:
            return -1
    if seen != 3:
        return -1
    at = put_word(out, at, _TRACE_KEY)
    at = put_hex(out, at, data, trace, trace + 16)
    at = put_word(out, at, _SPAN_KEY)
    at = put_hex(out, at, data, span, span + 8)
    out[at] = 34
    at = put_word(out, at + 1, _ATTRIBUTES_KEY)
    at = _put_attributes(out, at, data, start, stop, 0x22, keys, stack, names)
    if at < 0:
        return -1
    out[at], out[at + 1] = 125, 125
    return at + 2


@compiled
def _is_zero(data, start, stop):
    for i in range(start, stop):
        if data[i]:
            return False
    return True


@entry
def scan_spans(data, items, first_span, last_span, future_unix_ns, c):
    """Fill the columns with the ordinary ones of these spans; returns how many there are, and how many odd ones."""
    rows, odd = 0, 0
    keys, inner_keys, hashes, stack, scratch, names = c.keys, c.inner_keys, c.hashes, c.stack, c.scratch, c.names
    previous = 0
    now = 0
    for number in range(first_span, last_span):
        at, stop = items[number, 0], items[number, 1]
        mine, before = keys[now], keys[1 - now]
        known = previous  # keys of the span before; as long as they match none can be a repetition
        count, hashed = 0, 0
        matching = True
        trace, span, parent, parent_size, kind, name, name_stop = 0, 0, 0, 0, 0, 0, 0
        seen = 0
        start_ns, end_ns, dropped = _U0, _U0, _U0
        code, message, message_stop, events, links = 0, 0, 0, 0, 0
        a, e, li = c.attributes_ends[rows] * 1, c.events_ends[rows] * 1, c.links_ends[rows] * 1
        a, e, li = np.int64(a), np.int64(e), np.int64(li)
        c.attributes[a] = 123
        a += 1
        good = True
        while at < stop:
            tag, first, last, bits = field(data, at, stop)
            if last < 0:
                good = False
                break
            at = last
            if tag == 0x4A:
                key, key_stop, value, value_stop = pair(data, first, last)
                size = key_stop - key
                if value_stop < 0 or size == 0 or size > _KEY_BYTES or count >= _ATTRIBUTES:
                    good = False
                    break
                if a + 6 * size + SLACK_BYTES > c.attributes.size:
                    good = False
                    break
                if count:
                    c.attributes[a] = 44
                    a += 1
                if matching and not (
                    count < known and same_bytes(data, before[count, 0], before[count, 1], key, key_stop)
                ):
                    matching = False
                mine[count, 0], mine[count, 1], mine[count, 2] = key, key_stop, a
                if matching:
                    written = before[count, 2]
                    for i in range(0, before[count, 3], 8):
                        store_word(c.attributes, a + i, load_word(c.attributes, written + i))
                    a += before[count, 3]
                else:
                    while hashed <= count:
                        hashes[hashed] = text_hash(data, mine[hashed, 0], mine[hashed, 1])
                        hashed += 1
                    for i in range(count):
                        if hashes[i] == hashes[count] and same_bytes(data, mine[i, 0], mine[i, 1], key, key_stop):
                            good = False
                    if not good:
                        break
                    note_name(data, key, key_stop, hashes[count], names)
                    a = put_text(c.attributes, a, data, key, key_stop)
                    if a < 0:
                        good = False
                        break
                    c.attributes[a] = 58
                    a += 1
                mine[count, 3] = a - mine[count, 2]
                a = put_attribute_value(c.attributes, a, data, value, value_stop, key, key_stop, stack, names)
                if a < 0 or a + SLACK_BYTES > c.attributes.size:
                    good = False
                    break
                count += 1
            elif tag == 0x0A:
                good = last - first == 16
                trace = first
                seen |= 1
            elif tag == 0x12:
                good = last - first == 8
                span = first
                seen |= 2
            elif tag == 0x22:
                parent, parent_size = first, last - first
                good = parent_size == 0 or parent_size == 8
            elif tag == 0x2A:
                good = name_stop == 0
                name, name_stop = first, last
            elif tag == 0x30:
                good = bits < _SMALL
                kind = np.int64(bits)
            elif tag == 0x39:
                start_ns = load_word(data, first)
            elif tag == 0x41:
                end_ns = load_word(data, first)
            elif tag == 0x5A:
                good = events < _EVENTS and e + SLACK_BYTES <= c.events.size
                if good:
                    c.events[e] = 44 if events else 91
                    e = _put_event(c.events, e + 1, data, first, last, inner_keys, stack, names)
                    events += 1
                    good = e >= 0
            elif tag == 0x6A:
                good = links < _LINKS and li + SLACK_BYTES <= c.links.size
                if good:
                    c.links[li] = 44 if links else 91
                    li = _put_link(c.links, li + 1, scratch, data, first, last, inner_keys, stack, names)
                    links += 1
                    good = li >= 0
            elif tag == 0x7A:
                good = seen & 4 == 0
                seen |= 4
                inner = first
                while inner < last and good:
                    inner_tag, begin, inner_stop, bits = field(data, inner, last)
                    if inner_stop < 0:
                        good = False
                        break
                    inner = inner_stop
                    if inner_tag == 0x12:
                        good = message_stop == 0
                        message, message_stop = begin, inner_stop
                    elif inner_tag == 0x18:
                        good = bits < _SMALL
                        code = np.int64(bits)
                    else:
                        good = inner_tag >> 3 > 3
            elif tag == 0x50 or tag == 0x60 or tag == 0x70:
                flag = 8 if tag == 0x50 else 16 if tag == 0x60 else 32
                good = bits < _SMALL and seen & flag == 0
                seen |= flag
                dropped += bits
            elif tag == 0x1A:
                good = copy_text(scratch, 0, data, first, last) >= 0
            else:
                good = tag >> 3 > 16 or tag == 0x85
            if not good:
                break
        good = good and seen & 3 == 3 and start_ns != _U0 and start_ns <= _MAX_UNIX_NS and end_ns <= _MAX_UNIX_NS
        good = good and end_ns >= start_ns and np.int64(start_ns) <= future_unix_ns
        good = good and not _is_zero(data, trace, trace + 16) and not _is_zero(data, span, span + 8)
        n, m = np.int64(c.name_ends[rows]), np.int64(c.message_ends[rows])
        if good:
            n = copy_text(c.name, n, data, name, name_stop)
            m = copy_text(c.message, m, data, message, message_stop)
            good = n >= 0 and m >= 0 and a + SLACK_BYTES <= c.attributes.size
            good = good and e + SLACK_BYTES <= c.events.size and li + SLACK_BYTES <= c.links.size
        if not good:
            c.odd[odd] = number
            odd += 1
            continue
        put_hex(c.trace_id, 32 * rows, data, trace, trace + 16)
        put_hex(c.span_id, 16 * rows, data, span, span + 8)
        p = np.int64(c.parent_ends[rows])
        if parent_size and not _is_zero(data, parent, parent + 8):
            p = put_hex(c.parent, p, data, parent, parent + 8)
        c.attributes[a] = 125
        if events:
            c.events[e] = 93
            e += 1
        if links:
            c.links[li] = 93
            li += 1
        c.numbers[0, rows] = kind
        c.numbers[1, rows] = np.int64(start_ns)
        c.numbers[2, rows] = np.int64(end_ns)
        c.numbers[3, rows] = code
        c.numbers[4, rows] = np.int64(dropped)
        c.ordinary[rows] = number
        rows += 1
        c.parent_ends[rows] = p
        c.name_ends[rows] = n
        c.message_ends[rows] = m
        c.attributes_ends[rows] = a + 1
        c.events_ends[rows] = e
        c.links_ends[rows] = li
        previous = count
        now = 1 - now
    return rows, odd
