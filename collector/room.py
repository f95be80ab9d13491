"""How much of memory requests may hold together: one budget of bytes for both fronts.

What a request holds is what has come of it: nobody keeps others out by words, or with a request that never ends.

- What is refused half read was read in vain, so room is kept for what is announced, for a moment. How much is kept grows with what has
  come of announcements, less what did not; at the least the largest request finds room beside all that is kept and all that is late. Of
  what is announced beyond, the bytes count as they come. The small are kept out by what others hold, never by what they announce.
- Requests that take long to come share a part of it: however many lie here half sent, others find room.
"""

from __future__ import annotations

from phasewise.collector.limits import IntakeLimits


class Room:
    """`queue_bytes` for all, and `late_bytes` of these for those that take long to come. For one thread."""

    def __init__(self, limits: IntakeLimits) -> None:
        self._limits = limits
        self._held_bytes = 0
        self._late_bytes = 0  # of these
        self._expected_bytes = 0  # not held: announced, and room is kept
        self._kept_word_bytes = 0  # what came of announcements, less what did not

    def fits(self, own_bytes: int, more_bytes: int) -> bool:
        all_bytes = self._held_bytes + more_bytes
        if own_bytes + more_bytes > self._limits.small_bytes:
            all_bytes += self._expected_bytes
        return all_bytes <= self._limits.queue_bytes

    def fits_late(self, more_bytes: int) -> bool:
        return self._late_bytes + more_bytes <= self._limits.late_bytes

    def may_keep(self, announced_bytes: int) -> bool:
        if announced_bytes <= self._limits.small_bytes:
            return False
        idle_bytes = self._expected_bytes + self._late_bytes + announced_bytes
        return idle_bytes <= self._limits.queue_bytes - self._limits.request_bytes + self._kept_word_bytes

    def hold(self, more_bytes: int, late: bool) -> None:
        self._held_bytes += more_bytes
        self._late_bytes += more_bytes if late else 0

    def set_late(self, held_bytes: int, late: bool) -> None:
        self._late_bytes += held_bytes if late else -held_bytes

    def expect(self, more_bytes: int) -> None:
        self._expected_bytes += more_bytes

    def expected(self, count_bytes: int, came: bool) -> None:
        """So much is expected no more, as it has come or did not."""
        self._expected_bytes -= count_bytes
        word_bytes = self._kept_word_bytes + (count_bytes if came else -count_bytes)
        self._kept_word_bytes = min(max(word_bytes, 0), self._limits.request_bytes)


class Holding:
    """What a request holds, or all that are being read from one connection. To be released, which may be done twice."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._expected_bytes = 0
        self._late = False
        self.held_bytes = 0

    def expect(self, whole_bytes: int) -> bool:
        """Whether there is room for what is announced. It is kept, where it may be, until that has come or is late."""
        if not self._room.fits(0, whole_bytes):
            return False
        if self._room.may_keep(whole_bytes):
            self._room.expect(whole_bytes)
            self._expected_bytes = whole_bytes
        return True

    def more(self, count_bytes: int) -> bool:
        """Whether so many more bytes, which have come, may be held."""
        self._expect_less(min(count_bytes, self._expected_bytes), came=True)
        if not self._room.fits(self.held_bytes, count_bytes) or (self._late and not self._room.fits_late(count_bytes)):
            return False
        self._hold(count_bytes)
        return True

    def become(self, held_bytes: int) -> bool:
        """Whether it may hold so much in all; less is always possible."""
        if held_bytes > self.held_bytes:
            return self.more(held_bytes - self.held_bytes)
        self._hold(held_bytes - self.held_bytes)
        return True

    def turn_late(self) -> bool:
        """It takes long to come. False: those that do hold so much already that it has to end."""
        self._expect_less(self._expected_bytes, came=False)
        if not self._late and not self._room.fits_late(self.held_bytes):
            return False
        self._set_late(True)
        return True

    def come_whole(self) -> None:
        """It is late no more, nor expected, and goes on to be held."""
        self._expect_less(self._expected_bytes, came=False)
        self._set_late(False)

    def release(self) -> None:
        self.come_whole()
        self._hold(-self.held_bytes)

    def _expect_less(self, count_bytes: int, came: bool) -> None:
        self._room.expected(count_bytes, came)
        self._expected_bytes -= count_bytes

    def _hold(self, more_bytes: int) -> None:
        self._room.hold(more_bytes, self._late)
        self.held_bytes += more_bytes

    def _set_late(self, late: bool) -> None:
        if late != self._late:
            self._room.set_late(self.held_bytes, late)
            self._late = late
