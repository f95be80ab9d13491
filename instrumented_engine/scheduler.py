"""Decides, step by step, who leaves, who enters, whose prompt is cut and who is put back. Pure: no clock, no tensor, no I/O.

A step holds, in this order and within `step_token_budget`: one token of each sequence that decodes, the next chunks of prompts
already begun, then newcomers from the queue. A newcomer enters with blocks for its whole prompt, so that only decoding can run
out of memory; then the running sequence that came last (of the lowest priority) is put back and computes its tokens again.
A newcomer leaves 1 % of the pool free while anything runs, or it would be put back at once (as vLLM's watermark).

Why a sequence waits, decided once a plan for the head of the queue and all behind it:

- slot: no seat is free; also everyone while a static batch runs;
- kv: a seat is free, the blocks of the prompt are not; and from a preemption for memory until the sequence runs again;
- window: a seat is free, the batching window is not over;
- budget: seat and blocks are free, the tokens (or prompt tokens) of the step are used up;
- policy: all three are there, but kept for a tenant or for the classes of another pool; and from a preemption in favour of
  someone else until the sequence runs again.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from phasewise.instrumented_engine.blocks import KvPool, PagedPool, hash_blocks
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.contiguous import ContiguousPool
from phasewise.instrumented_engine.plan import StepPlan
from phasewise.instrumented_engine.scheduling import stamps
from phasewise.instrumented_engine.scheduling.admission import Admission
from phasewise.instrumented_engine.scheduling.entry import Entry
from phasewise.instrumented_engine.scheduling.fairness import Account, Accounts
from phasewise.instrumented_engine.scheduling.preemption import Preemption
from phasewise.instrumented_engine.scheduling.seats import Seats
from phasewise.instrumented_engine.scheduling.shares import Share, shares_of
from phasewise.instrumented_engine.scheduling.waiting import Place, Reason, WaitingQueue
from phasewise.instrumented_engine.sequence import Refusal, Sequence, State
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS


class Scheduler:
    """Of one engine process. plan, the step and complete alternate; submit and cancel may come at any time, pause and resume
    between complete and plan. What happens during a step counts from the next plan on."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises InputError naming a setting that cannot be kept."""
        self.config = config
        self._accounts = Accounts(config.tenants, config.max_num_seqs)
        window = config.batching_window_s > 0
        self._shares = shares_of(config, lambda: WaitingQueue(config.order, self._accounts, keep_oldest=window))
        self.pool = _pool(config, len(self._shares.parts))
        self._shares.used_blocks = self.pool.share_used
        self._seats = Seats(config, self.pool, self._shares, self._accounts)
        self._admission = Admission(config, self.pool.total_blocks, len(self._shares.parts))
        self._preemption = Preemption(config, self.pool, self._seats, self._shares, self._accounts)
        self._entry = Entry(config, self.pool, self._seats, self._shares, self._accounts, self._admission)
        self._window_ns = round(config.batching_window_s * 1e9)
        self._fair = config.order == "fair"
        self._submitted = 0
        self._step = 0
        self._planned_ns = 0
        self._cancelled: set[Sequence] = set()  # since the last plan: its step may still compute them
        # Since a tool ended and until the next token: the longest gap before, and when this one begins without the tool.
        self._woken: dict[Sequence, tuple[int, int]] = {}
        self._paused_since: dict[Sequence, int] = {}

    # --- counts -------------------------------------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        return sum(share.queue.waiting for share in self._shares.parts)

    @property
    def running_count(self) -> int:
        return len(self._seats.decoding) + len(self._seats.prefilling)

    @property
    def paused_count(self) -> int:
        return len(self._seats.paused)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, now_ns: int) -> Refusal | None:
        """Takes it into the queue, or says why not. Calls with growing times."""
        spec = sequence.spec
        share = self._shares.of(spec.request_class)
        problem = self._never(sequence, share)
        if problem is not None or share is None:
            return Refusal(problem or f"no pool serves the class {spec.request_class!r}", 0.0, never=True, kind="never")
        account = self._accounts.of(spec.tenant)
        predicted = spec.prompt_tokens + self._admission.predicted_output_tokens(spec.max_output_tokens)
        blocks = float(self.pool.blocks_for(round(predicted)))
        if self._admission.active:
            before = self._work_before(share, sequence)
            refusal = self._admission.refusal(share.index, self.waiting_count, before, predicted, blocks)
            if refusal is not None:
                return refusal
        if spec.prompt is not None and not sequence.block_hashes and self.config.prefix_sharing:
            sequence.block_hashes = hash_blocks(spec.prompt, self.config.block_tokens)
        stop = spec.stop_after_tokens
        limit = spec.max_output_tokens if stop is None else min(stop, spec.max_output_tokens)
        sequence.mark = Place(self._submitted, share.index, account, limit, predicted, blocks)
        self._submitted += 1
        sequence.state = State.WAITING
        sequence.queued_ns = now_ns
        self._admission.took(blocks)
        share.queue.add(sequence)
        return None

    def _never(self, sequence: Sequence, share: Share | None) -> str | None:
        """What makes a request impossible here, whatever leaves."""
        spec = sequence.spec
        if spec.prompt_tokens < 1 or spec.max_output_tokens < 1:
            return f"{spec.prompt_tokens} prompt and {spec.max_output_tokens} output tokens: each must be at least 1"
        total = spec.prompt_tokens + spec.max_output_tokens
        if total > self.config.max_model_tokens:
            return f"prompt and output together are {total} tokens, the most is {self.config.max_model_tokens}"
        if share is None:
            return None
        blocks, most = self.pool.blocks_for(total - 1), self._shares.reachable(share, "blocks")  # the last needs no KV
        if blocks > most:
            return f"needs {blocks} KV blocks, there are {most}"
        tokens = self._shares.reachable(share, "tokens")
        if not self.config.chunked_prefill and total - 1 > tokens:
            return f"up to {total - 1} tokens must be computed in one step, the most is {tokens}"
        if self._accounts.reserved_slots == self.config.max_num_seqs and not self._accounts.of(spec.tenant).reserved:
            return "all seats are reserved for other tenants"
        return None

    def _work_before(self, share: Share, sequence: Sequence) -> float:
        """Predicted tokens that enter before a newcomer: in order `fair` its own tenant's, and as much more as the others get
        meanwhile for their weight."""
        spec, queue = sequence.spec, share.queue
        if not self._fair:
            return queue.work_before(spec.priority)
        account = self._accounts.of(spec.tenant)
        weights = self._accounts.waiting_weight + (0.0 if account.waiting else account.weight)
        return min(queue.work_of(account) * weights / account.weight, queue.work)

    def cancel(self, sequence: Sequence, now_ns: int) -> None:
        """Ends it, wherever it stands; finish_reason "abort". Seat and blocks serve the next step. Twice does nothing."""
        if sequence.state is State.FINISHED:
            return
        place: Place | None = sequence.mark
        if sequence.state is State.WAITING and place is not None:
            self._shares.parts[place.share].queue.remove(sequence, now_ns)
        elif sequence.state in (State.RUNNING, State.PAUSED):
            self._seats.drop(sequence)
            self._seats.vacate(sequence)
            self._cancelled.add(sequence)
            self._paused_since.pop(sequence, None)
        if place is not None:
            self._admission.ended(place.blocks, None, sequence.spec.max_output_tokens)
        sequence.state = State.FINISHED
        sequence.finished_ns = now_ns
        sequence.finish_reason = "abort"

    def pause(self, sequence: Sequence, until_ns: int | None, now_ns: int | None = None) -> None:
        """A tool works inside the stream: no tokens until then (None: until `resume`), but seat and blocks are kept.

        now_ns: since when, by default the last token. The time is left out of `longest_gap_ns`.
        """
        assert sequence.state is State.RUNNING
        self._seats.drop(sequence)
        self._seats.paused[sequence] = until_ns
        sequence.state = State.PAUSED
        since = now_ns if now_ns is not None else sequence.last_token_ns
        assert since is not None
        self._paused_since[sequence] = since

    def resume(self, sequence: Sequence, now_ns: int) -> None:
        """The tool has ended."""
        if sequence.state is State.PAUSED:
            self._seats.resume(sequence)
            self._note_woken(sequence, now_ns)

    def _note_woken(self, sequence: Sequence, now_ns: int) -> None:
        took_ns = now_ns - self._paused_since.pop(sequence)
        assert sequence.last_token_ns is not None
        longest_ns, begins_ns = self._woken.get(sequence, (sequence.longest_gap_ns, sequence.last_token_ns))
        self._woken[sequence] = longest_ns, begins_ns + took_ns

    def wake_ns(self) -> int | None:
        """When plan may answer otherwise without an arrival: a tool ends, or a batching window."""
        times = [until for until in self._seats.paused.values() if until is not None]
        if self._window_ns and self._seats.free > 0:
            for share in self._shares.parts:
                oldest = share.queue.oldest_ns
                if oldest is not None and oldest + self._window_ns > self._planned_ns:
                    times.append(oldest + self._window_ns)
        return min(times, default=None)

    # --- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step; None: nothing can run now."""
        self._planned_ns = now_ns
        seats, parts = self._seats, self._shares.parts
        self._cancelled.clear()
        for share in parts:
            share.queue.accrue(now_ns)
            share.step_tokens = 0
        if seats.paused:
            for sequence in seats.wake(now_ns):
                self._note_woken(sequence, now_ns)
        self._preemption.make_room(now_ns)
        plan = StepPlan(self._step)
        decodes = self._choose_decodes()
        short = self._preemption.grow(decodes, now_ns)
        if short:
            decodes = [sequence for sequence in decodes if sequence.state is State.RUNNING]
            self._count_decodes(decodes)
        plan.decodes = decodes
        plan.waiting = self._settle(now_ns, self._entry.fill(plan, now_ns, short))
        self._admission.planned(now_ns, [share.queue.waiting for share in parts])
        if not plan.decodes and not plan.chunks:
            return None
        self._step += 1
        plan.preempted, self._preemption.put_back = self._preemption.put_back, []
        plan.slots_reserved = seats.reserved
        plan.kv_blocks_used = self.pool.used_blocks
        return plan

    def _choose_decodes(self) -> list[Sequence]:
        """All that decode; where the budget is too small for them, those that have waited longest for their turn."""
        seats, budget = self._seats, self.config.step_token_budget
        if self._shares.alone:
            if len(seats.decoding) <= budget:
                return seats.decoding.copy()
            chosen, left = seats.decoding[:budget], seats.decoding[budget:]
        else:
            chosen, left = [], seats.decoding
            for borrowing in (False, True):
                left = self._choose_by_share(chosen, left, borrowing)
            if not left:
                return chosen
        seats.decoding = left + chosen
        return chosen.copy()

    def _choose_by_share(self, chosen: list[Sequence], candidates: list[Sequence], borrowing: bool) -> list[Sequence]:
        """Moves into `chosen` what the shares' budgets allow; returns the others."""
        rooms = [self._shares.room(share, "tokens", borrowing) for share in self._shares.parts]
        left = []
        for sequence in candidates:
            index = sequence.mark.share
            if borrowing:
                rooms[index] = self._shares.room(self._shares.parts[index], "tokens")
            if rooms[index] > 0:
                rooms[index] -= 1
                self._shares.parts[index].step_tokens += 1
                chosen.append(sequence)
            else:
                left.append(sequence)
        return left

    def _count_decodes(self, decodes: list[Sequence]) -> None:
        for share in self._shares.parts:
            share.step_tokens = 0
        for sequence in decodes:
            self._shares.parts[sequence.mark.share].step_tokens += 1

    def _settle(self, now_ns: int, reasons: list[tuple[Reason, Reason]]) -> tuple[int, int, int, int, int]:
        """Starts the clocks of the reasons; sequences left in the queue by reason."""
        counts = [0] * len(QUEUE_REASONS)
        for share, (general, entitled) in zip(self._shares.parts, reasons, strict=True):
            share.queue.settle(now_ns, general, entitled, counts)
        slot, kv, budget, window, policy = counts
        return slot, kv, budget, window, policy

    # --- the step is done ---------------------------------------------------------------------------------------------

    def complete(self, plan: StepPlan, now_ns: int, tokens: Items[int] | None) -> list[Sequence]:
        """Books the step that ended now; those that finished have left, in the order of `plan.sampled`.

        tokens: one for each of `plan.sampled`; None in simulation, where a sequence ends at `stop_after_tokens` or its maximum.
        """
        decodes, chunks = plan.decodes, plan.chunks
        if tokens is not None:
            self._append_tokens(plan, tokens)
        if self._cancelled:
            decodes = [sequence for sequence in decodes if sequence.state is State.RUNNING]
            chunks = [chunk for chunk in chunks if chunk.sequence.state is State.RUNNING]
        ended = stamps.decoded(decodes, plan.number, now_ns)
        seats = self._seats
        for chunk in chunks:
            sequence = chunk.sequence
            if stamps.prefilled(chunk, plan.number, self._planned_ns, now_ns):
                ended.append(sequence)
            self.pool.publish(sequence, chunk.past_tokens, sequence.computed_tokens)
            if chunk.last:
                seats.decoding.append(sequence)
        if any(chunk.last for chunk in chunks):
            seats.prefilling = [sequence for sequence in seats.prefilling if not sequence.decoding]
        if self._woken:
            self._leave_out_tools(now_ns)
        if self._fair:
            for sequence in plan.sampled:
                account: Account = sequence.mark.account
                account.served += account.output_cost
        if tokens is not None:
            ended = [sequence for sequence in plan.sampled if self._stopped(sequence)]
        for sequence in ended:
            self._end(sequence, now_ns, simulated=tokens is None)
        if ended:
            seats.decoding = [sequence for sequence in seats.decoding if sequence.state is State.RUNNING]
        return ended

    def _append_tokens(self, plan: StepPlan, tokens: Items[int]) -> None:
        for sequence, token in zip(plan.sampled, tokens, strict=True):
            if sequence.state is State.RUNNING:
                sequence.output.append(token)

    def _stopped(self, sequence: Sequence) -> bool:
        if sequence.state is not State.RUNNING:
            return False
        spec = sequence.spec
        return sequence.output[-1] in spec.stop_token_ids or sequence.output_tokens >= spec.max_output_tokens

    def _end(self, sequence: Sequence, now_ns: int, simulated: bool) -> None:
        self.pool.publish_output(sequence)
        spec = sequence.spec
        if simulated:
            stopped = spec.stop_after_tokens is not None and spec.stop_after_tokens <= sequence.output_tokens
        else:
            stopped = sequence.output[-1] in spec.stop_token_ids
        self._seats.vacate(sequence)
        sequence.state = State.FINISHED
        sequence.finished_ns = now_ns
        sequence.finish_reason = "stop" if stopped else "length"
        self._admission.ended(sequence.mark.blocks, sequence.output_tokens, spec.max_output_tokens)

    def _leave_out_tools(self, now_ns: int) -> None:
        """The first gap after a tool, without the time the tool took."""
        for sequence, (longest_ns, begins_ns) in list(self._woken.items()):
            if sequence.state is State.FINISHED:
                del self._woken[sequence]
            elif sequence.last_token_ns == now_ns:
                sequence.longest_gap_ns = max(longest_ns, now_ns - begins_ns)
                del self._woken[sequence]


def _pool(config: EngineConfig, shares: int) -> KvPool:
    if config.kv_layout == "contiguous":
        return ContiguousPool(config.kv_blocks, config.block_tokens, config.max_model_tokens, shares=shares)
    return PagedPool(
        config.kv_blocks,
        config.block_tokens,
        prefix_sharing=config.prefix_sharing,
        eviction=config.eviction,
        shares=shares,
    )
