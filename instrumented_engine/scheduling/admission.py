"""Whether an arrival is taken, by what is predicted for it: its wait in the queue, and the KV memory all would need.

Nothing here knows how long an answer will be. It is predicted as the ratio of actual to allowed output tokens seen so far times
what the request allows; before anything finished, as all it allows.
"""

from __future__ import annotations

import math

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.sequence import Refusal

_MEMORY_S = 30.0  # how long a rate remembers: long against a step, short against a change of the load
_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 60.0
_PRIOR_OUTPUTS = 20.0  # finished requests after which what was seen weighs as much as the prior
_OUTPUT_MEMORY = 2000.0  # finished requests the output ratio remembers


class Rate:
    """Amount over time, both fading with age. Time in which nothing could be counted must not be added."""

    __slots__ = ("_amount", "_seconds")

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        fade = math.exp(-seconds / _MEMORY_S)
        self._amount = self._amount * fade + amount
        self._seconds = self._seconds * fade + seconds

    def per_s(self, at_most: float = 0.0) -> float | None:
        """None: nothing seen yet. at_most: what to assume where time passed without any: that so much would have come now."""
        amount = self._amount or at_most
        return amount / self._seconds if self._seconds > 0 and amount > 0 else None


class Admission:
    """Counts what enters and leaves, and refuses. All O(1) a step and a request."""

    def __init__(self, config: EngineConfig, total_blocks: int, shares: int) -> None:
        control = config.admission
        self._max_queue_s = control.max_predicted_queue_s if control else None
        self._max_kv_ratio = control.max_predicted_kv_ratio if control else None
        self._max_waiting = config.max_waiting
        self._total_blocks = total_blocks
        # By pool share: tokens of work that left its queue, over the time in which anything waited there.
        self._entered = [Rate() for _ in range(shares)]
        self._admissions = Rate()
        self._freed = Rate()  # predicted blocks that ended, over the time in which anything was in the engine
        self._output_ratio = 1.0
        self._outputs = _PRIOR_OUTPUTS
        self._blocks = 0.0  # predicted, of all in the engine
        self._before_ns: int | None = None  # the plan before
        self._occupied = False
        self._waited = [False] * shares
        self._work_entered = [0.0] * shares
        self._count_entered = 0
        self._blocks_freed = 0.0
        self.active = control is not None or config.max_waiting is not None

    # --- what was seen ------------------------------------------------------------------------------------------------

    def predicted_output_tokens(self, allowed: int) -> float:
        return max(1.0, self._output_ratio * allowed)

    def took(self, blocks: float) -> None:
        """A request is in the engine from now on."""
        self._blocks += blocks

    def entered(self, share: int, work: float) -> None:
        """A request left the queue for its first step."""
        self._work_entered[share] += work
        self._count_entered += 1

    def ended(self, blocks: float, output_tokens: int | None, allowed: int) -> None:
        """A request left the engine. output_tokens: None of one that was cancelled, which tells nothing of lengths."""
        self._blocks -= blocks
        self._blocks_freed += blocks
        if output_tokens is not None:
            self._outputs = min(self._outputs + 1, _OUTPUT_MEMORY)
            self._output_ratio += (output_tokens / allowed - self._output_ratio) / self._outputs

    def planned(self, now_ns: int, waiting: list[int]) -> None:
        """A plan is made. waiting: sequences it left in the queue, by pool share."""
        if not self.active:
            return
        if self._before_ns is not None and now_ns > self._before_ns:
            passed = (now_ns - self._before_ns) / 1e9
            for share, waited in enumerate(self._waited):
                if waited:  # an idle queue says how fast requests come, not how fast they could enter
                    self._entered[share].add(self._work_entered[share], passed)
                self._work_entered[share] = 0.0
            if any(self._waited):
                self._admissions.add(self._count_entered, passed)
            if self._occupied:
                self._freed.add(self._blocks_freed, passed)
            self._count_entered, self._blocks_freed = 0, 0.0
        self._before_ns = now_ns
        self._occupied = self._blocks > 0
        self._waited = [count > 0 for count in waiting]

    # --- what is predicted --------------------------------------------------------------------------------------------

    def predicted_queue_s(self, share: int, work_before: float, work: float) -> float | None:
        """Seconds until `work_before` tokens have entered at the rate seen. None: nobody has had to wait there yet.

        work: of the newcomer; where the queue has stood still since the start, one such request is assumed to enter now.
        """
        if work_before <= 0:
            return 0.0
        rate = self._entered[share].per_s(work)
        return None if rate is None else work_before / rate

    def refusal(self, share: int, waiting: int, work_before: float, work: float, blocks: float) -> Refusal | None:
        """waiting: in all queues. work, blocks: predicted of the newcomer. Where nothing was seen yet, it is taken."""
        if self._max_waiting is not None and waiting >= self._max_waiting:
            rate = self._admissions.per_s(1.0)
            return Refusal(
                f"the queue is full: {waiting} requests wait", _retry(1.0 / rate if rate else 1.0), kind="queue_full"
            )
        if self._max_queue_s is not None:
            queue_s = self.predicted_queue_s(share, work_before, work)
            if queue_s is not None and queue_s > self._max_queue_s:
                return Refusal(
                    f"predicted to wait {queue_s:.1f} s, the limit is {self._max_queue_s:g} s",
                    _retry(queue_s - self._max_queue_s),
                    kind="queue_time",
                )
        if self._max_kv_ratio is not None:
            predicted = self._blocks + blocks
            limit = self._max_kv_ratio * self._total_blocks
            if predicted > limit:
                rate = self._freed.per_s()
                return Refusal(
                    f"predicted KV use is {predicted / self._total_blocks:.2f} of the pool, "
                    f"the limit is {self._max_kv_ratio:g}",
                    _retry((predicted - limit) / rate if rate else 1.0),
                    kind="kv_use",
                )
        return None


def _retry(seconds: float) -> float:
    return min(max(seconds, _LEAST_RETRY_S), _MOST_RETRY_S)
