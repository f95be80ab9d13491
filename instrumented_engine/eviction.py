"""Which cached block without an owner is given up first, when a block is needed and no unused one is left."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol


class EvictionOrder(Protocol):
    """The blocks that hold a reusable prefix and belong to no sequence. Each operation O(1) or O(log n)."""

    def add(self, block: int, uses: int, born: int) -> None:
        """The last owner let it go. uses: how often a later request found it; born: running number of its registration."""
        ...

    def discard(self, block: int) -> None:
        """A request found it: it has an owner again."""
        ...

    def pop(self) -> int:
        """The block to give up. Raises KeyError or IndexError when there is none."""
        ...

    def __len__(self) -> int: ...


class LeastRecentlyUsed:
    """The block let go the longest ago."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()  # a plain dict finds its first key in O(n) after deletions

    def add(self, block: int, uses: int, born: int) -> None:
        self._blocks[block] = None

    def discard(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


class Ranked:
    """A heap with entries that die in place: a block found again leaves its entry behind, to be skipped later."""

    __slots__ = ("_alive", "_by_uses", "_heap", "_tick")

    def __init__(self, by_uses: bool) -> None:
        self._by_uses = by_uses
        self._heap: list[tuple[int, int, int]] = []
        self._alive: dict[int, int] = {}  # block: tick of its only valid entry
        self._tick = 0

    def add(self, block: int, uses: int, born: int) -> None:
        self._tick += 1
        self._alive[block] = self._tick
        heapq.heappush(self._heap, (uses if self._by_uses else born, self._tick, block))
        if len(self._heap) > 2 * len(self._alive) + 64:
            self._heap = [entry for entry in self._heap if self._alive.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, block: int) -> None:
        del self._alive[block]

    def pop(self) -> int:
        while True:
            _, tick, block = heapq.heappop(self._heap)
            if self._alive.get(block) == tick:
                del self._alive[block]
                return block

    def __len__(self) -> int:
        return len(self._alive)


def eviction_order(name: str) -> EvictionOrder:
    """lru: let go the longest ago. lfu: found least often, among those let go the longest ago. fifo: computed the longest ago."""
    if name == "lru":
        return LeastRecentlyUsed()
    return Ranked(by_uses=name == "lfu")
