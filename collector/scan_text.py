"""Text and values of OTLP bytes to JSON, compiled. Each function refuses by -1 what it does not know to write exactly
as the plain scanner does: damaged or replaced text, what a limit would cut, repeated fields. The plain scanner then does it.
Keys of maps are noted in `names` as they are written.

`out` always has room for what was checked before writing: six times a text and NUMBER_BYTES on top.
"""

from __future__ import annotations

import numpy as np

from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.scan_fields import field, note_name, pair, same_bytes, text_hash
from phasewise.collector.scan_numbers import (
    NUMBER_BYTES,
    compiled,
    float_of,
    inlined,
    load_word,
    put_float,
    put_signed,
    store_word,
)

DEPTH = 12  # of nested lists and maps; deeper ones are the plain scanner's
MEMBERS = 64  # of a map inside a value
TEXT, BOOL, WHOLE, DOUBLE, LIST, MAP, BYTES = 0x0A, 0x10, 0x18, 0x21, 0x2A, 0x32, 0x3A  # tags of AnyValue
SLACK_BYTES = 64
_VALUE_BYTES, _LIST_BYTES, _OWN_BYTES = SPAN_LIMITS.value_bytes, SPAN_LIMITS.list_bytes, SPAN_LIMITS.own_list_bytes

_HIGH_BITS = np.uint64(0x8080808080808080)
_ONES = np.uint64(0x0101010101010101)
_QUOTES = np.uint64(0x2222222222222222)
_BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)
_SPACES = np.uint64(0x2020202020202020)
_U0 = np.uint64(0)
_TAIL = np.array([0] + [(1 << 8 * i) - 1 for i in range(1, 8)], np.uint64)  # the first bytes of a word
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8).copy()
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8).copy()
_SHORT = np.zeros(128, np.uint8)  # the letter after the backslash
for _code, _letter in zip(b'"\\\n\r\t\f\b', b'"\\nrtfb', strict=True):
    _SHORT[_code] = _letter
_NULL, _TRUE, _FALSE, _NAN, _UP, _DOWN = (
    np.frombuffer(text, np.uint8).copy()
    for text in (b"null", b"true", b"false", b'"NaN"', b'"Infinity"', b'"-Infinity"')
)
_OWN_PREFIX = np.frombuffer(b"phasewise.", np.uint8).copy()
_GENAI_PREFIX = np.frombuffer(b"gen_ai.", np.uint8).copy()


@compiled
def _wide_character(data, at, stop):
    """Bytes of the character that starts here; 0 if it is not UTF-8, or U+FFFD, which is reported as damage."""
    lead = data[at]
    if lead < 0xC2 or lead > 0xF4:
        return 0
    width = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    if at + width > stop:
        return 0
    for i in range(1, width):
        if data[at + i] & 0xC0 != 0x80:
            return 0
    second = data[at + 1]
    if (lead == 0xE0 and second < 0xA0) or (lead == 0xED and second > 0x9F):
        return 0
    if (lead == 0xF0 and second < 0x90) or (lead == 0xF4 and second > 0x8F):
        return 0
    if lead == 0xEF and second == 0xBF and data[at + 2] == 0xBD:
        return 0
    return width


@compiled
def copy_text(out, at, data, start, stop):
    """The text as it is; -1 if it is damaged, too long to keep, or there is no room."""
    if stop - start > _VALUE_BYTES or at + stop - start + SLACK_BYTES > out.size:
        return -1
    while start < stop:
        if start + 8 <= stop:
            word = load_word(data, start)
            if word & _HIGH_BITS == _U0:
                store_word(out, at, word)
                start += 8
                at += 8
                continue
        if data[start] < 128:
            out[at] = data[start]
            start += 1
            at += 1
            continue
        width = _wide_character(data, start, stop)
        if width == 0:
            return -1
        for i in range(width):
            out[at + i] = data[start + i]
        start += width
        at += width
    return at


@compiled
def _is_plain(word):
    """Whether none of eight bytes is a quote, a backslash, a control character or outside ASCII."""
    quote = word ^ _QUOTES
    backslash = word ^ _BACKSLASHES
    found = ((quote - _ONES) & ~quote) | ((backslash - _ONES) & ~backslash) | (word - _SPACES) | word
    return found & _HIGH_BITS == _U0


@compiled
def put_text(out, at, data, start, stop):
    """The text as a JSON string; -1 as in `copy_text`."""
    if stop - start > _VALUE_BYTES or at + 6 * (stop - start) + SLACK_BYTES > out.size:
        return -1
    out[at] = 34
    at += 1
    while start < stop:
        rest = stop - start
        if start + 8 <= data.size:
            word = load_word(data, start)
            if rest >= 8:
                if _is_plain(word):
                    store_word(out, at, word)
                    start += 8
                    at += 8
                    continue
            elif _is_plain((word & _TAIL[rest]) | (_SPACES & ~_TAIL[rest])):
                store_word(out, at, word)
                at += rest
                break
        byte = data[start]
        if byte >= 128:
            width = _wide_character(data, start, stop)
            if width == 0:
                return -1
            for i in range(width):
                out[at + i] = data[start + i]
            start += width
            at += width
            continue
        start += 1
        if _SHORT[byte]:
            out[at] = 92
            out[at + 1] = _SHORT[byte]
            at += 2
        elif byte < 32:
            out[at], out[at + 1], out[at + 2], out[at + 3] = 92, 117, 48, 48
            out[at + 4] = _HEX[byte >> 4]
            out[at + 5] = _HEX[byte & 15]
            at += 6
        else:
            out[at] = byte
            at += 1
    out[at] = 34
    return at + 1


@inlined
def put_word(out, at, word):
    for i in range(word.size):
        out[at + i] = word[i]
    return at + word.size


@compiled
def put_hex(out, at, data, start, stop):
    for i in range(start, stop):
        out[at] = _HEX[data[i] >> 4]
        out[at + 1] = _HEX[data[i] & 15]
        at += 2
    return at


@compiled
def _put_base64(out, at, data, start, stop):
    if (stop - start + 2) // 3 * 4 > _VALUE_BYTES or at + 2 * (stop - start) + SLACK_BYTES > out.size:
        return -1
    out[at] = 34
    at += 1
    while start < stop:
        rest = min(stop - start, 3)
        three = np.int64(data[start]) << 16
        if rest > 1:
            three |= np.int64(data[start + 1]) << 8
        if rest > 2:
            three |= np.int64(data[start + 2])
        out[at] = _BASE64[three >> 18]
        out[at + 1] = _BASE64[three >> 12 & 63]
        out[at + 2] = _BASE64[three >> 6 & 63] if rest > 1 else 61
        out[at + 3] = _BASE64[three & 63] if rest > 2 else 61
        start += 3
        at += 4
    out[at] = 34
    return at + 1


@compiled
def _put_single(out, at, data, tag, first, last, bits):
    """An AnyValue that is neither list nor map."""
    if tag == TEXT:
        return put_text(out, at, data, first, last)
    if tag == DOUBLE:
        bits = load_word(data, first)
        number = float_of(bits)
        if np.isfinite(number):
            return put_float(out, at, bits)
        return put_word(out, at, _NAN if np.isnan(number) else _UP if number > 0 else _DOWN)
    if tag == WHOLE:
        return put_signed(out, at, bits)
    if tag == BOOL:
        return put_word(out, at, _TRUE if bits else _FALSE)
    if tag == BYTES:
        return _put_base64(out, at, data, first, last)
    return -1


@inlined
def put_value(out, at, data, start, stop, stack, names):
    """An AnyValue as JSON."""
    if start < stop and at + SLACK_BYTES + NUMBER_BYTES <= out.size:
        tag, first, last, bits = field(data, start, stop)
        if last == stop and tag != LIST and tag != MAP:
            return _put_single(out, at, data, tag, first, last, bits)
    return _put_nested(out, at, data, start, stop, stack, names)


@compiled
def _put_nested(out, at, data, start, stop, stack, names):
    """An AnyValue as JSON; the stack is room for what is open: position, stop, begin, tag and members so far of lists and maps.

    Not recursive: numba's cache on disk does not carry functions that call themselves.
    """
    level = 0
    while True:
        if at + SLACK_BYTES + NUMBER_BYTES > out.size:
            return -1
        if level > 0:
            start = stack[level, 0]
            stop = stack[level, 1]
            if start == stop:
                out[at] = 93 if stack[level, 3] == LIST else 125
                at += 1
                level -= 1
                if level == 0:
                    return at
                continue
            tag, item, item_stop, _ = field(data, start, stop)
            if item_stop < 0 or tag != 0x0A:
                return -1
            stack[level, 0] = item_stop
            if stack[level, 4]:
                out[at] = 44
                at += 1
            if stack[level, 3] == MAP:
                key, key_stop, item, value_stop = pair(data, item, item_stop)
                if value_stop < 0 or stack[level, 4] >= MEMBERS:
                    return -1
                if _is_repeated(data, stack[level, 2], start, stop, key, key_stop):
                    return -1
                note_name(data, key, key_stop, text_hash(data, key, key_stop), names)
                at = put_text(out, at, data, key, key_stop)
                if at < 0 or at + SLACK_BYTES + NUMBER_BYTES > out.size:
                    return -1
                out[at] = 58
                at += 1
                item_stop = value_stop
            stack[level, 4] += 1
            start, stop = item, item_stop
        if start == stop:
            at = put_word(out, at, _NULL)
        else:
            tag, first, last, bits = field(data, start, stop)
            if last != stop:  # more than one field, or none that can be read
                return -1
            if tag == LIST or tag == MAP:
                level += 1
                if level >= DEPTH:
                    return -1
                out[at] = 91 if tag == LIST else 123
                at += 1
                stack[level, 0], stack[level, 1], stack[level, 2], stack[level, 3] = first, last, first, tag
                stack[level, 4] = 0
            else:
                at = _put_single(out, at, data, tag, first, last, bits)
                if at < 0:
                    return -1
        if level == 0:
            return at


@compiled
def _is_repeated(data, at, until, end, key, key_stop):
    """Whether a map's members before this one, all read before, hold its key."""
    while at < until:
        _, item, stop, _ = field(data, at, end)
        other, other_stop, _, _ = pair(data, item, stop)
        if same_bytes(data, other, other_stop, key, key_stop):
            return True
        at = stop
    return False


@compiled
def _starts_with(data, start, stop, prefix):
    if stop - start < prefix.size:
        return False
    for i in range(prefix.size):
        if data[start + i] != prefix[i]:
            return False
    return True


@inlined
def put_attribute_value(out, at, data, start, stop, key, key_stop, stack, names):
    """As `put_value`, and within the limit of a list or map under this key."""
    end = put_value(out, at, data, start, stop, stack, names)
    if end - at > _VALUE_BYTES and (out[at] == 91 or out[at] == 123):
        limit = _VALUE_BYTES
        if _starts_with(data, key, key_stop, _OWN_PREFIX):
            limit = _OWN_BYTES
        elif _starts_with(data, key, key_stop, _GENAI_PREFIX):
            limit = _LIST_BYTES
        if end - at > limit:
            return -1
    return end
