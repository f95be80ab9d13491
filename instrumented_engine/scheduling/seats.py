"""Sequences that hold a seat and KV blocks: who prefills, who decodes, who waits for a tool, and who has to give way."""

from __future__ import annotations

from collections.abc import Iterable

from phasewise.instrumented_engine.blocks import KvPool, Need
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.scheduling.fairness import Account, Accounts
from phasewise.instrumented_engine.scheduling.shares import Share, Shares
from phasewise.instrumented_engine.scheduling.waiting import Place, Reason
from phasewise.instrumented_engine.sequence import Sequence, State

_SPARE_PART = 100


class Seats:
    """batch: seats of a static batch, those of its ended sequences included; None where batching is continuous."""

    def __init__(self, config: EngineConfig, pool: KvPool, shares: Shares, accounts: Accounts) -> None:
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.paused: dict[Sequence, int | None] = {}  # until when; None: until resumed
        self.batch: int | None = 0 if config.batching == "static" else None
        self._slots = config.max_num_seqs
        self._by_priority = config.order == "priority"
        self._pool = pool
        self._shares = shares
        self._accounts = accounts

    @property
    def live(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.paused)

    @property
    def reserved(self) -> int:
        return self.live if self.batch is None else self.batch

    @property
    def free(self) -> int:
        return self._slots - self.reserved

    def spare_blocks(self, share: Share) -> int:
        """Blocks that newcomers leave to those of their share who run, or they would be put back at once (vLLM's watermark)."""
        return self._pool.total_blocks // _SPARE_PART if share.live else 0

    def enter(self, sequence: Sequence, need: Need, share: Share) -> None:
        """From the queue: a seat, and blocks for all it has to compute."""
        self._pool.allocate(sequence, need, share.index)
        sequence.state = State.RUNNING
        self.prefilling.append(sequence)
        share.live += 1
        if self.batch is not None:
            self.batch += 1
        self._accounts.seated(sequence.mark.account)

    def vacate(self, sequence: Sequence) -> None:
        """Seat and blocks are free at once; in a static batch the seat stays taken until the batch ends."""
        place: Place = sequence.mark
        share = self._shares.parts[place.share]
        self._pool.release(sequence, place.share)
        share.live -= 1
        self._accounts.unseated(place.account)

    def drop(self, sequence: Sequence) -> None:
        """Out of whichever list it is in."""
        if sequence in self.paused:
            del self.paused[sequence]
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            self.decoding.remove(sequence)

    def preempt(self, sequence: Sequence, now_ns: int, reason: Reason) -> None:
        """Back to the head of its class; all it computed has to be computed again, but for what the prefix cache keeps."""
        self.drop(sequence)
        self.vacate(sequence)
        if self.batch is not None:
            self.batch -= 1
        place: Place = sequence.mark
        sequence.state = State.WAITING
        sequence.computed_tokens = 0
        sequence.target_tokens = sequence.total_tokens
        sequence.preemptions += 1
        sequence.preempted_ns = now_ns
        self._shares.parts[place.share].queue.put_back(sequence, reason)

    def last_in_line(
        self, parts: Iterable[Share], newcomer: Account | None = None, below: int | None = None
    ) -> Sequence | None:
        """The running sequence that gives way: of the lowest priority (order `priority`), the one that came last.

        parts: only sequences of these shares. newcomer: the tenant that wants the seat, which is none of those kept for
        others. below: only those whose priority is lower (a higher number) than this.
        Sequences that wait for a tool are left alone: what they hold was promised to them.
        """
        indices = {share.index for share in parts}
        found: Sequence | None = None
        worst: tuple[int, int] | None = None
        for sequences in (self.decoding, self.prefilling):
            for sequence in sequences:
                place: Place = sequence.mark
                if place.share not in indices:
                    continue
                priority = sequence.spec.priority if self._by_priority else 0
                if below is not None and priority <= below:
                    continue
                account = place.account
                if newcomer not in (None, account) and account.live <= account.reserved:
                    continue
                if worst is None or (priority, place.number) > worst:
                    found, worst = sequence, (priority, place.number)
        return found

    def blocks_below(self, share: Share, priority: int) -> int:
        """Blocks that the sequences of lower priority hold alone."""
        return sum(
            self._pool.exclusive_blocks(sequence)
            for sequences in (self.decoding, self.prefilling)
            for sequence in sequences
            if sequence.mark.share == share.index and sequence.spec.priority > priority
        )

    def wake(self, now_ns: int) -> list[Sequence]:
        """Those whose tool has ended decode again."""
        awake = [sequence for sequence, until in self.paused.items() if until is not None and until <= now_ns]
        for sequence in awake:
            self.resume(sequence)
        return awake

    def resume(self, sequence: Sequence) -> None:
        del self.paused[sequence]
        sequence.state = State.RUNNING
        (self.decoding if sequence.decoding else self.prefilling).append(sequence)
