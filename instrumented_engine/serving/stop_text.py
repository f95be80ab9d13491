"""Stop strings in a text that arrives in pieces: nothing that might still become one is given out."""

from __future__ import annotations


class StopText:
    """The stop string itself is never given out. stopped: one was found, the text has ended."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be given out now."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            given, self._held = self._held[: min(found)], ""
            return given
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def finish(self) -> str:
        """What was held back, at the end of the stream."""
        given, self._held = self._held, ""
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
