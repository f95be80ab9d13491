"""Rows become final: blocks that have ended, and those of final rows that something late concerns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from phasewise.collector.answers import Answers
from phasewise.collector.attribution import Question
from phasewise.collector.block_rows import load_blocks, read_blocks
from phasewise.collector.blocks import LATE_AFTER_NS, LATE_BEFORE_NS, Block, concerns
from phasewise.collector.registry import Registry
from phasewise.collector.transaction import Transaction
from phasewise.collector.work import NONE, PORTION_ROWS, Turn, Work, is_some


class Finisher:
    """work: of each instance."""

    def __init__(self, registry: Registry, answers: Answers, work: Mapping[str, Work]) -> None:
        self._registry = registry
        self._answers = answers
        self._work = work

    def finish(
        self, transaction: Transaction, turns: Mapping[str, Turn], now_ns: int, until_s: float | None
    ) -> tuple[int, Mapping[str, Sequence[Block]]]:
        """Blocks that have ended and have rows that are not final, and blocks of final rows that something late concerns or whose
        attribution failed, those of an instance in order of time; the number of rows written, and the blocks by instance."""
        looked = [name for name, turn in turns.items() if turn.ripe or (turn.soon and is_some(self._work[name].late))]
        if not looked:
            return 0, {}
        spans = {name: self._span_to_look_at(name, turns[name], now_ns, at_once=until_s is None) for name in looked}
        found = read_blocks(transaction, self._registry, spans)
        due = [
            (name, block)
            for name in looked
            for block in found[name]
            if self._is_due(block, self._work[name], turns[name].until_unix_ns)
        ]
        due.sort(key=lambda one: one[1].start_unix_ns)
        written = 0
        done: dict[str, list[Block]] = {name: [] for name in looked}
        for portion in _portions_of_blocks(due):
            if any(done.values()) and until_s is not None and time.monotonic() > until_s:
                break
            written += self._finish_blocks(transaction, portion, now_ns)
            for name, block in portion:
                done[name].append(block)
        for name in looked:
            work = self._work[name]
            left = [block for of, block in due if of == name][len(done[name]) :]
            if not left:
                work.finished_ns, work.looked_unix_ns = now_ns, turns[name].until_unix_ns
                work.late, work.late_done_unix_ns = NONE, 0
                work.failed.forget_waiting()
            else:  # they come next: what was done is not done again, and what is late concerns them as before
                work.looked_unix_ns = 0
                if done[name]:
                    work.late_done_unix_ns = left[0].start_unix_ns
        self._look_for_provisional(transaction, looked)
        return written, done

    def _span_to_look_at(self, name: str, turn: Turn, now_ns: int, *, at_once: bool) -> tuple[int, int]:
        work = self._work[name]
        work.failed.look(now_ns, at_once=at_once)
        failed_start, failed_end = work.failed.extent
        low = min(work.oldest_provisional_unix_ns, work.late[0] - LATE_BEFORE_NS, failed_start)
        return low, max(turn.until_unix_ns, work.late[1] + LATE_AFTER_NS, failed_end - 1)

    @staticmethod
    def _is_due(block: Block, work: Work, until_unix_ns: int) -> bool:
        if work.failed.rests(block):
            return False
        if block.open_rows:  # and what is late for some of its rows is so for all of them
            return block.end_unix_ns <= until_unix_ns
        is_late = block.start_unix_ns >= work.late_done_unix_ns and concerns(block, *work.late)
        return is_late or work.failed.is_due(block)

    def _finish_blocks(self, transaction: Transaction, blocks: Sequence[tuple[str, Block]], now_ns: int) -> int:
        for name, block in blocks:
            self._work[name].failed.begin(block)
        scopes, targets = load_blocks(transaction, self._registry, blocks)
        # Of some there are none: their rows are those of peers.
        keys = {int(n): own["request_key"] for (n,), own in targets.group_by("n")}
        asked = sorted(keys)
        questions = [Question(blocks[n][0], scopes[n], keys[n]) for n in asked]
        if not questions:
            return 0
        placed = targets.with_columns(
            pl.col("n").replace_strict({n: place for place, n in enumerate(asked)}, return_dtype=pl.Int64)
        )
        written, failed = self._answers.write(transaction, questions, placed, now_ns, final=True)
        newest = dict(targets.group_by("n").agg(pl.col("finished_unix_ns").max()).iter_rows())
        for place, n in enumerate(asked):
            name, block = blocks[n]
            work = self._work[name]
            if place in failed:
                work.failed.add(block)
            else:
                work.final_until_unix_ns = max(work.final_until_unix_ns, newest[n])
        return written

    def _look_for_provisional(self, transaction: Transaction, names: Sequence[str]) -> None:
        """Since when these instances have rows that are not final."""
        since = {name: self._work[name].oldest_provisional_unix_ns for name in names}
        found = transaction.query(
            "SELECT w.of, min(r.finished_unix_ns) AS oldest FROM requests r JOIN wanted w ON coalesce(r.instance, '') = w.of "
            "AND r.finished_unix_ns >= w.low WHERE NOT r.final AND r.finished_unix_ns >= ? GROUP BY 1",
            [min(since.values())],
            wanted=pl.DataFrame(list(since.items()), schema={"of": pl.String, "low": pl.Int64}, orient="row"),
        )
        oldest = dict(found.iter_rows())
        for name in names:
            self._work[name].oldest_provisional_unix_ns = oldest.get(name, 2**62)


def _portions_of_blocks(due: Sequence[tuple[str, Block]]) -> Iterator[Sequence[tuple[str, Block]]]:
    """As many blocks at once as have about PORTION_ROWS, a larger one alone."""
    portion, rows = list[tuple[str, Block]](), 0
    for name, block in due:
        if portion and rows + block.rows > PORTION_ROWS:
            yield portion
            portion, rows = [], 0
        portion.append((name, block))
        rows += block.rows
    if portion:
        yield portion
