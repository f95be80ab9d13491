"""From effects to class, cause and margin, on numbers one can add up."""

from __future__ import annotations

import numpy as np
import pytest
from truth_laws import MS, START_NS, PartsLaw, spec

from phasewise.instrumented_engine.recording import Floats, Recording
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.truth.labels import (
    WindowLabel,
    metric_seconds,
    request_labels,
    slow_set,
    window_label,
)
from phasewise.instrumented_engine.truth.run import Run, recorded


def requests(count: int, ttft_s: float = 1.0, decode_s: float = 9.0, tokens: int = 10) -> Run:
    """Equal requests that only have times."""
    recording = Recording(kv_blocks_total=1)
    specs = tuple(spec(number, 0, 10, tokens) for number in range(count))
    for number in range(count):
        one = Sequence(specs[number], number)
        one.queued_ns = one.scheduled_ns = START_NS
        one.first_token_ns = START_NS + round(ttft_s * 1000) * MS
        one.last_token_ns = one.finished_ns = one.first_token_ns + round(decode_s * 1000) * MS
        one.output_tokens = tokens
        recording.finished.append(one)
    return recorded(specs, recording, PartsLaw())


def effects(count: int, **seconds: tuple[float, float]) -> dict[str, Floats]:
    """cause with `_` for the dot = (until the first token, between tokens), equal for all requests."""
    return {
        cause.replace("_", ".", 1): np.array([[first] * count, [tokens] * count, [0.0] * count])
        for cause, (first, tokens) in seconds.items()
    }


def label(metric: str, **seconds: tuple[float, float]) -> WindowLabel:
    return label_after(0.0, metric, **seconds)


def label_after(waited_s: float, metric: str, **seconds: tuple[float, float]) -> WindowLabel:
    waited = np.array([[waited_s] * 20, [0.0] * 20, [0.0] * 20])
    return window_label(requests(20), effects(20, **seconds), waited, metric)


def test_an_objective_is_answered_by_the_part_of_the_request_it_is_about() -> None:
    both = {"prefill_compute": (0.8, 0.0), "decode_weights": (0.1, 5.0)}
    assert label("ttft", **both).cause == "prefill.compute"
    assert label("tpot", **both).cause == "decode.weights"
    assert label("itl", **both).cause == "decode.weights"
    assert label("e2e", **both).cause == "decode.weights"


def test_contention_decides_from_a_quarter_of_the_time_on() -> None:
    below = label("e2e", decode_weights=(0.0, 6.0), interference=(0.0, 1.5))
    assert (below.cls, below.contended, below.dominant) == ("bandwidth", False, True)
    above = label("e2e", decode_weights=(0.0, 5.0), interference=(0.0, 4.0))
    assert (above.cls, above.cause, above.contended, above.dominant) == ("compute", "interference", True, True)
    near = label("e2e", decode_weights=(0.0, 6.0), interference=(0.0, 2.6))
    assert (near.cls, near.contended, near.dominant) == ("compute", True, False)  # a little less and it were bandwidth


def test_a_small_lead_or_a_small_share_is_ambiguous() -> None:
    close = label("tpot", decode_weights=(0, 3.0), host=(0, 2.7))
    assert close.cls == "bandwidth"
    assert close.margin_ratio == pytest.approx(0.1)
    assert not close.dominant
    clear = label("tpot", decode_weights=(0, 3.0), host=(0, 1.5))
    assert clear.dominant
    assert not label("tpot", decode_weights=(0, 0.5), host=(0, 0.1)).dominant  # of 9 s


def test_a_class_gains_what_its_causes_gain_together_but_then_is_ambiguous() -> None:
    split = label("tpot", decode_weights=(0, 2.0), decode_kv=(0, 1.9), host=(0, 2.5))
    assert (split.cls, split.cause) == ("bandwidth", "decode.weights")
    assert not split.dominant  # the largest single effect is the host's


def test_limits_of_the_queue_cannot_save_more_than_was_waited() -> None:
    twice = label_after(0.4, "ttft", queue_slots=(0.4, 0), queue_budget=(0.4, 0), prefill_compute=(0.5, 0))
    assert twice.by_class["queueing"] == pytest.approx(20 * 0.4 / 10 * 1.5)  # of 3 slow requests
    assert twice.contention_ratio == pytest.approx(0.4)


def test_time_in_tools_is_in_the_end_to_end_time_but_not_in_the_time_between_tokens() -> None:
    found = {"external": (0.0, 6.0), "decode_weights": (0.0, 2.0)}
    assert label("e2e", **found).cls == "external"
    assert label("tpot", **found).cls == "bandwidth"


def test_nothing_to_save_has_no_class() -> None:
    nothing = label("e2e")
    assert (nothing.cls, nothing.cause, nothing.dominant) == (None, None, False)


def test_a_request_is_labelled_over_its_whole_time() -> None:
    found = {
        "queue.slots": np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        "decode.kv": np.array([[0.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.0, 0.0, 0.0]]),
    }
    waited = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    classes, causes, margin = request_labels(found, waited)
    assert classes == ["queueing", "bandwidth", None]
    assert causes == ["queue.slots", "decode.kv", None]
    assert margin.tolist() == pytest.approx([0.5, 1.0, 0.0])


def test_the_slow_set_is_the_slowest_tenth_and_at_least_three() -> None:
    figure = np.arange(100, dtype=np.float64)
    assert slow_set(figure).tolist() == list(range(90, 100))
    assert len(slow_set(figure[:8])) == 3
    assert slow_set(np.array([1.0, np.nan])).tolist() == [0]


def test_one_token_has_no_time_between_tokens() -> None:
    figure, seconds = metric_seconds(requests(3, tokens=1), "tpot")
    assert np.isnan(figure).all() and not seconds.any()
    with pytest.raises(ValueError, match="ttft"):
        metric_seconds(requests(1), "p99")
