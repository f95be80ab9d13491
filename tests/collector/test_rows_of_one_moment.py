"""Requests that all say they arrived in the same nanosecond: what is read of them to store more does not grow with their number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from writing import bench, engine_span

from phasewise.collector.transaction import Transaction

STORED = 300


def test_only_rows_of_the_same_key_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[int] = []
    asked = Transaction.query

    def counted(transaction: Transaction, sql: str, parameters: Sequence[object] = (), **tables: Any) -> pl.DataFrame:
        found = asked(transaction, sql, parameters, **tables)
        if "candidates" in tables and sql.startswith("SELECT r.*"):
            whole.append(found.height)
        return found

    with bench(tmp_path) as b:
        b.receive([engine_span(trace=f"{i:032x}", span_id=f"{i:016x}") for i in range(1, STORED + 1)])
        b.run(1.5)
        assert len({row["arrival_unix_ns"] for row in b.rows()}) == 1
        monkeypatch.setattr(Transaction, "query", counted)
        b.receive([engine_span(trace=f"{STORED + 1:032x}", span_id=f"{STORED + 1:016x}")])
        b.receive([{"name": "child", "trace": f"{7:032x}", "span_id": "f" * 16, "parent": f"{7:016x}", "start_s": 0.1, "end_s": 0.2}])  # fmt: skip
        b.run(1.5)
        assert len(b.rows()) == STORED + 1
        assert whole and all(height <= 2 for height in whole), whole
