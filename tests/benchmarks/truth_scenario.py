"""One scenario of the scoreboard: drawn, run, labelled, and put to the analyzer through both views."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
from benchmarks.truth_figures import ABSTAINED, CLEAR_MARGIN, OBJECTIVES, Answer, Judged, Label, Requests
from benchmarks.truth_views import View, from_spans, with_steps

from phasewise.instrumented_engine import vllm_view
from phasewise.instrumented_engine.truth.families import draw
from phasewise.instrumented_engine.truth.truth import Truth, truth_of
from phasewise.rules.load import Rulebook, load_rulebook


@dataclass(frozen=True, slots=True)
class Task:
    family: str
    seed: int
    requests: int


@cache
def rulebook() -> Rulebook:
    return load_rulebook()


def judge(task: Task) -> Judged:
    """Everything of one scenario; a process of its own may do it."""
    clock = _Clock()
    with clock.of("draw"):
        scenario = draw(task.family, task.seed, task.requests)
    with clock.of("truth"):
        truth = truth_of(scenario, task.requests)
    recording = truth.run.recording
    with tempfile.TemporaryDirectory(prefix="phasewise-truth-") as name:
        folder = Path(name)
        with clock.of("steps"):
            steps = with_steps(recording, scenario.setup, folder, rulebook())
        with clock.of("spans"):
            spans = from_spans(recording, scenario.setup, folder, rulebook(), seed=task.seed)
    compared = against_truth(steps.rows, truth)
    unexplained = (steps.rows["cause_unexplained_s"] / steps.rows["e2e_s"]).fill_nan(0.0)
    return Judged(
        family=task.family,
        seed=task.seed,
        facts={
            **scenario.notes,
            "steps": len(recording.steps),
            "preemptions": sum(one.preemptions for one in recording.finished),
            "refused": len(recording.refused),
            "samples": spans.samples,
        },
        requests=len(steps.rows),
        truth=labels(truth),
        verdicts={"steps": answers(steps), "spans": answers(spans)},
        dominant_class=int((compared["primary_class"] == compared["class"]).sum()),
        dominant_cause=int((compared["cause"] == compared["true_cause"]).sum()),
        dominant_of=len(compared),
        unexplained_ratio_p50=_quantile(unexplained, 0.5),
        unexplained_ratio_p95=_quantile(unexplained, 0.95),
        clear={
            "steps": clear_requests(compared),
            "spans": clear_requests(against_truth(spans.rows, truth, vllm_view.request_id)),
        },
        seconds=clock.seconds,
    )


def labels(truth: Truth) -> dict[str, Label]:
    """The right answer of each objective that has one."""
    found = {}
    for objective in OBJECTIVES:
        label = truth.windows[objective]
        if label.cls is not None:
            found[objective] = Label(
                label.cls, label.cause, margin_ratio=round(label.margin_ratio, 4), is_dominant=label.dominant,
                contention_ratio=round(label.contention_ratio, 4),
            )  # fmt: skip
    return found


def answers(view: View) -> dict[str, Answer]:
    """What the analyzer says of each objective; no verdict is an abstention."""
    return {objective: _answer(view.verdicts.get(objective)) for objective in OBJECTIVES}


def _answer(verdict: Mapping[str, Any] | None) -> Answer:
    if verdict is None:
        return Answer(ABSTAINED, None)
    return Answer(
        str(verdict["primary"]),
        verdict["cause"],
        status=str(verdict["status"]),
        confidence=str(verdict["confidence"]["level"]),
    )


def against_truth(rows: pl.DataFrame, truth: Truth, named: Callable[[str], str] = str) -> pl.DataFrame:
    """Requests whose truth is a class: their own attribution (primary_class, cause) beside it (class, true_cause). named: how the sender
    of `rows` calls a request."""
    rows_of = truth.rows()
    true = rows_of.select(
        pl.Series("request_id", [named(one) for one in rows_of["request_id"]], dtype=pl.String),
        "class",
        pl.col("cause").alias("true_cause"),
        pl.col("margin_ratio").alias("margin"),
    )
    known = true.filter(pl.col("class").is_not_null())
    return known.join(rows.select("request_id", "primary_class", "cause"), on="request_id", how="inner")


def clear_requests(compared: pl.DataFrame) -> Requests:
    """Counts of what `against_truth` tells, of those with a clear truth."""
    clear = compared.filter(pl.col("margin") > CLEAR_MARGIN)
    return Requests(
        of=len(clear),
        right_class=int((clear["primary_class"] == clear["class"]).sum()),
        right_cause=int((clear["cause"] == clear["true_cause"]).sum()),
        abstained=int((clear["primary_class"].fill_null(ABSTAINED) == ABSTAINED).sum()),
    )


def _quantile(values: pl.Series, at: float) -> float:
    found = values.quantile(at, "linear")
    return round(float(found), 6) if found is not None else 0.0


class _Clock:
    """Seconds by part of the work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = round(time.perf_counter() - started, 3)
