"""Numbers that may have come before: one that was added is always told as such, of the others about ten in a million are too.

So who keeps the numbers themselves is asked only about few. What is taken back there need not be taken out here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
LINE_BITS = 20  # 64 MiB: for the five million numbers of the span ledger
_WORDS = np.uint64(8)  # of a line, which is what a processor reads at once
_MARKS = 8  # bits of a word that stand for a number
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_LINE_SHIFT = np.uint64(64 - LINE_BITS)
_ONE, _BITS, _WITHIN, _MIXED = np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(10)


class Sieve:
    """A Bloom filter whose bits of one number lie in one word, and the words of what belongs together in one line: what lies elsewhere in
    memory costs more than all arithmetic. Numbers and groups are hashes: any 64 bits, evenly spread. A group of very many numbers
    fills its line, and then all of it may have been added. added: how many came in."""

    def __init__(self) -> None:
        self._words = np.zeros(int(_WORDS) << LINE_BITS, np.uint64)
        self.added = 0

    def add(self, groups: Numbers, numbers: Numbers) -> None:
        np.bitwise_or.at(self._words, _places(groups, numbers), _marks(numbers))
        self.added += len(numbers)

    def may_hold(self, groups: Numbers, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Of each number whether it may have been added with its group; where not, it never was."""
        marks = _marks(numbers)
        found: npt.NDArray[np.bool_] = (self._words[_places(groups, numbers)] & marks) == marks
        return found


def _places(groups: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
    return ((groups >> _LINE_SHIFT) * _WORDS + numbers % _WORDS).astype(np.int64)


def _marks(numbers: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        rest = (numbers * _SPREAD) >> _MIXED  # the lowest bits of a product are the least mixed
    marks = np.zeros(len(numbers), np.uint64)
    for _ in range(_MARKS):
        rest = rest >> _BITS
        marks |= _ONE << (rest & _WITHIN)
    return marks
