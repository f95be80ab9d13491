"""What requests may hold together, and that only what has come keeps others out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.collector.limits import INTAKE_LIMITS
from phasewise.collector.room import Holding, Room

# In units that are easy to count: 96 for all, 72 for those that are late, 64 for one, and up to 1 is small.
LIMITS = replace(INTAKE_LIMITS, queue_bytes=96, late_bytes=72, request_bytes=64, small_bytes=1)


@pytest.fixture
def room() -> Room:
    return Room(LIMITS)


def held(room: Room, count_bytes: int) -> Holding:
    holding = Holding(room)
    assert holding.more(count_bytes)
    return holding


def announced(room: Room, whole_bytes: int) -> Holding:
    holding = Holding(room)
    assert holding.expect(whole_bytes)
    return holding


def test_the_limits_leave_room_for_others() -> None:
    """What the module promises: the largest request beside all that is kept, and others beside all that is late."""
    assert INTAKE_LIMITS.request_bytes <= INTAKE_LIMITS.late_bytes < INTAKE_LIMITS.queue_bytes
    assert INTAKE_LIMITS.queue_bytes - INTAKE_LIMITS.late_bytes >= 16 * INTAKE_LIMITS.small_bytes


def test_what_is_held_is_given_back(room: Room) -> None:
    first = held(room, 60)
    assert not Holding(room).more(37)
    second = held(room, 36)
    assert not second.more(1)
    first.release()
    first.release()
    assert second.more(60)
    assert not second.more(1)


def test_announcements_alone_keep_nobody_out(room: Room) -> None:
    for whole in (1, 10, 20, 64) * 100:
        announced(room, whole)
    assert Holding(room).expect(64)
    largest = held(room, 64)
    assert not largest.more(33), "real bytes do"


def test_room_is_kept_for_what_is_announced(room: Room) -> None:
    first = announced(room, 32)
    other = held(room, 64)
    assert not other.more(1)
    assert first.more(20)
    assert first.more(12), "it was sure of its room"
    assert not Holding(room).expect(1)


def test_more_is_kept_the_more_announcements_came_true(room: Room) -> None:
    for _ in range(2):
        true = announced(room, 32)
        assert true.more(32)
        true.come_whole()
        true.release()
    kept = announced(room, 64)
    assert not Holding(room).expect(33), "refused before any of it has come"
    assert Holding(room).expect(1), "the small are not kept out by words"
    small = held(room, 1)
    assert not small.more(32)
    assert kept.turn_late()
    assert small.more(64), "and not for long"
    small.release()
    for _ in range(10):
        announced(room, 64)
    assert Holding(room).expect(64), "from then on words count for less"


def test_those_that_come_slowly_share_a_part(room: Room) -> None:
    slow = held(room, 64)
    assert slow.turn_late()
    slower = held(room, 20)
    assert not slower.turn_late(), "over 72 together"
    slower.release()
    other = held(room, 8)
    assert other.turn_late()
    assert not other.more(1)
    quick = held(room, 24)
    quick.release()
    slow.come_whole()
    assert other.more(1), "what has come whole is late no more"
    assert not Holding(room).more(24), "but still held"
    slow.release()
    other.release()
    assert held(room, 96).held_bytes == 96


def test_beside_late_ones_no_room_is_kept(room: Room) -> None:
    assert held(room, 64).turn_late()
    announced(room, 30)
    assert Holding(room).more(32)


def test_it_becomes_less_as_well_as_more(room: Room) -> None:
    line = Holding(room)
    assert line.turn_late()
    for so_much, fits in ((40, True), (73, False), (72, True), (10, True), (0, True)):
        assert line.become(so_much) == fits
    assert held(room, 96)
