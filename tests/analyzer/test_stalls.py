"""A stall is one request's own; a step that is long for all of its batch is none."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.analyzer.stalls import stalled_s

GAPS = np.full(60, 100.0)
ALL = np.ones(60, dtype=np.bool_)


def test_one_decode_beyond_twice_the_usual_step_stalled_for_the_rest() -> None:
    decode = np.ones(60)
    decode[7] = 4.0
    found = stalled_s(decode, GAPS, np.full(60, 3.0), None, ALL)
    assert found[7] == pytest.approx(3.0)
    assert not np.delete(found, 7).any()


def test_steps_that_are_long_for_all_are_no_stall() -> None:
    assert not stalled_s(np.full(60, 40.0), GAPS, np.full(60, 3.0), None, ALL).any()


def test_a_long_context_in_the_same_batch_is_no_stall() -> None:
    kernels = np.where(np.arange(60) < 10, 0.04, 0.01)
    found = stalled_s(100 * kernels * 1.1, GAPS, np.full(60, 3.0), kernels, ALL)
    assert not found.any()
    assert stalled_s(100 * kernels * 1.1, GAPS, np.full(60, 3.0), None, ALL).any()


def test_a_preempted_decode_is_not_judged() -> None:
    decode = np.ones(60)
    decode[7] = 4.0
    assert not stalled_s(decode, GAPS, np.full(60, 3.0), None, np.arange(60) != 7).any()
