"""Fields of protobuf messages on the wire, compiled: every read is checked against the end of the part it belongs to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasewise.collector.scan_numbers import compiled, inlined, load_word

_U0, _U1, _U7, _U127 = np.uint64(0), np.uint64(1), np.uint64(7), np.uint64(127)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_NAMES = 256  # different attribute keys and event names noted in one chunk; what engines send has dozens
_SLOT_MASK = np.uint64(4 * _NAMES - 1)


@compiled
def varint(data, at, end):
    """Bits and the position after them; position -1 where it is cut off or longer than protobuf writes it."""
    bits = _U0
    shift = _U0
    for _ in range(9):
        if at >= end:
            return bits, -1
        byte = np.uint64(data[at])
        at += 1
        bits |= (byte & _U127) << shift
        if byte <= _U127:
            return bits, at
        shift += _U7
    if at >= end or data[at] != 1:
        return bits, -1
    return bits | (_U1 << shift), at + 1


@inlined
def field(data, at, end):
    """Tag, start and stop of the value, and its bits if it is a varint. Stop -1: cut off, or not as protobuf writes it."""
    tag = np.int64(data[at])
    at += 1
    if tag >= 128:
        if at >= end or data[at] >= 128 or data[at] == 0:
            return tag, at, -1, _U0
        tag = (tag & 127) | np.int64(data[at]) << 7
        at += 1
    wire = tag & 7
    if tag < 8:
        return tag, at, -1, _U0
    bits = _U0
    stop = at
    if wire == 2:
        if at < end and data[at] < 128:
            length = np.int64(data[at])
            at += 1
        else:
            bits, at = varint(data, at, end)
            if at < 0 or bits >= np.uint64(1 << 31):
                return tag, at, -1, _U0
            length = np.int64(bits)
        stop = at + length
    elif wire == 0:
        bits, stop = varint(data, at, end)
    elif wire == 1:
        stop = at + 8
    elif wire == 5:
        stop = at + 4
    else:
        return tag, at, -1, _U0
    if stop > end:
        stop = -1
    return tag, at, stop, bits


@inlined
def pair(data, at, end):
    """Where key and value of a KeyValue lie: key start and stop, value start and stop. Value stop -1 is refused."""
    if at + 4 <= end and data[at] == 0x0A and data[at + 1] < 128:  # as everybody writes it: key, value, both short
        key = at + 2
        key_stop = key + np.int64(data[at + 1])
        if key_stop + 2 <= end and data[key_stop] == 0x12 and key_stop + 2 + np.int64(data[key_stop + 1]) == end:
            if data[key_stop + 1] < 128:
                return key, key_stop, key_stop + 2, end
    key, key_stop, value, value_stop = at, at, at, at
    seen = 0
    while at < end:
        tag, start, stop, _ = field(data, at, end)
        if stop < 0:
            return key, key_stop, value, -1
        if tag == 0x0A and seen & 1 == 0:
            key, key_stop = start, stop
            seen |= 1
        elif tag == 0x12 and seen & 2 == 0:
            value, value_stop = start, stop
            seen |= 2
        else:
            return key, key_stop, value, -1
        at = stop
    return key, key_stop, value, value_stop


@inlined
def same_bytes(data, left, left_stop, right, right_stop):
    size = left_stop - left
    if size != right_stop - right:
        return False
    while size >= 8:
        if load_word(data, left) != load_word(data, right):
            return False
        left += 8
        right += 8
        size -= 8
    for i in range(size):
        if data[left + i] != data[right + i]:
            return False
    return True


@compiled
def text_hash(data, start, stop):
    mixed = np.uint64(stop - start)
    while start + 8 <= stop:
        mixed = (mixed ^ load_word(data, start)) * _MIX
        mixed ^= mixed >> _SHIFT
        start += 8
    while start < stop:
        mixed = (mixed ^ np.uint64(data[start])) * _MIX
        mixed ^= mixed >> _SHIFT
        start += 1
    return mixed


class Names(NamedTuple):
    """Room for the different names in a chunk."""

    places: NDArray[np.int64]  # start and stop of each
    slots: NDArray[np.int64]  # hash table: number of a name, from 1
    found: NDArray[np.int64]  # how many; one more than there is room for: too many


def no_names():
    """Empty, for `note_name` to fill."""
    return Names(np.empty((_NAMES, 2), np.int64), np.zeros(4 * _NAMES, np.int64), np.zeros(1, np.int64))


@compiled
def note_name(data, start, stop, mixed, names):
    """Note a name, once; mixed: its `text_hash`."""
    count = names.found[0]
    if count > _NAMES:
        return
    slot = np.int64(mixed & _SLOT_MASK)
    while names.slots[slot]:
        known = names.slots[slot] - 1
        if same_bytes(data, names.places[known, 0], names.places[known, 1], start, stop):
            return
        slot = (slot + 1) & (4 * _NAMES - 1)
    names.found[0] = count + 1
    if count < _NAMES:
        names.places[count, 0], names.places[count, 1] = start, stop
        names.slots[slot] = count + 1
