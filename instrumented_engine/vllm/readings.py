"""From what vLLM hands its stat loggers to steps and finished requests. What it does not tell is None. Pure.

One call is one answer of the engine process: the scheduler's state after an iteration, and what the iteration brought. Where vLLM
runs with --enable-logging-iteration-details the scheduler says what each step was made of. Else the outputs tell: every sequence
that decoded has one, so what runs without one is still at its prompt, and how many prompt tokens such a step took is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from phasewise.instrumented_engine.vllm.facts import EngineFacts


class Reading(NamedTuple):
    """One call of the stat logger, as it came. at_ns: Unix time."""

    at_ns: int
    scheduler: Any
    iteration: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration of vLLM's scheduler. start_unix_ns is its end where duration_ns is unknown.

    running, waiting, kv_blocks_used: after it; preemptions: that its outputs tell of, which vLLM itself counts there.
    """

    number: int
    start_unix_ns: int
    duration_ns: int | None = None
    prefill_tokens: int | None = None
    decode_seqs: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_blocks_used: int | None = None
    preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One finished sequence."""

    request_id: str
    arrival_unix_ns: int
    finished_unix_ns: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    preemptions: int | None = None
    finish_reason: str | None = None


class Unnamed(Exception):
    """This release of vLLM does not say which request has finished."""


def finished_of(reading: Reading) -> list[Finished]:
    """Sequences that finished in one answer. Raises Unnamed."""
    found = []
    for one in getattr(reading.iteration, "finished_requests", None) or ():
        name = getattr(one, "request_id", None)
        if not isinstance(name, str):
            raise Unnamed
        end = _end_ns(reading)
        reason = getattr(one, "finish_reason", None)
        found.append(
            Finished(
                request_id=name,
                arrival_unix_ns=end - round(one.e2e_latency * 1e9),
                finished_unix_ns=end,
                input_tokens=_whole(one, "num_prompt_tokens"),
                cached_tokens=_whole(one, "num_cached_tokens"),
                output_tokens=_whole(one, "num_generation_tokens"),
                preemptions=_whole(one, "num_preemptions"),
                finish_reason=None if reason is None else str(reason),
            )
        )
    return found


class StepReader:
    """Reads answers in their order and remembers what the next one needs."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._number = 0
        self._end_ns: int | None = None  # of the step before, None where the engine had nothing to do after it
        self._behind = 0  # sequences at their prompt after the step before

    def read(self, reading: Reading) -> Step | None:
        """The step an answer tells of; None where it is about none, or about a share of one."""
        state, brought = reading.scheduler, reading.iteration
        if state is None:
            return None
        details = getattr(state, "iteration_details", None)
        if details is not None and details.is_dummy:
            return None
        running = int(state.num_running_reqs)
        if details is None and (self._facts.details or not self._facts.one_front_end):
            return None  # an answer between two steps, or one whose outputs another process has
        if details is None and brought is None and not running:
            return None
        end = _end_ns(reading)
        duration = self._duration_ns(details, end)
        prefill, decode = self._made_of(details) if details is not None else self._told_by_outputs(brought, running)
        waiting = int(state.num_waiting_reqs) + int(getattr(state, "num_skipped_waiting_reqs", 0))
        step = Step(
            number=self._number if details is None else int(details.iteration_index),
            start_unix_ns=end - (duration or 0),
            duration_ns=duration,
            prefill_tokens=prefill,
            decode_seqs=decode,
            running=running,
            waiting=waiting,
            kv_blocks_used=self._blocks(state),
            preemptions=self._preemptions(brought),
        )
        self._number += 1
        self._end_ns = end if running + waiting else None
        return step

    def _duration_ns(self, details: Any, end_ns: int) -> int | None:
        """The engine's own figure, unless it schedules ahead: then that one is how long it waited for a step already under way, and
        steps follow each other without a gap. Without either, from the end of the step before."""
        measured = None if details is None else round(details.elapsed_ms * 1e6)
        if self._end_ns is None or (measured is not None and not self._facts.asynchronous):
            return measured
        return max(0, end_ns - self._end_ns)

    def _made_of(self, details: Any) -> tuple[int, int]:
        """A sequence that was preempted counts as decoding to vLLM while its tokens are computed again: more than one of them."""
        sequences = int(details.num_generation_requests)
        again = 0 if self._facts.speculative else max(0, int(details.num_generation_tokens) - sequences)
        return int(details.num_ctx_tokens) + again, sequences

    def _told_by_outputs(self, brought: Any, running: int) -> tuple[int | None, int]:
        if brought is None:
            self._behind = running
            return None, 0
        decoded = len(brought.inter_token_latencies_iter)
        outputs = decoded + len(brought.time_to_first_tokens_iter)
        before, self._behind = self._behind, running + len(brought.finished_requests) - outputs
        # A preemption is told when its request has an output again: its tokens were computed again in this step or before.
        whole = not before and not self._behind and not brought.num_preempted_reqs
        return (_computed(brought) if whole else None), decoded

    def _blocks(self, state: Any) -> int | None:
        total, usage = self._facts.kv_blocks_total, getattr(state, "kv_cache_usage", None)
        return None if total is None or usage is None else round(usage * total)

    def _preemptions(self, brought: Any) -> int | None:
        if brought is not None:
            return _whole(brought, "num_preempted_reqs")
        return 0 if self._facts.one_front_end else None


def _computed(brought: Any) -> int | None:
    """Prompt tokens computed, without those from a cache; releases before 0.16 count them all together."""
    split = getattr(brought, "prompt_token_stats", None)
    return None if split is None else _whole(split, "computed")


def _end_ns(reading: Reading) -> int:
    """When the answer came to the front end: vLLM's own stamp where there is one."""
    stamped = getattr(reading.iteration, "iteration_timestamp", None)
    return reading.at_ns if stamped is None else round(stamped * 1e9)


def _whole(of: Any, name: str) -> int | None:
    """A count; where vLLM means "none yet" by a negative one it is unknown."""
    value = getattr(of, name, None)
    return value if type(value) is int and value >= 0 else None
