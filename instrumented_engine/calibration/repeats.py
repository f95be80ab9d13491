"""Repeated runs of one piece of work: how long each takes, and how many a second with what spread.

The sizes are found on the way: a slow device gets small products, a fast one grows until a call outweighs what starting it costs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from phasewise.rules.measured import Rate

Clock = Callable[[], float]
Work = Callable[[], object]
LEAST_REPEAT_S = 0.01  # a shorter call is run several times a repeat: it would measure how it is started
LONGEST_CALL_S = 0.2  # products grow no further
FEWEST_REPEATS, MOST_REPEATS = 5, 200
CALLS_OF_A_SIZE = 8  # to try one size, and to repeat it
GROWTH = 8  # twice the size takes so many times as long
NOISY_RATIO = 0.1


class Device(Protocol):
    """Something that computes. An operation it does not have raises NotImplementedError or RuntimeError (torch's word for it)."""

    @property
    def smallest_product(self) -> int:
        """Rows of the square matrices to begin with."""
        ...

    @property
    def largest_product(self) -> int: ...

    @property
    def stream_bytes(self) -> int:
        """Of each array of a stream: more than any cache holds."""
        ...

    def product(self, dtype: str, size: int) -> Work:
        """One product of square matrices."""
        ...

    def streams(self) -> Mapping[str, tuple[Work, int]]:
        """Kind of stream -> one pass, and the arrays it reads and writes."""
        ...

    def wait(self) -> None:
        """Until everything that was started has ended."""
        ...


def timed(work: Work, wait: Work, repeats: int, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of each repeat after one run to warm up, the device waited for."""
    work()
    wait()
    return [_once(work, wait, 1, clock) for _ in range(repeats)]


def timed_for(budget_s: float, work: Work, wait: Work, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of one call in each of as many repeats as fit into the budget, at least some; after two runs to warm up."""
    began = clock()
    work()
    wait()
    calls = max(1, math.ceil(LEAST_REPEAT_S / max(_once(work, wait, 1, clock), 1e-9)))
    taken: list[float] = []
    while len(taken) < FEWEST_REPEATS or (len(taken) < MOST_REPEATS and clock() - began < budget_s):
        taken.append(_once(work, wait, calls, clock) / calls)
    return taken


def _once(work: Work, wait: Work, calls: int, clock: Clock) -> float:
    began = clock()
    for _ in range(calls):
        work()
    wait()
    return clock() - began


def rate_of(amount: float, taken: Sequence[float], shape: str) -> Rate:
    """amount: what one call does, in FLOPs or bytes. Six digits, as everything that is written."""
    rates = sorted(float(f"{amount / max(seconds, 1e-9):.6g}") for seconds in taken)
    tenths = statistics.quantiles(rates, n=10, method="inclusive") if len(rates) > 1 else [rates[0]] * 9
    return Rate(
        median=float(f"{statistics.median(rates):.6g}"),
        p10=float(f"{tenths[0]:.6g}"),
        p90=float(f"{tenths[-1]:.6g}"),
        least=rates[0],
        most=rates[-1],
        repeats=len(rates),
        shape=shape,
    )


def product_rate(device: Device, dtype: str, budget_s: float, clock: Clock = time.perf_counter) -> Rate:
    """FLOP/s (OP/s of integers) of square matrices of the size that gives most.

    Sizes double while a call stays short and the budget holds some of the next size, by the fastest of a few calls, which a busy
    machine delays least; the rest of the budget repeats the best.
    """
    began = clock()
    size, best, fastest = device.smallest_product, device.smallest_product, 0.0
    while True:
        took = max(min(timed(device.product(dtype, size), device.wait, 3, clock)), 1e-9)
        if 2 * size**3 / took > fastest:
            best, fastest = size, 2 * size**3 / took
        fits = GROWTH * took <= budget_s / CALLS_OF_A_SIZE
        if took >= LONGEST_CALL_S or 2 * size > device.largest_product or not fits:
            break
        size *= 2
    left = budget_s - (clock() - began)
    taken = timed_for(left, device.product(dtype, best), device.wait, clock)
    return rate_of(2 * best**3, taken, f"{best} x {best} x {best}")


def stream_rates(device: Device, budget_s: float, clock: Clock = time.perf_counter) -> dict[str, Rate]:
    """Bytes a second of each kind of stream, what is read and what is written counted alike."""
    kinds = device.streams()
    found = {}
    for kind, (work, arrays) in kinds.items():
        taken = timed_for(budget_s / len(kinds), work, device.wait, clock)
        shape = f"{arrays - 1} read and 1 written, {device.stream_bytes / 2**20:.0f} MiB each"
        found[kind] = rate_of(arrays * device.stream_bytes, taken, shape)
    return found


def doubt(what: str, rate: Rate) -> str | None:
    """A sentence where a rate is too noisy, or rests on too few repeats, to lean on."""
    if rate.spread_ratio > NOISY_RATIO:
        return f"{what}: too noisy, spread {rate.spread_ratio:.0%} of the median over {rate.repeats} repeats"
    if rate.repeats < 2 * FEWEST_REPEATS:
        return f"{what}: only {rate.repeats} repeats fit into the time"
    return None
