"""Look-ups over runs of steps against the plain definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.analyzer.step_table import range_max

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70)


@settings(deadline=None)
@given(values, st.data())
def test_the_highest_of_a_run_is_that_of_its_values(found: list[float], data: st.DataObject) -> None:
    runs = data.draw(st.lists(st.tuples(st.integers(0, len(found) - 1), st.integers(1, len(found))), max_size=20))
    low = np.array([first for first, _ in runs], dtype=np.int64)
    high = np.minimum(low + np.array([length for _, length in runs], dtype=np.int64), len(found))
    assert range_max(np.array(found), low, high).tolist() == [
        max(found[a:b]) for a, b in zip(low.tolist(), high.tolist(), strict=True)
    ]
