"""Readings of many targets are handed over together, within bounds."""

from __future__ import annotations

import threading

from span_tables import at
from waiting import until
from writing import rulebook

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.profiles import Profiles
from phasewise.collector.scraping.jobs import Endpoint, Job
from phasewise.collector.scraping.outbox import Outbox
from phasewise.collector.scraping.target import Target

PROFILES = Profiles(rulebook().engines)


def reading(number: int) -> tuple[Target, Exposition]:
    found = read_exposition("vllm:num_requests_running 3\n", at(0), PROFILES, instance=f"e-{number}")
    assert found is not None
    return Target(Job("j"), Endpoint(f"http://e-{number}/metrics", f"e-{number}")), found


def test_what_came_together_is_one_batch_and_nothing_is_left_at_the_end() -> None:
    batches: list[list[Exposition]] = []
    outbox, stopping = Outbox(batches.append, gather_s=0.05), threading.Event()
    for number in range(50):
        outbox.put(*reading(number))
    thread = threading.Thread(target=outbox.run, args=(stopping,))
    thread.start()
    until(lambda: len(batches) == 1)
    stopping.set()
    outbox.put(*reading(50))
    thread.join(10)
    assert sum(map(len, batches)) == 51
    assert len(batches[0]) == 50


def test_while_the_store_takes_nothing_the_oldest_is_lost_and_says_so() -> None:
    batches: list[list[Exposition]] = []
    outbox = Outbox(batches.append, most=2)
    targets = []
    for number in range(3):
        target, found = reading(number)
        targets.append(target)
        outbox.put(target, found)
    assert "too slow" in targets[0].not_stored
    outbox.flush()
    assert [one.samples["instance"].item() for one in batches[0]] == ["e-1", "e-2"]


def test_a_failure_is_noted_with_its_targets_until_it_works_again() -> None:
    full = True

    def store(_: list[Exposition]) -> None:
        if full:
            raise OSError(28, "No space left on device")

    outbox = Outbox(store)
    target, found = reading(0)
    outbox.put(target, found)
    outbox.flush()
    assert "No space" in target.not_stored
    full = False
    outbox.put(target, found)
    outbox.flush()
    assert target.not_stored == ""
