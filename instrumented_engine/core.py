"""The engine's loop: requests come in, one step after another is planned, executed and recorded. It knows no torch, no socket.

Time comes from the clock it is given: with a virtual clock and a simulated executor an hour passes in seconds, with real ones it
serves. A request passes its context stage and the tools before the stream first (state CONTEXT), then the scheduler has it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from itertools import count

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.plan import Clock, Executor, StepOutcome, StepPlan
from phasewise.instrumented_engine.recording import Recording, composition
from phasewise.instrumented_engine.scheduler import Scheduler
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence, State

OnStep = Callable[[StepPlan, StepOutcome, int], None]
OnFinished = Callable[[Sequence], None]


class EngineCore:
    """One engine process. Not thread-safe: whoever runs it hands requests over between steps.

    on_step: after each step, with its start in nanoseconds; on_finished: when a request has ended in whatever way, tools after
    the stream included. meter_ns: what the scheduler's own time is measured with; None where that time means nothing, as in a
    simulation, whose recordings then are the same for the same seed.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        on_step: OnStep | None = None,
        on_finished: OnFinished | None = None,
        *,
        record: bool = True,
        meter_ns: Callable[[], int] | None = time.perf_counter_ns,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.recording = Recording(self.scheduler.pool.total_blocks, scheduler_timed=meter_ns is not None)
        self._meter_ns = meter_ns
        self._executor = executor
        self._clock = clock
        self._on_step = on_step
        self._on_finished = on_finished
        self._record = record
        self._live: dict[str, Sequence] = {}
        self._arrived = count()
        self._order = count()
        self._later: list[
            tuple[int, int, Sequence, bool]
        ] = []  # (when, order, sequence, has ended): CONTEXT and tools after

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> Sequence | Refusal:
        """Takes a request at its arrival. What the scheduler refuses is recorded and told to whoever asks; a request whose
        context stage takes time is refused, if at all, when that stage has ended (see `on_finished`, state FINISHED with an
        error)."""
        sequence = Sequence(spec, next(self._arrived))
        before = spec.context_ns + _tools_ns(spec, 0)
        if before:
            self._live[spec.request_id] = sequence
            started = spec.arrival_ns + spec.context_ns
            if before > spec.context_ns:
                sequence.external.append((started, spec.arrival_ns + before))
            heapq.heappush(self._later, (spec.arrival_ns + before, next(self._order), sequence, False))
            return sequence
        refusal = self._enqueue(sequence, spec.arrival_ns)
        return refusal or sequence

    def cancel(self, request_id: str) -> bool:
        """Ends a request now; its slot and blocks serve the next step. False: nothing by that id is alive."""
        sequence = self._live.get(request_id)
        if sequence is None or sequence.state is State.FINISHED:
            return False
        now = self._clock.now_ns()
        if sequence.state is not State.CONTEXT:
            self.scheduler.cancel(sequence, now)
        sequence.state = State.FINISHED
        sequence.finish_reason = sequence.finish_reason or "abort"
        sequence.finished_ns = now
        self._end(sequence)
        return True

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    # --- time --------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One scheduler iteration at the clock's now. False: nothing can run now; see wake_ns()."""
        now = self._clock.now_ns()
        if self._later and self._later[0][0] <= now:
            self._due(now)
        began = self._meter_ns() if self._meter_ns is not None else 0
        plan = self.scheduler.plan(now)
        if plan is None:
            return False
        if self._meter_ns is not None:
            plan.schedule_ns = self._meter_ns() - began
        made_of = composition(plan) if self._record else None
        running = self.scheduler.running_count
        outcome = self._executor.execute(plan)
        self._clock.advance(outcome.duration_ns)
        end = self._clock.now_ns()
        began = self._meter_ns() if self._meter_ns is not None else 0
        finished = self.scheduler.complete(plan, end, outcome.tokens)
        if self._meter_ns is not None:
            plan.schedule_ns += self._meter_ns() - began
        if made_of is not None:
            self.recording.add(plan, made_of, running, now, outcome.duration_ns)
        if self._on_step is not None:
            self._on_step(plan, outcome, now)
        for sequence in plan.sampled:
            if sequence.spec.tools and sequence.state is State.RUNNING:
                self._pause_for_tool(sequence, end)
        for sequence in finished:
            self._finish(sequence, end)
        return True

    def wake_ns(self) -> int | None:
        """When step() may do something without a new arrival; None: only an arrival can change anything."""
        moments = [
            moment for moment in (self.scheduler.wake_ns(), self._later[0][0] if self._later else None) if moment
        ]
        return min(moments) if moments else None

    def run(self, specs: Iterable[RequestSpec]) -> None:
        """Until all of `specs`, in order of arrival, have ended; for clocks that can be moved."""
        arrivals = iter(specs)
        coming = next(arrivals, None)
        now_ns, advance, step = self._clock.now_ns, self._clock.advance, self.step
        while True:
            now = now_ns()
            while coming is not None and coming.arrival_ns <= now:
                self.submit(coming)
                coming = next(arrivals, None)
            if step():
                continue
            wake = self.wake_ns()
            if coming is not None and (wake is None or coming.arrival_ns < wake):
                wake = coming.arrival_ns
            if wake is None:
                break
            advance(max(1, wake - now))
        if self._live:
            stuck = next(iter(self._live))
            raise AssertionError(f"{len(self._live)} requests can neither run nor end, {stuck} among them")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence, at_ns: int) -> Refusal | None:
        refusal = self.scheduler.submit(sequence, at_ns)
        if refusal is None:
            self._live[sequence.spec.request_id] = sequence
            return None
        if self._record:
            self.recording.refused.append((sequence.spec, refusal))
        return refusal

    def _due(self, now: int) -> None:
        """Contexts that are ready enter the queue at the moment they were; tools after the stream have ended."""
        while self._later and self._later[0][0] <= now:
            moment, _, sequence, ended = heapq.heappop(self._later)
            if sequence.state is State.FINISHED and not ended:
                continue  # cancelled meanwhile
            if ended:
                sequence.finished_ns = moment
                self._end(sequence)
            elif (refusal := self._enqueue(sequence, moment)) is not None:
                sequence.state = State.FINISHED
                sequence.error = refusal.reason
                sequence.finish_reason = "refused"
                sequence.finished_ns = moment
                self._end(sequence)

    def _pause_for_tool(self, sequence: Sequence, now: int) -> None:
        duration = _tools_ns(sequence.spec, sequence.output_tokens)
        if duration:
            sequence.external.append((now, now + duration))
            self.scheduler.pause(sequence, now + duration)

    def _finish(self, sequence: Sequence, now: int) -> None:
        after = _tools_ns(sequence.spec, None)
        if after:
            sequence.external.append((now, now + after))
            heapq.heappush(self._later, (now + after, next(self._order), sequence, True))
        else:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._live.pop(sequence.spec.request_id, None)
        if self._record:
            self.recording.finished.append(sequence)
        if self._on_finished is not None:
            self._on_finished(sequence)


def _tools_ns(spec: RequestSpec, after_tokens: int | None) -> int:
    return sum(call.duration_ns for call in spec.tools if call.after_tokens == after_tokens)
