"""Who gives way: when memory runs out for those who decode, when someone more urgent waits, when an owner wants its share back."""

from __future__ import annotations

from itertools import islice

from phasewise.instrumented_engine.blocks import KvPool
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.scheduling.fairness import Account, Accounts
from phasewise.instrumented_engine.scheduling.seats import Seats
from phasewise.instrumented_engine.scheduling.shares import Share, Shares
from phasewise.instrumented_engine.scheduling.waiting import KV, POLICY
from phasewise.instrumented_engine.sequence import Sequence, State


class Preemption:
    """put_back: who had to, since somebody last took the list."""

    def __init__(self, config: EngineConfig, pool: KvPool, seats: Seats, shares: Shares, accounts: Accounts) -> None:
        self.put_back: list[Sequence] = []
        self._block_tokens = config.block_tokens
        self._step_tokens = config.step_token_budget
        self._slots = config.max_num_seqs
        self._pool = pool
        self._seats = seats
        self._shares = shares
        self._accounts = accounts
        continuous = config.batching == "continuous"  # a static batch would not take anyone into the seat
        self._seizes = continuous and config.preempt_for_priority and config.order == "priority"
        self._lends = continuous and any(share.lends for share in shares.parts)

    def make_room(self, now_ns: int) -> None:
        """Before anything is planned: owners take back what they lent, and the urgent replace the less urgent."""
        if not (self._seizes or self._lends):
            return
        for share in self._shares.parts:
            if share.queue.waiting and self._lends:
                self._take_back(share, now_ns)
            if share.queue.waiting and self._seizes:
                self._replace(share, now_ns)

    def _take_back(self, share: Share, now_ns: int) -> None:
        """The share's own seats and blocks, as far as those who wait could use them."""
        head = share.queue.head(anyone=True)
        wanted = min(self._shares.room(share, "slots", borrowing=False), share.queue.waiting)
        while head is not None and wanted > 0:
            account: Account = head.mark.account
            need = self._pool.need(head, share.index)
            if need.charged > self._shares.room(share, "blocks", borrowing=False):
                return
            if self._free_seats(account) < wanted:
                borrowers = self._shares.borrowers("slots")
            elif not self._pool.can_allocate(need, self._seats.spare_blocks(share)):
                borrowers = self._shares.borrowers("blocks")
            else:
                return
            victim = self._seats.last_in_line(borrowers, account)
            if victim is None:
                return
            self._put_out(victim, now_ns)

    def _replace(self, share: Share, now_ns: int) -> None:
        """A waiting sequence takes the seat or the blocks of running ones of lower priority, if those are enough."""
        seats, pool = self._seats, self._pool
        seated: list[Sequence] = []
        promised = 0  # blocks, to those
        refused: set[Account] = set()  # who may take no seat, since all that could be had are kept for other tenants
        tokens = self._step_tokens - len(seats.decoding)
        for sequence in islice(share.queue.in_order(), self._slots):
            priority, account = sequence.spec.priority, sequence.mark.account
            if tokens <= 0 or seats.last_in_line([share], below=priority) is None:
                return
            if account in refused:
                continue
            need = pool.need(sequence, share.index)
            wanted = need.taken + promised + seats.spare_blocks(share)
            if wanted - pool.free_blocks > seats.blocks_below(share, priority):
                return
            while self._free_seats(account) <= len(seated) or wanted > pool.free_blocks:
                victim = seats.last_in_line([share], account, priority)
                if victim is None:
                    refused.add(account)
                    break
                self._put_out(victim, now_ns)
            else:
                seated.append(sequence)
                promised += need.taken
                tokens -= need.fresh * self._block_tokens

    def _free_seats(self, account: Account) -> int:
        """Seats this tenant may take, its own included."""
        unused = self._accounts.unused_reserved_slots
        return self._seats.free - unused + max(0, account.reserved - account.live)

    def _put_out(self, victim: Sequence, now_ns: int) -> None:
        """In favour of someone else, not for lack of memory to go on."""
        self._seats.preempt(victim, now_ns, POLICY)
        self.put_back.append(victim)

    def grow(self, decodes: list[Sequence], now_ns: int) -> set[int]:
        """One more block for each whose last one is full; where none is free, someone is put back.

        Returns the pool shares that ran out of memory (all, where the whole pool did): nobody may enter there now.
        """
        short: set[int] = set()
        block_tokens = self._block_tokens
        for sequence in [each for each in decodes if not each.computed_tokens % block_tokens]:
            if sequence.state is not State.RUNNING:
                continue
            self._pool.publish_output(sequence)
            if len(sequence.blocks) * block_tokens > sequence.computed_tokens:
                continue
            share = self._shares.parts[sequence.mark.share]
            while sequence.state is State.RUNNING:
                full = not self._shares.alone and self._shares.room(share, "blocks", growing=True) <= 0
                if self._pool.can_extend() and not full:
                    self._pool.extend(sequence, share.index)
                    break
                short.update([share.index] if full else range(len(self._shares.parts)))
                victim = self._victim(share, full) or sequence
                self._seats.preempt(victim, now_ns, KV)
                self.put_back.append(victim)
        return short

    def _victim(self, share: Share, full: bool) -> Sequence | None:
        """Of the same share when that one is full, else of those that hold more than is theirs, else of all."""
        if self._shares.alone or full:
            return self._seats.last_in_line([share])
        borrowers = self._shares.borrowers("blocks")
        return self._seats.last_in_line(borrowers or self._shares.parts) or self._seats.last_in_line([share])
