"""The scoreboard's machinery: drawn, run, labelled, judged through both views, counted. Its figures are not asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import truth as scoreboard
from benchmarks.truth_figures import Answer, Judged, Label, Requests, confusion, report, summary, sure_and_wrong
from benchmarks.truth_scenario import Task, against_truth, clear_requests, judge, labels
from benchmarks.truth_views import from_spans, limit_of, with_steps
from polars import DataFrame, Series

from phasewise.instrumented_engine import vllm_view
from phasewise.instrumented_engine.truth.families import FAMILIES, draw
from phasewise.instrumented_engine.truth.truth import truth_of
from phasewise.rules.load import load_rulebook
from phasewise.rules.vocabulary import CLASS_OF_CAUSE, CLASSES


def made(truth: str, steps: str, spans: str, *, is_dominant: bool = True) -> Judged:
    labels_ = {"ttft": Label(truth, None, is_dominant=is_dominant)}
    answered = {view: {"ttft": Answer(said, None)} for view, said in (("steps", steps), ("spans", spans))}
    return Judged(
        family="f", seed=1, facts={}, requests=10, truth=labels_, verdicts=answered, dominant_class=5, dominant_cause=4,
        dominant_of=8, unexplained_ratio_p50=0.0, unexplained_ratio_p95=0.01,
    )  # fmt: skip


def test_accuracy_counts_windows_and_an_abstention_is_not_right() -> None:
    judged = [
        made("kv", "kv", "kv"),
        made("kv", "kv", "inconclusive"),
        made("compute", "host", "host"),
        made("host", "host", "inconclusive", is_dominant=False),
    ]
    told = summary(judged, 9)
    assert list(told)[:6] == [
        "scenarios", "class_accuracy_steps", "class_accuracy_spans", "dominant_right", "abstained", "seed",
    ]  # fmt: skip
    assert list(told.values())[:6] == [4, 0.75, 0.25, 20 / 32, 0.5, 9]
    assert (told["class_accuracy_steps_dominant"], told["class_accuracy_spans_dominant"]) == (0.6667, 0.3333)
    assert any("kv" in line for line in report(judged))


def test_requests_with_a_clear_truth_are_counted_by_view() -> None:
    compared = DataFrame(
        {
            "class": ["kv", "kv", "host", "compute"],
            "true_cause": ["kv.wait", "kv.wait", "host", "prefill.compute"],
            "margin": [0.9, 0.21, 0.2, 0.5],
            "primary_class": ["kv", "inconclusive", "host", None],
            "cause": ["kv.preempt", None, "host", None],
        }
    )
    assert clear_requests(compared) == Requests(of=3, right_class=1, right_cause=0, abstained=2)
    one = replace(made("kv", "kv", "host"), clear={"steps": Requests(4, 3, 2, 0), "spans": Requests(4, 1, 1, 2)})
    told = summary([one, replace(one, clear={"steps": Requests(0), "spans": Requests(0)})], 1)
    assert (told["clear_requests"], told["clear_requests_right_steps"], told["clear_requests_right_spans"]) == (
        4,
        0.75,
        0.25,
    )


def test_a_wrong_answer_at_high_confidence_is_counted_where_the_truth_is_clear() -> None:
    sure = Answer("host", None, confidence="high")
    clear, close = Label("kv", None), Label("kv", None, is_dominant=False)
    assert sure_and_wrong([(clear, sure), (close, sure), (clear, Answer("inconclusive", None, confidence="high"))]) == 1
    assert sure_and_wrong([(clear, Answer("host", None, confidence="medium")), (Label("host", None), sure)]) == 0


def test_a_run_is_asked_for_its_end_to_end() -> None:
    one = replace(
        made("kv", "kv", "kv"),
        truth={"e2e": Label("kv", "kv.wait"), "ttft": Label("kv", "kv.wait")},
        verdicts={
            "steps": {"e2e": Answer("kv", "kv.preempt"), "ttft": Answer("host", None)},
            "spans": {"e2e": Answer("inconclusive", None), "ttft": Answer("kv", None)},
        },
    )
    told = summary([one], 1)
    assert (told["runs_right_class_steps"], told["runs_right_cause_steps"], told["runs_abstained_spans"]) == (1, 0, 1.0)


def test_a_matrix_has_the_truth_in_its_rows() -> None:
    lines = confusion([("kv", "host"), ("kv", "kv"), ("kv", "host")], CLASSES)
    assert [line.split() for line in lines] == [["kv", "host"], ["kv", "1", "2"]]


def test_the_limit_is_what_the_slowest_tenth_breaks() -> None:
    figures = Series([None, *(float(value) for value in range(1, 21))])
    limit = limit_of(figures)
    assert limit is not None and sorted(figures.filter(figures > limit)) == [19.0, 20.0]
    assert limit_of(Series([None, 0.0], dtype=figures.dtype)) is None


def test_families_are_drawn_in_turn_and_a_seed_gives_the_same_draw() -> None:
    wanted = scoreboard.tasks(5, 70, 1000)
    assert wanted == scoreboard.tasks(5, 70, 1000) != scoreboard.tasks(6, 70, 1000)
    assert [task.family for task in wanted].count("mixture") == 5
    assert {task.family for task in wanted} == set(FAMILIES) and len({task.seed for task in wanted}) == 70


@pytest.mark.slow
@pytest.mark.parametrize("family", ["prompt_interference", "kv_pool", "tool_calls"])
def test_a_scenario_passes_both_views(family: str, tmp_path: Path) -> None:
    rules = load_rulebook()
    scenario = draw(family, 3, 60)
    truth = truth_of(scenario, 60)
    recording = truth.run.recording
    steps = with_steps(recording, scenario.setup, tmp_path, rules)
    spans = from_spans(recording, scenario.setup, tmp_path, rules)
    served = len(truth.run.served)
    assert 0 < served == len(spans.rows) <= len(steps.rows) == len(recording.finished)
    assert steps.steps == len(recording.steps) > 0 == spans.steps
    assert spans.samples >= 2 and steps.samples == 0
    assert spans.rows["model"].null_count() == 0
    known = truth.rows().filter(truth.rows()["class"].is_not_null())
    assert len(against_truth(steps.rows, truth)) == len(known)
    assert len(against_truth(spans.rows, truth, vllm_view.request_id)) == len(known)
    assert set(labels(truth)) == {name for name in ("ttft", "itl", "e2e") if truth.windows[name].cls}
    true_figures = truth.rows().sort("request_id")
    for column in ("ttft_s", "e2e_s"):
        joined = true_figures.join(steps.rows.select("request_id", other=column), on="request_id")
        assert (joined[column] - joined["other"]).abs().max() < 1e-6  # type: ignore[operator]
    for view in (steps, spans):
        for objective, verdict in view.verdicts.items():
            assert verdict["objective"]["metric"] == objective
            assert verdict["primary"] in CLASSES and verdict["status"] in ("slow", "healthy", "unknown")
            assert verdict["cause"] is None or CLASS_OF_CAUSE[verdict["cause"]] == verdict["primary"]
            assert verdict["confidence"]["level"] in ("high", "medium", "low", "insufficient")
            json.dumps(verdict)
        told = sum(view.rows[name].sum() for name in view.rows.columns if name.startswith("cause_"))
        assert told == pytest.approx(view.rows["e2e_s"].sum(), rel=1e-6)


@pytest.mark.slow
def test_the_command_prints_its_figures_as_the_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    details = tmp_path / "details.jsonl"
    wanted = [
        "--json",
        "--seed",
        "4",
        "--scenarios",
        "2",
        "--requests",
        "30",
        "--workers",
        "1",
        "--details",
        str(details),
    ]
    assert scoreboard.main(wanted) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out.splitlines()[-1])
    assert told["scenarios"] == 2 and told["seed"] == 4 and 0 <= told["abstained"] <= 1
    assert len(printed.err.splitlines()) == 2
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert [line["family"] for line in lines] == list(FAMILIES)[:2]


@pytest.mark.slow
def test_the_same_task_is_judged_the_same_twice() -> None:
    first, second = (judge(Task("full_seats", 11, 40)) for _ in range(2))
    assert first.truth == second.truth and first.verdicts == second.verdicts
    assert first.dominant_class == second.dominant_class
