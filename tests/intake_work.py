"""What a receiver takes in a phase of load, by the second, by its own CPU-second, and by the second that its clients leave of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from mass_senders import BODY_SPANS, Phase
from process_tree import cpu_s


@dataclass
class Work:
    """What was answered, and the time of processors that the receiver and the clients took meanwhile."""

    phase: Phase = field(default_factory=Phase)
    others: int = 0  # spans taken of other clients meanwhile
    cpu_s: float = 0.0
    clients_cpu_s: float = 0.0

    @contextmanager
    def counted(self, pid: int, load: AbstractContextManager[Phase]) -> Iterator[None]:
        """Add what the receiver of that process does while `load` is on it."""
        before, clients_before = cpu_s(pid), time.process_time()
        with load as phase:
            yield
        self.cpu_s += cpu_s(pid) - before
        self.clients_cpu_s += time.process_time() - clients_before
        self.phase.add(phase)

    @property
    def _spans(self) -> int:
        return self.phase.acknowledged + self.others

    @property
    def per_s(self) -> float:
        return self._spans / self.phase.seconds

    @property
    def per_left_s(self) -> float:
        """By the second of the whole machine, less what the clients took of it."""
        processors = os.cpu_count() or 1
        return self._spans / (self.phase.seconds - self.clients_cpu_s / processors)

    @property
    def per_cpu_s(self) -> float:
        return self._spans / self.cpu_s

    def __str__(self) -> str:
        share = self.clients_cpu_s / self.phase.seconds / (os.cpu_count() or 1)
        return f"{self.per_s:,.0f} spans/s taken, {self.per_cpu_s:,.0f} by the receiver's CPU-second, clients {share:.0%} of the machine"


def again_s(calm: Work, connections: int, times: float) -> float:
    """From one try to the next of so many connections, that they offer so many times what is taken calmly."""
    return connections * BODY_SPANS / (times * calm.phase.spans_per_s)


def times_offered(calm: Work, over: Work) -> float:
    return over.phase.offered_per_s / calm.phase.spans_per_s


def told(calm: Work, over: Work) -> str:
    return (
        f"R: {calm}; offered {over.phase.offered_per_s:,.0f} spans/s, {times_offered(calm, over):.1f} R: {over}; goodput of R by the "
        f"second {over.per_s / calm.per_s:.2f}, by the second that the clients left {over.per_left_s / calm.per_left_s:.2f}, by the "
        f"receiver's CPU-second {over.per_cpu_s / calm.per_cpu_s:.2f}; {over.phase.refused:,} requests refused"
    )
