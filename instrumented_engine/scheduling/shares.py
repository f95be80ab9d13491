"""Seats, blocks and step tokens kept apart for classes of requests, and what one may borrow of another's.

A share that lends gives what its owners leave idle, until one of them waits: then nothing more is lent, and what is out is taken
back (the scheduler preempts the borrower that came last). Classes that no share names have what remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.scheduling.waiting import WaitingQueue
from phasewise.rules.errors import InputError

Kind = Literal["slots", "blocks", "tokens"]


class Share:
    """One part of the engine. slots, blocks, tokens: what it has; live: its seats in use; step_tokens: used of this step."""

    __slots__ = ("blocks", "index", "lends", "live", "name", "queue", "slots", "step_tokens", "tokens")

    def __init__(
        self, index: int, name: str, slots: int, blocks: int, tokens: int, lends: bool, queue: WaitingQueue
    ) -> None:
        self.index = index
        self.name = name
        self.slots = slots
        self.blocks = blocks
        self.tokens = tokens
        self.lends = lends
        self.queue = queue
        self.live = 0
        self.step_tokens = 0


class Shares:
    """All of an engine's shares; the first is the only one where the settings name none. used_blocks: the pool's own list."""

    def __init__(self, parts: list[Share], of_class: dict[str, Share], rest: Share | None) -> None:
        self.parts = parts
        self.alone = len(parts) == 1
        self._of_class = of_class
        self._rest = rest
        self.used_blocks = [0] * len(parts)

    def of(self, request_class: str | None) -> Share | None:
        """None: nothing remains for this class."""
        return self._of_class.get(request_class, self._rest) if request_class is not None else self._rest

    def room(self, share: Share, kind: Kind, borrowing: bool = True, growing: bool = False) -> int:
        """How much more of its own and of what others lend it may take; what others borrowed is theirs until they give it back.

        growing: for a sequence that runs already: it may go on with what is lent until its owner takes it back.
        The physical limit (free seats, free blocks, tokens left) is the caller's to apply.
        """
        own = self._has(share, kind) - self._uses(share, kind)
        if not borrowing:
            return max(0, own)
        lent = 0
        for other in self.parts:
            if other is share:
                continue
            idle = self._has(other, kind) - self._uses(other, kind)
            if idle < 0 or (other.lends and (growing or not other.queue.waiting)):
                lent += idle
        if own >= 0:
            return own + max(0, lent)
        return max(0, own + lent)

    def borrowers(self, kind: Kind) -> list[Share]:
        """Those that use more than they have."""
        return [share for share in self.parts if self._uses(share, kind) > self._has(share, kind)]

    def reachable(self, share: Share, kind: Kind) -> int:
        """The most it can ever have, its own and all that lend."""
        return self._has(share, kind) + sum(
            self._has(other, kind) for other in self.parts if other is not share and other.lends
        )

    @staticmethod
    def _has(share: Share, kind: Kind) -> int:
        return share.slots if kind == "slots" else share.blocks if kind == "blocks" else share.tokens

    def _uses(self, share: Share, kind: Kind) -> int:
        if kind == "slots":
            return share.live
        return self.used_blocks[share.index] if kind == "blocks" else share.step_tokens


def shares_of(config: EngineConfig, make_queue: Callable[[], WaitingQueue]) -> Shares:
    """Raises InputError where a ratio gives no whole seat, block or token."""
    parts: list[Share] = []
    of_class: dict[str, Share] = {}
    slots, blocks, tokens = config.max_num_seqs, config.kv_blocks, config.step_token_budget
    for pool in config.pools:
        own = [
            int(ratio * size + 1e-9)
            for ratio, size in (
                (pool.slot_ratio, config.max_num_seqs),
                (pool.kv_ratio, config.kv_blocks),
                (pool.budget_ratio, config.step_token_budget),
            )
        ]
        if min(own) < 1:
            raise InputError(
                "engine settings",
                f"pools.{pool.name}",
                f"its ratios give {own[0]} seats, {own[1]} blocks and {own[2]} step tokens",
                "raise the ratio that gives none",
            )
        share = Share(len(parts), pool.name, own[0], own[1], own[2], pool.lends, make_queue())
        slots, blocks, tokens = slots - own[0], blocks - own[1], tokens - own[2]
        parts.append(share)
        for request_class in pool.classes:
            if request_class in of_class:
                raise InputError(
                    "engine settings",
                    f"pools.{pool.name}.classes",
                    f"{request_class!r} is in two pools",
                    "name each class once",
                )
            of_class[request_class] = share
    if not parts or (min(slots, blocks, tokens) >= 1 and _remains(config)):
        rest = Share(len(parts), "", slots, blocks, tokens, False, make_queue())
        parts.append(rest)
        return Shares(parts, of_class, rest)
    return Shares(parts, of_class, None)


def _remains(config: EngineConfig) -> bool:
    """Whether the shares leave a part on purpose, not by rounding."""
    return all(
        sum(getattr(pool, name) for pool in config.pools) < 1 - 1e-9
        for name in ("slot_ratio", "kv_ratio", "budget_ratio")
    )
