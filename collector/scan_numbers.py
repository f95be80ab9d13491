"""Numbers as text, compiled: integers, and floats exactly as Python's `repr` writes them.

Shortest decimal that reads back as the same double: Schubfach (Raffaello Giulietti, "The Schubfach way to render doubles", 2020).
Positions are int64 and bits are uint64 throughout: numba turns a mixture of both into floats.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

# No interpreter lock, and no references counted: nothing here allocates. Short functions are inlined by force: an array is passed
# as seven words. `entry` is what Python calls; its machine code, with all it calls, is kept on disk.
compiled: Any = numba.njit(nogil=True, _nrt=False)  # type: ignore[call-overload]
inlined: Any = numba.njit(nogil=True, _nrt=False, forceinline=True)  # type: ignore[call-overload]
entry: Any = numba.njit(nogil=True, _nrt=False, cache=True)  # type: ignore[call-overload]
intrinsic: Any = numba.extending.intrinsic

_LEAST_POWER, _GREATEST_POWER = -292, 324
NUMBER_BYTES = 32  # room one number needs: at most 24 characters, written in whole words


def _scaled_power(power: int) -> int:
    """The power of ten as 128 bits with the top one set, rounded up."""
    if power >= 0:
        value: int = 10**power
        shift = value.bit_length() - 128
        return value << -shift if shift <= 0 else -(-value >> shift)
    value = 10**-power
    shift = value.bit_length() + 127
    found = -(-(1 << shift) // value)
    return found if found.bit_length() == 128 else -(-(1 << shift - 1) // value)


_SCALED = [_scaled_power(power) for power in range(_LEAST_POWER, _GREATEST_POWER + 1)]
_HIGH = np.array([value >> 64 for value in _SCALED], np.uint64)
_LOW = np.array([value & (1 << 64) - 1 for value in _SCALED], np.uint64)
_PAIRS = np.frombuffer("".join(f"{i:02}" for i in range(100)).encode(), np.uint8).copy()
_TENS = np.array([10**i for i in range(20)], np.uint64)

_U0, _U1, _U2, _U3, _U4, _U10, _U40, _U100 = (np.uint64(i) for i in (0, 1, 2, 3, 4, 10, 40, 100))
_FRACTION = np.uint64((1 << 52) - 1)
_HIDDEN = np.uint64(1 << 52)
_SIGN = np.uint64(1 << 63)
_EXPONENT_BITS, _EXPONENT_MASK = np.uint64(52), np.uint64(0x7FF)


@intrinsic
def high_product(typing: Any, left: Any, right: Any) -> Any:
    """The upper 64 bits of the product of two uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def load_word(typing: Any, array: Any, at: Any) -> Any:
    """Eight bytes of a byte array from any position, as uint64. The caller has checked that they are there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _word_pointer(context, builder, signature, arguments)
        loaded = builder.load(pointer)
        loaded.align = 1
        return loaded

    return types.uint64(array, types.int64), generate


@intrinsic
def store_word(typing: Any, array: Any, at: Any, word: Any) -> Any:
    """Write eight bytes at any position. The caller has checked that there is room."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = builder.store(arguments[2], _word_pointer(context, builder, signature, arguments))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The double with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.uint64), generate


@intrinsic
def leading_zeros(typing: Any, value: Any) -> Any:
    """Zero bits above the highest one of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _word_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    address = cgutils.gep(builder, array.data, arguments[1])
    return builder.bitcast(address, ir.IntType(64).as_pointer())


@compiled
def digit_count(value):
    guess = ((64 - leading_zeros(value | _U1)) * 1233) >> 12  # log10(2) is about 1233 / 4096
    return guess + 1 if guess < 20 and value >= _TENS[guess] else max(guess, 1)


@compiled
def put_digits(out, at, value, count):
    """Write `count` decimal digits of the value; returns the position after them."""
    place = at + count
    while place - at >= 2:
        rest = value // _U100
        pair = np.int64(value - rest * _U100) * 2
        value = rest
        place -= 2
        out[place] = _PAIRS[pair]
        out[place + 1] = _PAIRS[pair + 1]
    if place > at:
        out[at] = np.uint8(np.int64(value) + 48)
    return at + count


@compiled
def put_unsigned(out, at, value):
    return put_digits(out, at, value, digit_count(value))


@compiled
def put_signed(out, at, bits):
    """Two's complement bits as a signed number."""
    if bits & _SIGN:
        out[at] = 45
        return put_unsigned(out, at + 1, ~bits + _U1)
    return put_unsigned(out, at, bits)


@compiled
def _odd_product(high, low, value):
    """Upper part of a 192-bit product, its last bit set where anything below is not zero."""
    carried = high_product(low, value)
    lower = high * value + carried
    upper = high_product(high, value)
    if lower < carried:
        upper += _U1
    if lower > _U1:
        upper |= _U1
    return upper


@compiled
def _shortest(fraction, exponent):
    """Digits as an integer, and the power of ten they are to be multiplied by, of a positive finite double."""
    if exponent != 0:
        c = fraction | _HIDDEN
        q = exponent - 1075
        if q <= 0 and q > -53:
            shift = np.uint64(-q)
            if (c >> shift) << shift == c:
                return c >> shift, 0
    else:
        c = fraction
        q = -1074
    closer = fraction == _U0 and exponent > 1  # the neighbour below is half as far away
    outside = c & _U1  # of an odd number the bounds themselves belong to its neighbours
    k = (q * 1262611 - (524031 if closer else 0)) >> 22
    h = np.uint64(q + ((-k * 1741647) >> 19) + 1)
    high, low = _HIGH[-k - _LEAST_POWER], _LOW[-k - _LEAST_POWER]
    middle = c * _U4
    lower = _odd_product(high, low, (middle - (_U1 if closer else _U2)) << h) + outside
    upper = _odd_product(high, low, (middle + _U2) << h) - outside
    value = _odd_product(high, low, middle << h)
    s = value // _U4
    if s >= _U10:
        tenth = s // _U10
        below = lower <= _U40 * tenth
        above = _U40 * tenth + _U40 <= upper
        if below != above:
            return (tenth + _U1 if above else tenth), k + 1
    below = lower <= _U4 * s
    above = _U4 * s + _U4 <= upper
    if below != above:
        return (s + _U1 if above else s), k
    half = _U4 * s + _U2
    if value > half or (value == half and s & _U1):
        return s + _U1, k
    return s, k


@compiled
def put_float(out, at, bits):
    """A finite double as `repr` writes it; returns the position after it. Needs NUMBER_BYTES of room."""
    if bits & _SIGN:
        out[at] = 45
        at += 1
        bits = bits ^ _SIGN
    if bits == _U0:
        out[at], out[at + 1], out[at + 2] = 48, 46, 48
        return at + 3
    digits, power = _shortest(bits & _FRACTION, np.int64((bits >> _EXPONENT_BITS) & _EXPONENT_MASK))
    while True:
        tenth = digits // _U10
        if tenth * _U10 != digits:
            break
        digits = tenth
        power += 1
    count = digit_count(digits)
    point = count + power  # digits before the decimal point
    if point <= -4 or point > 16:
        return _put_scientific(out, at, digits, count, point - 1)
    if point <= 0:
        out[at], out[at + 1] = 48, 46
        at += 2
        for _ in range(-point):
            out[at] = 48
            at += 1
        return put_digits(out, at, digits, count)
    if power >= 0:
        at = put_digits(out, at, digits, count)
        for _ in range(power):
            out[at] = 48
            at += 1
        out[at], out[at + 1] = 46, 48
        return at + 2
    whole = digits // _TENS[-power]
    at = put_digits(out, at, whole, point)
    out[at] = 46
    return put_digits(out, at + 1, digits - whole * _TENS[-power], -power)


@compiled
def _put_scientific(out, at, digits, count, exponent):
    lead = digits // _TENS[count - 1]
    out[at] = np.uint8(np.int64(lead) + 48)
    at += 1
    if count > 1:
        out[at] = 46
        at = put_digits(out, at + 1, digits - lead * _TENS[count - 1], count - 1)
    out[at] = 101
    out[at + 1] = 45 if exponent < 0 else 43
    size = abs(exponent)
    return put_digits(out, at + 2, np.uint64(size), 3 if size >= 100 else 2)
