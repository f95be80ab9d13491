"""Blocks of one instance whose attribution failed, until they are tried again: all of them once in a while, so that one that fails
whenever it is tried neither holds up the others nor takes their time."""

from __future__ import annotations

from phasewise.collector.blocks import Block

RETRY_NS = 20 * 10**9  # least time between two tries of a block
Span = tuple[int, int]  # [start, end) in Unix nanoseconds


class FailedBlocks:
    """Kept as spans of time: the same rows may be cut into blocks in another way later."""

    def __init__(self) -> None:
        self._waiting: list[Span] = []  # tried again when somebody looks
        self._tried: list[Span] = []  # failed since `_begun_ns`, and left alone until then
        self._begun_ns = 0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._tried)

    @property
    def extent(self) -> Span:
        """From the first to the last of their time; [2^62, -2^62) where there is none."""
        own = [*self._waiting, *self._tried]
        return min((low for low, _ in own), default=2**62), max((high for _, high in own), default=-(2**62))

    def look(self, now_ns: int, at_once: bool) -> None:
        """Somebody looks for blocks to attribute: those that failed have rested, or not yet; at_once: it cannot wait."""
        if at_once or now_ns - self._begun_ns >= RETRY_NS:
            self._waiting, self._tried = _joined([*self._waiting, *self._tried]), []
            self._begun_ns = now_ns

    def is_due(self, block: Block) -> bool:
        return any(low < block.end_unix_ns and block.start_unix_ns < high for low, high in self._waiting)

    def rests(self, block: Block) -> bool:
        return any(low < block.end_unix_ns and block.start_unix_ns < high for low, high in self._tried)

    def begin(self, block: Block) -> None:
        """It is tried now."""
        start, end = block.start_unix_ns, block.end_unix_ns
        parts = [part for low, high in self._waiting for part in ((low, min(high, start)), (max(low, end), high))]
        self._waiting = [(low, high) for low, high in parts if low < high]

    def add(self, block: Block) -> None:
        """It failed."""
        self._tried = _joined([*self._tried, (block.start_unix_ns, block.end_unix_ns)])

    def forget_waiting(self) -> None:
        """All that could be tried were: of the others no rows are left."""
        self._waiting = []


def _joined(spans: list[Span]) -> list[Span]:
    """Spans in order of time, those that meet made one."""
    joined: list[Span] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return joined
