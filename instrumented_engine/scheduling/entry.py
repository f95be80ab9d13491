"""What a step takes of prompts: the next chunks of those begun, then newcomers from the queues, and why the queues stand still."""

from __future__ import annotations

from phasewise.instrumented_engine.blocks import KvPool, Need
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.plan import PromptChunk, StepPlan
from phasewise.instrumented_engine.scheduling.admission import Admission
from phasewise.instrumented_engine.scheduling.fairness import Account, Accounts
from phasewise.instrumented_engine.scheduling.seats import Seats
from phasewise.instrumented_engine.scheduling.shares import Share, Shares
from phasewise.instrumented_engine.scheduling.waiting import BUDGET, KV, POLICY, SLOT, WINDOW, Reason
from phasewise.instrumented_engine.sequence import Sequence

_UNLIMITED = 1 << 60


class Entry:
    """Of one scheduler; keeps what is left of the step being planned, and of the static batch being formed."""

    def __init__(
        self,
        config: EngineConfig,
        pool: KvPool,
        seats: Seats,
        shares: Shares,
        accounts: Accounts,
        admission: Admission,
    ) -> None:
        self._config = config
        self._pool = pool
        self._seats = seats
        self._shares = shares
        self._accounts = accounts
        self._admission = admission
        self._window_ns = round(config.batching_window_s * 1e9)
        self._chunk_limit = config.prefill_chunk_tokens or _UNLIMITED
        self._prefill_limit = config.max_prefill_tokens or _UNLIMITED
        self._fair = config.order == "fair"
        self._tokens_left = 0
        self._prefill_left = 0
        self._batch_open = 0  # seats of the static batch that are still to be filled

    def fill(self, plan: StepPlan, now_ns: int, short: set[int]) -> list[tuple[Reason, Reason]]:
        """Adds the chunks. Returns by share why its queue stands, for those without and with a seat kept for their tenant.

        short: shares where memory ran out for those who decode, so nobody enters.
        """
        parts = self._shares.parts
        self._tokens_left = self._config.step_token_budget - len(plan.decodes)
        self._prefill_left = self._prefill_limit
        self._open_batch()
        gates = [self._gate(share, now_ns) for share in parts]
        reasons: list[tuple[Reason, Reason]] = [(SLOT, SLOT)] * len(parts)
        begun = list(self._seats.prefilling)
        if self._config.order == "priority" and len(begun) > 1:
            begun.sort(key=lambda each: (each.spec.priority, each.mark.number))
        for borrowing in (True,) if self._shares.alone else (False, True):
            begun = [each for each in begun if not self._continue(plan, each, borrowing)]
            for share in parts:
                gate = gates[share.index]
                if not share.queue.waiting:
                    continue
                if share.index in short:
                    stop: Reason = KV if self._seats.free > 0 else SLOT
                    reasons[share.index] = stop, stop
                elif gate is not None:
                    reasons[share.index] = gate, gate
                else:
                    reasons[share.index] = self._admit(plan, share, now_ns, borrowing)
        if self._batch_open and not any(reason == BUDGET for reason, _ in reasons):
            self._batch_open = 0
        return reasons

    def _open_batch(self) -> None:
        """A static batch begins when the last one has ended; its size is fixed now, though the budget may spread its prompts
        over several steps."""
        if self._seats.batch is not None and not self._seats.live:
            self._seats.batch = 0
            self._batch_open = sum(share.queue.waiting for share in self._shares.parts)

    def _gate(self, share: Share, now_ns: int) -> Reason | None:
        """Why nobody of this share's queue may enter at all."""
        seats, queue = self._seats, share.queue
        if not queue.waiting:
            return None
        if seats.free <= 0 or (seats.batch is not None and not self._batch_open):
            return SLOT
        if not self._window_ns or queue.any_returning or (seats.batch is not None and seats.batch):
            return None
        oldest = queue.oldest_ns
        free = seats.free if self._shares.alone else min(seats.free, self._shares.room(share, "slots"))
        if oldest is None or now_ns - oldest >= self._window_ns or queue.waiting >= free:
            return None
        return WINDOW

    def _continue(self, plan: StepPlan, sequence: Sequence, borrowing: bool) -> bool:
        """The next chunk of a prompt begun, if the step has room for it."""
        share = self._shares.parts[sequence.mark.share]
        tokens = self._chunk_tokens(share, sequence.target_tokens - sequence.computed_tokens, borrowing)
        if tokens > 0:
            self._add_chunk(plan, sequence, share, tokens)
        return tokens > 0

    def _admit(self, plan: StepPlan, share: Share, now_ns: int, borrowing: bool) -> tuple[Reason, Reason]:
        """Newcomers in order until one lacks something: what it lacks, for those without and with a reserved seat."""
        seats, queue, pool = self._seats, share.queue, self._pool
        while queue.waiting:
            if seats.free <= 0 or (seats.batch is not None and not self._batch_open):
                return SLOT, SLOT
            if not self._shares.alone and self._shares.room(share, "slots", borrowing) <= 0:
                return POLICY, POLICY
            anyone = seats.free > self._accounts.unused_reserved_slots
            sequence = queue.head(anyone)
            if sequence is None:
                return POLICY, POLICY
            need = pool.need(sequence, share.index)
            remaining = sequence.target_tokens - len(need.found) * self._config.block_tokens
            tokens = self._chunk_tokens(share, remaining, borrowing)
            reason = self._lacks(share, need, tokens, borrowing)
            if reason is not None:
                return (reason if anyone else POLICY), reason
            queue.take(sequence, now_ns)
            self._enter(sequence, need, share, now_ns)
            if self._fair and not sequence.preemptions:
                account: Account = sequence.mark.account
                account.served += account.prompt_cost * remaining
            self._add_chunk(plan, sequence, share, tokens)
        return SLOT, SLOT

    def _lacks(self, share: Share, need: Need, tokens: int, borrowing: bool) -> Reason | None:
        """What keeps the head of a queue out although a seat is free; None: nothing."""
        if not self._pool.can_allocate(need, self._seats.spare_blocks(share)):
            return KV
        if not self._shares.alone and self._shares.room(share, "blocks", borrowing) < need.charged:
            return POLICY
        if tokens > 0:
            return None
        kept = not self._shares.alone and self._tokens_left > 0 and self._prefill_left > 0
        return POLICY if kept and self._shares.room(share, "tokens", borrowing) <= 0 else BUDGET

    def _enter(self, sequence: Sequence, need: Need, share: Share, now_ns: int) -> None:
        self._seats.enter(sequence, need, share)
        if self._seats.batch is not None:
            self._batch_open -= 1
        if sequence.scheduled_ns is None:
            sequence.scheduled_ns = now_ns
            self._admission.entered(share.index, sequence.mark.work)

    def _chunk_tokens(self, share: Share, remaining: int, borrowing: bool) -> int:
        """How many of a prompt's remaining tokens the step has room for; all or none where prompts are not chunked.

        Without chunks a prompt longer than max_prefill_tokens runs alone: it would never run otherwise.
        """
        room = self._tokens_left
        if not self._shares.alone:
            room = min(room, self._shares.room(share, "tokens", borrowing))
        if self._config.chunked_prefill:
            return min(remaining, room, self._prefill_left, self._chunk_limit)
        first = self._prefill_left == self._prefill_limit
        return remaining if remaining <= room and (first or remaining <= self._prefill_left) else 0

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, share: Share, tokens: int) -> None:
        past = sequence.computed_tokens
        last = past + tokens == sequence.target_tokens
        plan.chunks.append(PromptChunk(sequence, past, tokens, last, sequence.preemptions > 0))
        self._tokens_left -= tokens
        self._prefill_left -= tokens
        share.step_tokens += tokens
