"""Figures of small whole numbers that are asked again and again: of a batch, of a length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from phasewise.analyzer.intervals import Floats

Ints = npt.NDArray[np.int64]
KEPT_NUMBERS = 16_384  # from here on nothing is remembered


class KeptFigures:
    """[width, n]: each number is counted once, as far as it is kept. count: figures of m different numbers, [width, m]."""

    def __init__(self, count: Callable[[Ints], Floats], width: int) -> None:
        self._count = count
        self._kept = np.full((width, KEPT_NUMBERS), np.nan)

    def of(self, numbers: Ints) -> Floats:
        """[width, one a number]; numbers are not negative."""
        if not len(numbers):
            return np.empty((len(self._kept), 0))
        if int(numbers.max()) >= KEPT_NUMBERS:
            different, place = np.unique(numbers, return_inverse=True)
            return np.asarray(self._count(different)[:, place])
        found = self._kept[:, numbers]
        unknown = np.isnan(found[0])
        if unknown.any():
            different = np.unique(numbers[unknown])
            self._kept[:, different] = self._count(different)
            found = self._kept[:, numbers]
        return found
