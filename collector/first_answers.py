"""The first attribution of rows, before they are written: then they are written once.

A convenience like the rows it looks at: beyond its time, and where it fails, rows are written without and get it later.
"""

from __future__ import annotations

import time

import polars as pl

from phasewise.collector.answers import Answers
from phasewise.collector.attribution import Answer, Question, attributed_first
from phasewise.collector.newest_rows import NewestRows
from phasewise.collector.registry import Registry
from phasewise.collector.scope import CONTEXT_SCHEMA, OF, near_new, portions, stepped
from phasewise.collector.transaction import Transaction
from phasewise.collector.work import REST_RATIO

FIRST_S = 0.5  # no further instances are begun in a pass after that: rows wait to be stored
CHEAP_S = 200e-6  # a row's first attribution may take so long; what it takes beyond is rested for
PORTION_ROWS = 8_192  # attributed at once: what is asked of Polars costs as much for few as for many


class FirstAnswers:
    """is_proven: whether attribution may be asked at all."""

    def __init__(self, registry: Registry, answers: Answers) -> None:
        self._registry = registry
        self._answers = answers
        self._newest = NewestRows()
        self._rest_until_ns = 0
        # A statement of attribution that breaks the transaction would take new rows with it, again and again: after every start, and
        # so after every such fault, they are written raw until a pass of their attribution alone has succeeded.
        self.is_proven = False

    def told(self, transaction: Transaction, rows: pl.DataFrame, now_ns: int) -> pl.DataFrame:
        """New rows with their first attribution, as many instances as there is time for; the others as they are."""
        started = time.monotonic()
        may = self.is_proven and now_ns >= self._rest_until_ns
        new = rows.filter(pl.col("revision").is_null()).select(OF, *CONTEXT_SCHEMA)
        stepping = stepped(transaction, new) if may and not new.is_empty() else frozenset()
        answers: list[Answer] = []
        told = 0
        for own in portions(new, PORTION_ROWS) if may else ():
            if time.monotonic() - started > FIRST_S:
                break
            scopes = near_new(transaction, self._registry, own, self._newest.rows, stepping)
            keys = own.select("of", "request_key").partition_by("of", as_dict=True)
            questions = [Question(name, scope, keys[name,]["request_key"]) for name, scope in scopes.items()]
            answers += self._answers.ask(questions)[0]
            told += own.height
        if not new.is_empty():
            self._newest.add(new)
        rows = attributed_first(rows, answers)
        spent_s = time.monotonic() - started
        if told and spent_s > CHEAP_S * told + FIRST_S / 10:
            self._rest_until_ns = now_ns + int(REST_RATIO * spent_s * 1e9)
        return rows
