"""Sequences that wait, in the order they will enter, and for what they waited: constant time a step, however many they are.

Each reason has a clock of the whole queue that runs while the reason holds; a sequence notes the clocks when it comes and takes
the differences when it leaves. Reasons are decided at the end of a plan and hold until the next one. What a sequence waited
before its first plan (for a step that was running) is no reason and in none of the clocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from phasewise.instrumented_engine.config import Order
from phasewise.instrumented_engine.scheduling.fairness import Account, Accounts
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS

Reason = Literal[0, 1, 2, 3, 4]  # place in QUEUE_REASONS
SLOT: Reason = 0
KV: Reason = 1
BUDGET: Reason = 2
WINDOW: Reason = 3
POLICY: Reason = 4

Rank = tuple[float, int]
LaneKey = tuple[int, str | None, bool]  # priority, tenant, whether it has seats of its own


class Place:
    """What the scheduler knows of a sequence besides what others see (`Sequence.mark`).

    number: order of submission. limit: output tokens at which it ends, for a simulated run, read by `complete` only. work,
    blocks: its predicted tokens and KV blocks. noted: the queue's clocks when its first plan began; None before. returns: why
    it was put back, if it ran before.
    """

    __slots__ = ("account", "blocks", "lane", "limit", "noted", "number", "returns", "share", "work")

    def __init__(self, number: int, share: int, account: Account, limit: int, work: float, blocks: float) -> None:
        self.number = number
        self.share = share
        self.account = account
        self.limit = limit
        self.work = work
        self.blocks = blocks
        self.lane: Lane | None = None
        self.noted: list[int] | None = None
        self.returns: Reason | None = None


class Lane:
    """Those among whom the first come goes first. account: of the tenant whose lane it is. reserved: its tenant has seats of
    its own. shift: what its clocks differ from the queue's. work: predicted tokens. in_heap: its valid entry."""

    __slots__ = ("account", "in_heap", "key", "members", "priority", "reserved", "returning", "shift", "work")

    def __init__(self, key: LaneKey, account: Account) -> None:
        self.key = key
        self.priority, _, self.reserved = key
        self.account = account
        self.work = 0.0
        self.members: OrderedDict[Sequence, None] = OrderedDict()
        self.returning = 0
        self.shift = [0] * len(QUEUE_REASONS)
        self.in_heap: Rank | None = None

    @property
    def head(self) -> Sequence:
        return next(iter(self.members))


class WaitingQueue:
    """Of one pool share. Lanes: one in all (fcfs), one a priority, or one a tenant (fair); tenants with seats of their own
    have lanes of their own in any order, since they may pass where others may not."""

    def __init__(self, order: Order, accounts: Accounts, keep_oldest: bool) -> None:
        self.waiting = 0
        self.work = 0.0  # predicted tokens of all that wait
        self._order = order
        self._accounts = accounts
        self._lanes: dict[LaneKey, Lane] = {}
        self._heap: list[tuple[Rank, int, Lane]] = []
        self._pushed = 0
        self._reserved_lanes: list[Lane] = []
        self._clocks = [0] * len(QUEUE_REASONS)
        self._reason: Reason | None = None
        self._other: list[tuple[Lane, Reason]] = []  # lanes that wait for something else than the queue does
        self._since_ns = 0
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()
        self._returning = [0] * len(QUEUE_REASONS)
        self._oldest: OrderedDict[Sequence, None] | None = OrderedDict() if keep_oldest else None

    # --- coming and going ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """At the end of its class; its clocks start with the next plan."""
        place: Place = sequence.mark
        lane = self._lane_of(sequence)
        account = place.account
        if not account.waiting and self._order == "fair":
            account.served = max(account.served, self._least_served())
        place.lane = lane
        lane.members[sequence] = None
        self._fresh[sequence] = None
        if self._oldest is not None:
            self._oldest[sequence] = None
        self._count(place, 1)
        self._enter_heap(lane)

    def put_back(self, sequence: Sequence, reason: Reason) -> None:
        """At the head of its class, waiting for one thing until it runs again."""
        place: Place = sequence.mark
        lane = self._lane_of(sequence)
        place.lane = lane
        place.returns = reason
        lane.members[sequence] = None
        lane.members.move_to_end(sequence, last=False)
        lane.returning += 1
        self._returning[reason] += 1
        self._count(place, 1)
        self._enter_heap(lane)

    def take(self, sequence: Sequence, now_ns: int) -> None:
        """Out of the queue, at a plan that began at `now_ns`; books what it waited for."""
        place: Place = sequence.mark
        lane = place.lane
        assert lane is not None
        del lane.members[sequence]
        self._book(sequence, place, lane, now_ns)
        self._count(place, -1)
        place.lane = None
        if self._order == "fair" and not self.waiting:
            self._accounts.floor = max(self._accounts.floor, place.account.served)
        self._enter_heap(lane)
        if not lane.members:  # clients invent tenants and priorities: none is kept that is empty
            del self._lanes[lane.key]
            if lane.reserved:
                self._reserved_lanes.remove(lane)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """As take, at any time: a cancelled one."""
        self.accrue(now_ns, at_plan=False)
        self.take(sequence, now_ns)

    def _count(self, place: Place, change: int) -> None:
        assert place.lane is not None
        self.waiting += change
        self.work += change * place.work
        place.lane.work += change * place.work
        self._accounts.counted(place.account, change)

    def _book(self, sequence: Sequence, place: Place, lane: Lane, now_ns: int) -> None:
        self._fresh.pop(sequence, None)
        if self._oldest is not None:
            self._oldest.pop(sequence, None)
        if place.returns is not None:
            assert sequence.preempted_ns is not None
            sequence.waits_ns[place.returns] += now_ns - sequence.preempted_ns
            lane.returning -= 1
            self._returning[place.returns] -= 1
            place.returns = None
        elif place.noted is not None:
            waits = sequence.waits_ns
            for reason, before in enumerate(place.noted):
                waits[reason] += self._clocks[reason] + lane.shift[reason] - before
            place.noted = None

    # --- order --------------------------------------------------------------------------------------------------------

    def head(self, anyone: bool) -> Sequence | None:
        """Who is next. anyone: there is a seat that no tenant reserved; else only tenants with a seat kept for them."""
        best: Lane | None = None
        rank: Rank | None = None
        if anyone:
            best = self._first_lane()
            rank = None if best is None else best.in_heap
        for lane in self._reserved_lanes:
            if not anyone and lane.account.live >= lane.account.reserved:
                continue
            own = self._rank(lane)
            if rank is None or own < rank:
                best, rank = lane, own
        return None if best is None else best.head

    @property
    def oldest_ns(self) -> int | None:
        """When the longest waiting newcomer came (kept for the batching window only)."""
        return next(iter(self._oldest)).queued_ns if self._oldest else None

    @property
    def any_returning(self) -> bool:
        return any(self._returning)

    def in_order(self) -> Iterator[Sequence]:
        """As they would enter, lane by lane. O(lanes log lanes) at the first one; lanes not yet reached may change meanwhile."""
        for lane in sorted(self._lanes.values(), key=self._rank):
            yield from lane.members

    def work_before(self, priority: int) -> float:
        """Predicted tokens that go before a newcomer of this priority."""
        if self._order == "priority":
            return sum(lane.work for lane in self._lanes.values() if lane.priority <= priority)
        return self.work

    def work_of(self, account: Account) -> float:
        """Predicted tokens of one tenant that wait, where each tenant has a lane of its own."""
        return sum(
            lane.work
            for reserved in (False, True)
            if (lane := self._lanes.get((0, account.tenant, reserved))) is not None
        )

    def _rank(self, lane: Lane) -> Rank:
        number = lane.head.mark.number
        if self._order == "priority":
            return lane.priority, number
        if self._order == "fair":
            return lane.account.served, number
        return 0, number

    def _lane_of(self, sequence: Sequence) -> Lane:
        account: Account = sequence.mark.account
        reserved = account.reserved > 0
        priority = sequence.spec.priority if self._order == "priority" else 0
        key = (priority, account.tenant if reserved or self._order == "fair" else None, reserved)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, account)
            if reserved:
                self._reserved_lanes.append(lane)
        return lane

    def _enter_heap(self, lane: Lane) -> None:
        """One valid entry a lane that has members and no seats of its own."""
        if lane.reserved:
            return
        rank = self._rank(lane) if lane.members else None
        if rank == lane.in_heap:
            return
        lane.in_heap = rank
        if rank is not None:
            self._pushed += 1
            heapq.heappush(self._heap, (rank, self._pushed, lane))

    def _first_lane(self) -> Lane | None:
        heap = self._heap
        while heap:
            rank, _, lane = heap[0]
            if lane.in_heap != rank:
                heapq.heappop(heap)
                continue
            if self._order == "fair" and lane.account.served > rank[0]:  # served since: look again at its new place
                heapq.heappop(heap)
                self._enter_heap(lane)
                continue
            return lane
        return None

    def _least_served(self) -> float:
        lane = self._first_lane()
        served = [reserved.account.served for reserved in self._reserved_lanes]
        if lane is not None:
            served.append(lane.account.served)
        if served:
            self._accounts.floor = min(served)
        return self._accounts.floor

    # --- clocks -------------------------------------------------------------------------------------------------------

    def accrue(self, now_ns: int, at_plan: bool = True) -> None:
        """Lets the clocks run up to now. at_plan: newcomers start to note them."""
        if self._reason is not None:
            passed = now_ns - self._since_ns
            self._clocks[self._reason] += passed
            for lane, reason in self._other:
                lane.shift[self._reason] -= passed
                lane.shift[reason] += passed
            self._since_ns = now_ns
        if at_plan and self._fresh:
            for sequence in self._fresh:
                place: Place = sequence.mark
                lane_of_it = place.lane
                assert lane_of_it is not None
                place.noted = [clock + shift for clock, shift in zip(self._clocks, lane_of_it.shift, strict=True)]
            self._fresh.clear()

    def settle(self, now_ns: int, general: Reason, entitled: Reason, counts: list[int]) -> None:
        """What all wait for from this plan on. general: those without a seat kept for their tenant; entitled: the others.
        Adds the sequences by reason to `counts`."""
        self._since_ns = now_ns
        if not self.waiting:
            self._reason = None
            self._other = []
            return
        self._reason = general
        self._other = []
        alike = self.waiting
        for reason, returning in enumerate(self._returning):
            counts[reason] += returning
            alike -= returning
        if general != entitled:
            for lane in self._reserved_lanes:
                if lane.account.live < lane.account.reserved:
                    self._other.append((lane, entitled))
                    newcomers = len(lane.members) - lane.returning
                    counts[entitled] += newcomers
                    alike -= newcomers
        counts[general] += alike
