"""Asking attribution of stored rows, and writing what it says anew."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import polars as pl

from phasewise.collector.attribution import Answer, Question, ask, attributed, finished, left_out
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.registry import Registry
from phasewise.collector.request_table import finish_rows, update_rows
from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.transaction import Transaction

log = logging.getLogger(__name__)


class Answers:
    """See the module. last_error: of the last question, "" where it was answered."""

    def __init__(self, attribute: Attribute, registry: Registry, counters: Counters, dirty: DirtyRollups) -> None:
        self._attribute = attribute
        self._registry = registry
        self._counters = counters
        self._dirty = dirty
        self._counted: set[str] = set()  # keys of rows whose revision was counted when they were written
        self.last_error = ""

    def count(self, keys: Iterable[str]) -> None:
        """The revision of these rows counts already what attribution will say anew."""
        self._counted |= set(keys)

    def ask(self, questions: Sequence[Question]) -> tuple[list[Answer], frozenset[int]]:
        """Answers, and which questions got none: where something fails, each is asked alone."""
        try:
            return [ask(self._attribute, self._registry, questions)], frozenset()
        except Exception as error:
            if len(questions) == 1:
                self._failed(questions[0].instance, error)
                return [], frozenset([0])
        answers, failed = list[Answer](), list[int]()
        for n, one in enumerate(questions):
            own, _ = self.ask([one])
            answers += own
            failed += [] if own else [n]
        return answers, frozenset(failed)

    def write(
        self,
        transaction: Transaction,
        questions: Sequence[Question],
        targets: pl.DataFrame,
        now_ns: int,
        *,
        final: bool,
    ) -> tuple[int, frozenset[int]]:
        """Attribute stored rows and write what is said anew; the number of rows written, and which questions failed. targets: n (their
        question), row, request_key, finished_unix_ns; final, where they become final now."""
        answers, failed = self.ask(questions)
        if not answers:
            return 0, failed
        if not failed:
            self.last_error = ""
        answer = answers[0]
        if len(answers) > 1:
            told = pl.concat([one.told for one in answers], how="diagonal").sort("request_key")
            answer = Answer(told, pl.concat([one.models for one in answers]))
        targets = targets.filter(~pl.col("n").is_in(list(failed))) if failed else targets
        written = 0
        if final:
            self._say_what_is_left_out(answer, targets)
            plain = targets.filter(~pl.col("n").is_in(self._changed_before(answer, targets)))
            if not plain.is_empty():
                own = _part(answer, plain) if len(plain) < len(targets) else answer
                rows = finished(transaction, own, plain)
                finish_rows(transaction, rows)
                self._dirty.add(rows, now_ns)
                written += rows.height
                targets = targets.join(plain, on="row", how="anti") if len(plain) < len(targets) else targets.clear()
        if not targets.is_empty():
            for rows in attributed(transaction, answer, targets, final, self._counted):
                update_rows(transaction, rows)
                self._dirty.add(rows, now_ns)
                written += rows.height
            self._counted -= self._counted.intersection(targets["request_key"]) if self._counted else set()
        return written, failed

    def _changed_before(self, answer: Answer, targets: pl.DataFrame) -> list[int]:
        """Questions that concern rows which are final already, were counted before, or get their model from samples: what is said anew
        of these has to be compared. All others become final now, each changed by that once."""
        known = pl.col("final").fill_null(False)
        if self._counted:
            known |= pl.col("request_key").is_in(list(self._counted))
        if not answer.models.is_empty():
            known |= pl.col("request_key").is_in(answer.models["request_key"].implode())
        return targets.filter(known)["n"].unique().to_list()

    def _say_what_is_left_out(self, answer: Answer, targets: pl.DataFrame) -> None:
        lacking = left_out(answer, targets)
        if lacking:
            self._counters.add("attribution_left_out", lacking)
            log.warning("attribution left out %d rows; they are final without causes", lacking)

    def _failed(self, instance: str, error: Exception) -> None:
        """A fault of attribution loses no data."""
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        self._counters.add("attribution_failed", 1)
        log.exception(
            "attribution of %s failed; its rows are stored without causes", instance or "calls without engine"
        )


def _part(answer: Answer, targets: pl.DataFrame) -> Answer:
    told = answer.told.join(targets.select("request_key"), on="request_key", how="semi", maintain_order="left")
    return Answer(told, answer.models)
