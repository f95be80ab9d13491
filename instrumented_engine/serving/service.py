"""The engine on real time: one thread runs the core, a server's handlers hand requests in and receive tokens.

Handlers live on one asyncio loop. What they ask for is done by the engine's thread between two steps; what a step yields goes back
to the loop in one call. A step that raises ends the requests in the engine, not the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.export import StepBatch
from phasewise.instrumented_engine.metrics import EngineCounters
from phasewise.instrumented_engine.plan import Executor, StepOutcome, StepPlan
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence, State
from phasewise.instrumented_engine.serving.wall_clock import WallClock

IDLE_FLUSH_S = 0.25
FAILED_S = 0.01  # a fault that stays must not take a whole core
LOGGER = logging.getLogger("phasewise.engine")
Utter = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class Token:
    """One output token of a sequence."""

    index: int
    token: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The sequence holds, after so many output tokens, as it was asked to."""

    index: int
    after_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    index: int
    sequence: Sequence


Event = Token | Paused | Ended


@dataclass(slots=True)
class Stream:
    """Where the events of one sequence go. index: which of its call's sequences; pauses: output tokens after which it holds."""

    index: int
    events: asyncio.Queue[Event]
    pauses: list[int] = field(default_factory=list)


class EngineService:
    """utter: the token a simulated sequence says (source, position); None where the executor gives tokens itself."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: WallClock,
        *,
        model: str,
        kv_dtype: str = "auto",
        utter: Utter | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self._core = EngineCore(config, executor, clock, on_step=self._stepped, on_finished=self._finished)
        self.kv_blocks_total = self._core.recording.kv_blocks_total
        self.counters = EngineCounters(
            model=model, config=config, kv_blocks=self.kv_blocks_total, start_s=clock.now_ns() / 1e9, kv_dtype=kv_dtype
        )
        self.steps: StepBatch | None = None  # where steps are told to; set before the start
        self.step_failures = 0
        self._utter = utter
        self._streams: dict[str, Stream] = {}
        self._sequences: dict[str, Sequence] = {}
        self._endings: dict[str, tuple[str, str | None]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wanted = threading.Condition()
        self._stopping = False
        self._out: list[tuple[Stream, Event]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- for handlers, on the loop ------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    async def submit(self, spec: RequestSpec, stream: Stream) -> Sequence | Refusal:
        """Answers between two steps. Events of a sequence that was taken follow, `Ended` last."""
        taken: asyncio.Future[Sequence | Refusal] = self._running_loop().create_future()
        self._ask(lambda: self._submit(spec, stream, taken))
        return await taken

    def cancel(self, request_id: str, reason: str = "abort", error: str | None = None) -> None:
        """Ends a sequence at the next boundary between steps; its slot and blocks serve the step after it."""
        self._ask(lambda: self._cancel(request_id, reason, error))

    def pause(self, request_id: str) -> None:
        """Holds a sequence that runs; `Paused` follows. Nothing happens to one that does not run."""
        self._ask(lambda: self._pause(request_id))

    def resume(self, request_id: str) -> None:
        self._ask(lambda: self._resume(request_id))

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread after the step that runs; False where it did not end in time."""
        with self._wanted:
            self._stopping = True
            self._wanted.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def render_metrics(self) -> str:
        """/metrics as it stands."""
        scheduler = self._core.scheduler
        waiting = self.counters.waiting
        if sum(waiting) != scheduler.waiting_count:  # an arrival or an end since the last step
            waiting = (scheduler.waiting_count, 0, 0, 0, 0)
        self.counters.observe_state(scheduler.running_count, waiting, scheduler.pool.used_blocks)
        return self.counters.render(self.clock.now_ns() / 1e9)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _ask(self, command: Callable[[], None]) -> None:
        with self._wanted:
            self._commands.append(command)
            self._wanted.notify()

    def _run(self) -> None:
        while not self._stopping:
            try:
                while self._commands:
                    self._commands.popleft()()
                worked = self._core.step()
            except Exception as problem:  # whatever a device or a model raises, the next request may work
                LOGGER.exception("a step failed")
                self.step_failures += 1
                self._fail(f"{type(problem).__name__}: {problem}")
                time.sleep(FAILED_S)
                worked = True
            self._deliver()
            if not worked:
                self._wait()
        if self.steps is not None:
            self.steps.flush()

    def _wait(self) -> None:
        wake_ns = self._core.wake_ns()
        left_s = None if wake_ns is None else max(0.0, (wake_ns - self.clock.now_ns()) / 1e9)
        with self._wanted:
            if self._commands or self._stopping:
                return
            notified = self._wanted.wait(IDLE_FLUSH_S if left_s is None else min(left_s, IDLE_FLUSH_S))
        if not notified and self.steps is not None and (left_s is None or left_s >= IDLE_FLUSH_S):
            self.steps.flush()

    def _submit(self, spec: RequestSpec, stream: Stream, taken: asyncio.Future[Sequence | Refusal]) -> None:
        self._streams[spec.request_id] = stream
        answer: Sequence | Refusal | Exception
        try:
            answer = self._core.submit(spec)
        except Exception as problem:
            answer = problem
        if isinstance(answer, Sequence):
            self._sequences[spec.request_id] = answer
        else:
            del self._streams[spec.request_id]
        if isinstance(answer, Refusal):
            self.counters.observe_refusal(answer.kind)
        self._call(lambda: _settle(taken, answer))

    def _cancel(self, request_id: str, reason: str, error: str | None) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.state is not State.FINISHED:
            self._endings[request_id] = reason, error
            self._core.cancel(request_id)

    def _pause(self, request_id: str) -> None:
        sequence, stream = self._sequences.get(request_id), self._streams.get(request_id)
        if sequence is not None and stream is not None and sequence.state is State.RUNNING:
            self._core.scheduler.pause(sequence, None, self.clock.now_ns())
            self._out.append((stream, Paused(stream.index, sequence.output_tokens)))

    def _resume(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._core.scheduler.resume(sequence, self.clock.now_ns())

    def _fail(self, problem: str) -> None:
        for request_id in list(self._sequences):
            self._cancel(request_id, "error", problem)

    # --- what the core tells ------------------------------------------------------------------------------------------

    def _stepped(self, plan: StepPlan, outcome: StepOutcome, start_ns: int) -> None:
        recording = self._core.recording
        ended = [chunk.sequence for chunk in plan.chunks if chunk.last and not chunk.recompute]
        self.counters.observe_step(recording.steps[-1], ended)
        for chunk in plan.chunks:
            if not chunk.recompute and chunk.past_tokens == (chunk.sequence.cached_tokens or 0):
                self.counters.observe_admission(chunk.sequence)
        if self.steps is not None:
            self.steps.add(plan.number, recording.telemetry()[-1])
        recording.steps.clear()
        recording.chunks.clear()
        recording.refused.clear()
        for position, sequence in enumerate(plan.sampled):
            stream = self._streams.get(sequence.spec.request_id)
            if stream is None:
                continue
            token = outcome.tokens[position] if outcome.tokens is not None else self._said(sequence)
            self._out.append((stream, Token(stream.index, token)))
            if stream.pauses and sequence.output_tokens >= stream.pauses[0] and sequence.state is State.RUNNING:
                stream.pauses.pop(0)
                self._pause(sequence.spec.request_id)

    def _said(self, sequence: Sequence) -> int:
        assert self._utter is not None, "an executor without tokens needs somebody who says them"
        spec = sequence.spec
        source = zlib.crc32(spec.request_id.encode()) if spec.seed is None else spec.seed
        return self._utter(source, sequence.output_tokens)

    def _finished(self, sequence: Sequence) -> None:
        self._core.recording.finished.clear()
        ending = self._endings.pop(sequence.spec.request_id, None)
        if ending is not None:  # the scheduler knows one way only in which a request is taken away
            sequence.finish_reason, sequence.error = ending
        self._sequences.pop(sequence.spec.request_id, None)
        stream = self._streams.pop(sequence.spec.request_id, None)
        if stream is not None:
            self._out.append((stream, Ended(stream.index, sequence)))

    def _deliver(self) -> None:
        if self._out:
            batch, self._out = self._out, []
            self._call(lambda: _spread(batch))

    def _call(self, done: Callable[[], None]) -> None:
        try:
            self._running_loop().call_soon_threadsafe(done)
        except RuntimeError:  # the loop has closed: nobody listens any more
            return

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the service was not started"
        return self._loop


def _spread(batch: list[tuple[Stream, Event]]) -> None:
    for stream, event in batch:
        stream.events.put_nowait(event)


def _settle(taken: asyncio.Future[Sequence | Refusal], answer: Sequence | Refusal | Exception) -> None:
    if taken.done():
        return
    if isinstance(answer, Exception):
        taken.set_exception(answer)
    else:
        taken.set_result(answer)
