"""Drives a scheduler without an engine: a virtual clock, a memory that is really written, and an audit of every step.

The audit knows the rules from outside: it counts owners from the sequences' own block lists, remembers what was written where,
and looks at the queue only through what was submitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from phasewise.instrumented_engine.blocks import PagedPool
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.plan import StepPlan
from phasewise.instrumented_engine.scheduler import Scheduler
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence, State
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS

MS = 1_000_000
VOCABULARY = 50


def make_spec(number: int = 0, **given: object) -> RequestSpec:
    """A request of 40 prompt and 10 output tokens that arrives at 0."""
    spec = RequestSpec(request_id=f"r{number}", arrival_ns=0, prompt_tokens=40, max_output_tokens=10)
    return replace(spec, **given)  # type: ignore[arg-type]


def make_config(**given: object) -> EngineConfig:
    """Four seats, 64 blocks of 4 tokens, 64 tokens a step."""
    config = EngineConfig(
        max_num_seqs=4, step_token_budget=64, block_tokens=4, kv_blocks=64, max_model_tokens=64, prefix_sharing=False
    )
    return replace(config, **given)  # type: ignore[arg-type]


def prompted(spec: RequestSpec, tokens: tuple[int, ...]) -> RequestSpec:
    return replace(spec, prompt=tokens, prompt_tokens=len(tokens))


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it ran. waiting_ids: what was left in the queue."""

    number: int
    start_ns: int
    end_ns: int
    decodes: tuple[str, ...]
    chunks: tuple[tuple[str, int, int, bool, bool], ...]
    preempted: tuple[str, ...]
    waiting: tuple[int, ...]
    slots_reserved: int
    kv_blocks_used: int


@dataclass(slots=True)
class Trace:
    steps: list[Step] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    plans_ns: list[int] = field(default_factory=list)  # of every plan, also of those in which nothing could run
    preempted_ns: dict[str, list[int]] = field(default_factory=dict)
    entered_ns: dict[str, list[int]] = field(default_factory=dict)  # first and later admissions
    tools_ns: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # from a token to the plan after the tool's end

    def expected_wait_ns(self, sequence: Sequence) -> int:
        """What the reasons must add up to: from the first plan after submission to the first step, and each way back."""
        entered = self.entered_ns.get(sequence.spec.request_id, [])
        put_back = self.preempted_ns.get(sequence.spec.request_id, [])
        assert sequence.queued_ns is not None
        first = next((at for at in self.plans_ns if at >= sequence.queued_ns), None)
        if not entered or first is None:
            return 0
        return entered[0] - first + sum(back - out for out, back in zip(put_back, entered[1:], strict=False))


class Driver:
    """duration: of a step, by its plan. real: tokens are generated and stop tokens end a sequence."""

    def __init__(
        self, config: EngineConfig, *, real: bool = False, duration: Callable[[StepPlan], int] | None = None
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.trace = Trace()
        self.now_ns = 0
        self._real = real
        self._duration = duration or (lambda plan: 5 * MS + 50_000 * (plan.prefill_tokens + len(plan.decodes)))
        self._memory: dict[tuple[int, int], bytes] = {}  # block and place: the prefix written there
        self._prefixes: dict[str, list[bytes]] = {}
        self._begun: set[str] = set()
        self._calling: dict[Sequence, int] = {}
        self._cancelled: dict[str, tuple[object, ...]] = {}
        self._arrivals: list[RequestSpec] = []
        self._stops: list[tuple[int, str]] = []
        self._alive: list[Sequence] = []

    def submit(self, spec: RequestSpec) -> Sequence | None:
        sequence = Sequence(spec, len(self.trace.sequences))
        refusal = self.scheduler.submit(sequence, max(spec.arrival_ns, 0))
        if refusal is not None:
            self.trace.refused[spec.request_id] = refusal
            return None
        self.trace.sequences[spec.request_id] = sequence
        self._alive.append(sequence)
        return sequence

    def run(self, specs: Items[RequestSpec], cancels: Items[tuple[int, str]] = (), steps: int = 20_000) -> Trace:
        """Until all have ended. cancels: when, and whom. Both reach the scheduler at their time, also while a step runs."""
        self._arrivals = sorted(specs, key=lambda spec: spec.arrival_ns)
        self._stops = sorted(cancels)
        for _ in range(steps):
            self._catch_up(self.now_ns)
            if self.step() is not None:
                continue
            moments = [spec.arrival_ns for spec in self._arrivals[:1]] + [at for at, _ in self._stops[:1]]
            wake = self.scheduler.wake_ns()
            if wake is not None:
                moments.append(wake)
            if not moments:
                break
            self.now_ns = max(self.now_ns + 1, min(moments))
        assert all(sequence.state is State.FINISHED for sequence in self.trace.sequences.values())
        for name, state in self._cancelled.items():  # nothing happened to it afterwards, not even the step it was in
            assert _state(self.trace.sequences[name]) == state
        return self.trace

    def _catch_up(self, until_ns: int) -> None:
        """What came up to then, in order of time."""
        while True:
            arrival = self._arrivals[0].arrival_ns if self._arrivals else until_ns + 1
            stop = self._stops[0][0] if self._stops else until_ns + 1
            if min(arrival, stop) > until_ns:
                return
            if arrival <= stop:
                self.submit(self._arrivals.pop(0))
            else:
                self.cancel(*self._stops.pop(0))

    def cancel(self, at_ns: int, request_id: str) -> None:
        sequence = self.trace.sequences.get(request_id)
        if sequence is not None:
            self.scheduler.cancel(sequence, at_ns)
            self._cancelled.setdefault(request_id, _state(sequence))
            self.audit()

    def step(self) -> Step | None:
        """One plan and its step. None: nothing could run."""
        begin = self.now_ns
        self.trace.plans_ns.append(begin)
        plan = self.scheduler.plan(begin)
        for sequence in [each for each in self._calling if each.state is not State.PAUSED]:
            since = self._calling.pop(sequence)
            self.trace.tools_ns.setdefault(sequence.spec.request_id, []).append((since, begin))
        for sequence in self._alive:  # put back in a plan that ran nothing is put back as well
            name = sequence.spec.request_id
            if sequence.preempted_ns == begin and sequence.state is State.WAITING:
                self.trace.preempted_ns.setdefault(name, []).append(begin)
                self._begun.discard(name)
        if plan is None:
            self.audit()
            return None
        for chunk in plan.chunks:
            name = chunk.sequence.spec.request_id
            if name not in self._begun:
                self._begun.add(name)
                self.trace.entered_ns.setdefault(name, []).append(begin)
        self.audit(plan)
        self.now_ns += self._duration(plan)
        self._write(plan)
        step = Step(
            plan.number, begin, self.now_ns,
            tuple(each.spec.request_id for each in plan.decodes),
            tuple(
                (each.sequence.spec.request_id, each.past_tokens, each.new_tokens, each.last, each.recompute)
                for each in plan.chunks
            ),
            tuple(each.spec.request_id for each in plan.preempted),
            plan.waiting, plan.slots_reserved, plan.kv_blocks_used,
        )  # fmt: skip
        self.trace.steps.append(step)
        sampled = plan.sampled
        self._catch_up(self.now_ns - 1)  # the step is running meanwhile
        if self._real:
            tokens = [self._next_token(sequence) for sequence in sampled]
            self.scheduler.complete(plan, self.now_ns, tokens)
        else:
            self.scheduler.complete(plan, self.now_ns, None)
        for sequence in sampled:
            self._call_tools(sequence)
        self._alive = [sequence for sequence in self._alive if sequence.state is not State.FINISHED]
        self.audit()
        return step

    def scheduler_step(self) -> None:
        """As step, without audit and record: for long queues."""
        plan = self.scheduler.plan(self.now_ns)
        assert plan is not None
        self.now_ns += self._duration(plan)
        self.scheduler.complete(plan, self.now_ns, None)

    def _call_tools(self, sequence: Sequence) -> None:
        for tool in sequence.spec.tools:
            if tool.after_tokens == sequence.output_tokens and sequence.state is State.RUNNING:
                self._calling[sequence] = self.now_ns
                self.scheduler.pause(sequence, self.now_ns + tool.duration_ns)

    # --- a memory that is really written ------------------------------------------------------------------------------

    def _tokens(self, sequence: Sequence) -> list[int]:
        assert sequence.spec.prompt is not None
        return list(sequence.spec.prompt) + sequence.output

    def _prefix(self, sequence: Sequence, length: int) -> bytes:
        """What the first `length` tokens leave in the last of their places."""
        known = self._prefixes.setdefault(sequence.spec.request_id, [b""])
        tokens = self._tokens(sequence)
        while len(known) <= length:
            known.append(blake2b(known[-1] + tokens[len(known) - 1].to_bytes(4, "big"), digest_size=8).digest())
        return known[length]

    def _write(self, plan: StepPlan) -> None:
        """Each token is written behind those before it, which must still be there."""
        if not self._real:
            return
        size = self.config.block_tokens
        work = [(chunk.sequence, chunk.past_tokens, chunk.new_tokens) for chunk in plan.chunks]
        work += [(sequence, sequence.computed_tokens, 1) for sequence in plan.decodes]
        for sequence, past, new in work:
            for place in range(past):
                written = self._memory.get((sequence.blocks[place // size], place % size))
                assert written == self._prefix(sequence, place + 1), (sequence.spec.request_id, place, past)
            for place in range(past, past + new):
                self._memory[sequence.blocks[place // size], place % size] = self._prefix(sequence, place + 1)

    def _next_token(self, sequence: Sequence) -> int:
        """Follows from all tokens before it, as with a greedy model."""
        return self._prefix(sequence, sequence.total_tokens)[0] % VOCABULARY

    # --- the audit ----------------------------------------------------------------------------------------------------

    def audit(self, plan: StepPlan | None = None) -> None:
        pool, config = self.scheduler.pool, self.config
        held: Counter[int] = Counter()
        content: dict[int, tuple[int, int]] = {}
        for sequence in self._alive:
            if sequence.state in (State.WAITING, State.FINISHED):
                assert not sequence.blocks
                continue
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for place, block in enumerate(sequence.blocks):
                held[block] += 1
                if held[block] > 1:  # shared: the same full prefix, at the same place
                    assert place < len(sequence.block_hashes)
                    assert content[block] == (place, sequence.block_hashes[place])
                elif place < len(sequence.block_hashes):
                    content[block] = (place, sequence.block_hashes[place])
                else:
                    content[block] = (place, id(sequence))
        assert pool.used_blocks == len(held)
        assert pool.used_blocks + pool.free_blocks == pool.total_blocks
        assert 0 <= pool.cached_blocks <= pool.free_blocks
        if isinstance(pool, PagedPool):
            assert all(pool.owners(block) == count for block, count in held.items())
        states = Counter(sequence.state for sequence in self._alive)
        assert self.scheduler.waiting_count == states[State.WAITING]
        assert self.scheduler.running_count == states[State.RUNNING]
        assert self.scheduler.paused_count == states[State.PAUSED]
        assert self.scheduler.running_count + self.scheduler.paused_count <= config.max_num_seqs
        if plan is not None:
            self._audit_plan(plan)

    def _audit_plan(self, plan: StepPlan) -> None:
        config, size = self.config, self.config.block_tokens
        assert plan.prefill_tokens + len(plan.decodes) <= config.step_token_budget
        names = [sequence.spec.request_id for sequence in plan.decodes]
        names += [chunk.sequence.spec.request_id for chunk in plan.chunks]
        assert len(set(names)) == len(names)
        assert not set(names) & {
            sequence.spec.request_id for sequence in plan.preempted if sequence.preempted_ns == self.now_ns
        }
        for sequence in plan.decodes:
            assert sequence.state is State.RUNNING and sequence.decoding
            assert sequence.computed_tokens == sequence.total_tokens - 1
            assert len(sequence.blocks) * size > sequence.computed_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.state is State.RUNNING and chunk.new_tokens > 0
            assert chunk.past_tokens == sequence.computed_tokens
            reached = chunk.past_tokens + chunk.new_tokens
            assert chunk.last == (reached == sequence.target_tokens) and reached <= sequence.target_tokens
            assert len(sequence.blocks) * size >= reached
            if not config.chunked_prefill:
                assert chunk.last
            elif config.prefill_chunk_tokens is not None:
                assert chunk.new_tokens <= config.prefill_chunk_tokens
        if config.max_prefill_tokens is not None and (config.chunked_prefill or len(plan.chunks) > 1):
            assert plan.prefill_tokens <= config.max_prefill_tokens
        assert len(plan.waiting) == len(QUEUE_REASONS) and sum(plan.waiting) == self.scheduler.waiting_count
        assert plan.slots_reserved <= config.max_num_seqs
        assert plan.kv_blocks_used == self.scheduler.pool.used_blocks
        if config.pools:
            self._audit_shares(plan)
        elif config.order == "fcfs" and not config.tenants:
            self._audit_memory_reason(plan)

    def _audit_shares(self, plan: StepPlan) -> None:
        """Where nothing is lent, each class stays within what is its own."""
        config = self.config
        if any(pool.lends for pool in config.pools):
            return
        seats: Counter[str | None] = Counter()
        tokens: Counter[str | None] = Counter()
        for sequence in self._alive:
            seats[sequence.spec.request_class] += sequence.state in (State.RUNNING, State.PAUSED)
        for sequence in plan.decodes:
            tokens[sequence.spec.request_class] += 1
        for chunk in plan.chunks:
            tokens[chunk.sequence.spec.request_class] += chunk.new_tokens
        for index, pool in enumerate(config.pools):
            assert sum(seats[name] for name in pool.classes) <= pool.slot_ratio * config.max_num_seqs
            assert sum(tokens[name] for name in pool.classes) <= pool.budget_ratio * config.step_token_budget
            assert self.scheduler.pool.share_used[index] <= pool.kv_ratio * config.kv_blocks

    def _audit_memory_reason(self, plan: StepPlan) -> None:
        """Whoever is said to wait for blocks could not have had them."""
        waiting = [sequence for sequence in self._alive if sequence.state is State.WAITING]
        if not plan.waiting[1] or plan.preempted or waiting[0].preemptions:
            return
        pool = self.scheduler.pool
        spare = pool.total_blocks // 100 if self.scheduler.running_count + self.scheduler.paused_count else 0
        assert not pool.can_allocate(pool.need(waiting[0]), spare)


def _state(sequence: Sequence) -> tuple[object, ...]:
    return (
        sequence.state, sequence.finish_reason, sequence.finished_ns, sequence.output_tokens, sequence.computed_tokens,
        len(sequence.output), sequence.last_token_ns, tuple(map(tuple, sequence.segments)), tuple(sequence.waits_ns),
    )  # fmt: skip
