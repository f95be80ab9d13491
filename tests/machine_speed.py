"""How much slower this machine is now than those for which the promises in seconds are made."""

from __future__ import annotations

import time

_LOOPS = 400_000
_USUAL_S = 0.020  # of the work below, by CPython 3.11 on a core of a server of 2023; where it takes 0.05, all tests take 2.6 times as long


def slowness() -> float:
    """1 on such a machine or a faster one, 3 where a core takes three times as long: a bound in seconds is so many times longer there.

    By the best of a few tries of the same work in CPU time, so that what else the machine does is not counted.
    """
    return max(1.0, min(_work_s() for _ in range(3)) / _USUAL_S)


def _work_s() -> float:
    began = time.process_time()
    total = 0
    for number in range(_LOOPS):
        total += number
    return time.process_time() - began
