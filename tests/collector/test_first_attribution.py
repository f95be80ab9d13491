"""New rows with what attribution says of them before they are written: each once, whatever is said twice or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from phasewise.collector.attribution import Answer, attributed_first, typed
from phasewise.collector.requests import FULL_SCHEMA

NO_MODELS = pl.DataFrame(schema={"request_key": pl.String, "sole": pl.String})


def rows() -> pl.DataFrame:
    return typed(pl.DataFrame({"request_key": ["c", "a", "b"], "e2e_s": [3.0, 1.0, 2.0]}))


def answer(keys: Sequence[str], classes: Sequence[str]) -> Answer:
    return Answer(pl.DataFrame({"request_key": list(keys), "primary_class": list(classes)}), NO_MODELS)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([], [("c", None, None), ("a", None, None), ("b", None, None)]),
        ([answer("abc", "xyz")], [("c", "z", 0), ("a", "x", 0), ("b", "y", 0)]),
        ([answer("a", "x"), answer("cb", "zy")], [("c", "z", 0), ("a", "x", 0), ("b", "y", 0)]),
        ([answer("abcd", "xyzw")], [("c", "z", 0), ("a", "x", 0), ("b", "y", 0)]),
        ([answer("ab", "xy")], [("a", "x", 0), ("b", "y", 0), ("c", None, None)]),
        ([answer("abcc", "xyzz")], [("c", "z", 0), ("a", "x", 0), ("b", "y", 0)]),
        ([answer("d", "w")], [("c", None, None), ("a", None, None), ("b", None, None)]),
    ],
    ids=["nobody said", "all", "in two parts", "one more", "one less", "one twice", "only another"],
)
def test_each_row_gets_its_own_answer(
    answers: Sequence[Answer], told: list[tuple[str, str | None, int | None]]
) -> None:
    found = attributed_first(rows(), answers)
    assert found.schema == pl.Schema(FULL_SCHEMA)
    assert found.select("request_key", "primary_class", "revision").rows() == told
    assert dict(found.select("request_key", "e2e_s").iter_rows()) == {"a": 1.0, "b": 2.0, "c": 3.0}
