"""The baseline that paging is measured against: each sequence gets one range as long as the longest sequence allowed.

Most of what is reserved is never written, and a range that does not fit between its neighbours is not given although enough
blocks are free in all: the two kinds of fragmentation of Kwon et al. 2023 (arXiv 2309.06180) section 2, whose "Orca (Max)" this is.
"""

from __future__ import annotations

from bisect import bisect_left

from phasewise.instrumented_engine.blocks import Need
from phasewise.instrumented_engine.sequence import Sequence


class ContiguousPool:
    """First fit over one range of blocks. Nothing is shared or cached. max_tokens: reserved for every sequence."""

    def __init__(self, blocks: int, block_tokens: int, max_tokens: int, *, shares: int = 1) -> None:
        self.total_blocks = blocks
        self.block_tokens = block_tokens
        self.used_blocks = 0
        self.share_used = [0] * shares
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evicted_blocks = 0
        self._reserved = -(-max_tokens // block_tokens)
        self._holes: list[tuple[int, int]] = [(0, blocks)]  # start and length, in order, no two touching

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks

    @property
    def cached_blocks(self) -> int:
        return 0

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Free ranges, start and length."""
        return tuple(self._holes)

    def blocks_for(self, tokens: int) -> int:
        """The same for every sequence: the reservation."""
        return self._reserved

    def need(self, sequence: Sequence, share: int = 0) -> Need:
        return Need([], self._reserved, self._reserved, self._reserved)

    def can_allocate(self, need: Need, spare: int = 0) -> bool:
        """Whether one hole is long enough. spare is of no use here: nothing grows after admission."""
        return any(length >= need.fresh for _, length in self._holes)

    def allocate(self, sequence: Sequence, need: Need, share: int = 0) -> None:
        at = next(index for index, (_, length) in enumerate(self._holes) if length >= need.fresh)
        start, length = self._holes[at]
        if length == need.fresh:
            del self._holes[at]
        else:
            self._holes[at] = (start + need.fresh, length - need.fresh)
        sequence.blocks = list(range(start, start + need.fresh))
        sequence.computed_tokens = 0
        sequence.cached_tokens = 0  # this layout finds nothing again
        self.used_blocks += need.fresh
        self.share_used[share] += need.fresh

    def can_extend(self) -> bool:
        """Never: a sequence has all it may ever use."""
        return False

    def extend(self, sequence: Sequence, share: int = 0) -> None:
        raise AssertionError("a contiguous range does not grow")

    def publish(self, sequence: Sequence, before: int, after: int) -> None:
        """Nothing is found again in this layout."""

    def publish_output(self, sequence: Sequence) -> None:
        """As publish."""

    def release(self, sequence: Sequence, share: int = 0) -> None:
        if not sequence.blocks:
            return
        start, length = sequence.blocks[0], len(sequence.blocks)
        self.used_blocks -= length
        self.share_used[share] -= length
        at = bisect_left(self._holes, (start, 0))
        if at < len(self._holes) and self._holes[at][0] == start + length:
            length += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == start:
            start, before = self._holes.pop(at - 1)
            length += before
            at -= 1
        self._holes.insert(at, (start, length))
        sequence.blocks = []

    def exclusive_blocks(self, sequence: Sequence) -> int:
        return len(sequence.blocks)
