"""The verdict object of a window: where a store, a clock and the rules meet pure analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import polars as pl

from phasewise.analyzer.confidence import confidence
from phasewise.analyzer.device_evidence import device_evidence
from phasewise.analyzer.draw import Drawn
from phasewise.analyzer.evidence import Evidence, gather
from phasewise.analyzer.explain import request_report
from phasewise.analyzer.findings import (
    Finding,
    decide,
    shape_matched,
    shares_of,
    weighed,
)
from phasewise.analyzer.frames import where
from phasewise.analyzer.inflight import InFlight, in_flight
from phasewise.analyzer.interference_evidence import with_culprits
from phasewise.analyzer.interference_ledger import window_ledger
from phasewise.analyzer.latencies import client_statistics, engine_statistics
from phasewise.analyzer.machine import machine, typical_model
from phasewise.analyzer.matching import Situation, match
from phasewise.analyzer.missing import missing_signals
from phasewise.analyzer.outside import held_back_s
from phasewise.analyzer.replicas import Reader
from phasewise.analyzer.rooflines import judge_phases, judgement_json
from phasewise.analyzer.scene import Scene, read_scene
from phasewise.analyzer.signals import merged_settings, window_signals
from phasewise.analyzer.slow_set import SlowSet, slow_set
from phasewise.analyzer.statistics import floats, rounded
from phasewise.analyzer.sums import seconds_by_cause
from phasewise.analyzer.whole import EXAMPLES
from phasewise.analyzer.window import Filter, Objective, Window
from phasewise.analyzer.wording import counted, drawn_sentence, headline, held_back_sentence, sampling_sentence
from phasewise.collector.context import Setting
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import CAUSES

NAMED_ROWS = 20_000  # requests of a window whose culprits are looked for: a verdict of many should not wait for it
SLOWER_RATIO = 1.5  # over a matched baseline: worth a word, whatever the status


def window_verdict(
    store: Reader,
    rulebook: Rulebook,
    window: Window,
    *,
    filters: Sequence[Filter] = (),
    slo: Sequence[Objective] = (),
    now_unix_ns: int,
) -> dict[str, object]:
    """The verdict of a window as the JSON object of architecture section 8."""
    scene = read_scene(store, window, filters, now_unix_ns, slo)
    verdict = scene_verdict(scene, rulebook, slo)
    if verdict["cause"] == "interference" and scene.sums.count <= NAMED_ROWS:
        verdict["evidence"] = with_culprits(verdict["evidence"], window_ledger(store, rulebook, window, filters))
    return verdict


def scene_verdict(scene: Scene, rulebook: Rulebook, slo: Sequence[Objective] = ()) -> dict[str, object]:
    """The same from a scene, read by the same objectives: pure."""
    flight = in_flight(scene)
    first = decide(_slow_set(scene, slo), scene.sums, flight)
    signals = window_signals(scene, first.affected, first.sums, rulebook)
    shares = _judged_shares(first, flight)
    stated = not first.live and first.sums.stepped > 0
    evidence = [*gather(signals, shares, flight, stated=stated), *device_evidence(scene.devices)]
    finding = weighed(first, evidence)
    signals["objective_metric"] = finding.objective.metric if finding.objective and finding.over_limit else None
    signals |= {"status": finding.status, "primary": finding.primary, "cause": finding.cause}
    settings = merged_settings(scene.replicas)
    engine = next((replica.engine for replica in scene.replicas if replica.engine), None)
    versions = scene.requests["engine_version"].drop_nulls()
    situation = Situation(
        primary=finding.primary,
        cause=finding.cause,
        shares=shares,
        signals=signals,
        engine=engine,
        engine_version=versions[0] if len(versions) else _told_version(settings),
        settings=settings,
    )
    matched = match(situation, rulebook)
    recommend = matched.recommend if finding.status != "unknown" else []
    weights = scene.sampling.row_weights(scene.requests)
    whole, known = scene.sums.seconds, scene.sums.measured_s
    if weights is not None:
        whole = seconds_by_cause(scene.requests, weights)
        known = float((np.nan_to_num(floats(scene.requests, "measured_s")) * weights).sum())
    total = sum(whole.values())
    verdict: dict[str, object] = {
        "status": finding.status,
        "objective": _objective_text(finding),
        "window": {"from_unix_ns": scene.window.from_unix_ns, "to_unix_ns": scene.window.to_unix_ns},
        "requests": scene.sums.count,
        "refused": scene.refused,
        "aborted": scene.aborted,
        "open": flight.open,
        "provisional": scene.sums.provisional,
        "unattributed": scene.sums.unattributed,
        "affected": _affected(scene, finding),
        "baseline": _baseline(scene, finding),
        "primary": finding.primary,
        "cause": finding.cause,
        "headline": headline(scene, finding, flight),
        "shares": _rounded_shares(shares_of(whole)),
        "affected_shares": _rounded_shares(shares),
        "explained_ratio": rounded(known / total) if total > 0 else None,
        "contention_ratio": rounded(finding.contention_ratio),
        "confidence": _confidence(scene, finding, evidence, flight),
        "evidence": _evidence_rows(evidence, finding, scene),
        "in_flight": _flight_json(flight, finding.live),
        "recommend": recommend,
        "will_not_help": matched.will_not_help if finding.status != "unknown" else [],
        "missing": missing_signals(scene, finding, signals),
        "verify": _verify(finding, recommend, rulebook),
        "stage": _stage(finding, recommend),
        "examples": _examples(scene, finding),
        "statistics": {"engine": engine_statistics(scene), "client": client_statistics(scene)},
        "phase_shares": _phase_shares(scene),
        "roofline": _roofline(scene, settings, rulebook),
        "signals": {name: rounded(v) if isinstance(v, float) else v for name, v in signals.items() if v is not None},
        "recorded": dict(scene.facts),
        "notes": _notes(scene, finding, flight),
        "provenance": {
            "rules": rulebook.version,
            "analyzer": analyzer_version(),
            "coverage": rounded(scene.sampling.known_ratio(finding.phase_ratio)),
            "sampling": scene.sampling.json(),
            "drawn": _drawn(scene),
            "aborted": {"estimated": scene.estimated_aborted, "source": "HTTP 2xx answers less finished requests"}
            if scene.estimated_aborted
            else None,
        },
    }
    return verdict


def _told_version(settings: Mapping[str, Setting]) -> str | None:
    """The engine's version as it or its platform tells it, where the spans do not."""
    told = settings.get("engine_version")
    return None if told is None else str(told.value)


def analyzer_version() -> str:
    """Version of the installed package; "unknown" in a tree that nobody installed."""
    try:
        return version("phasewise")
    except PackageNotFoundError:
        return "unknown"


def _slow_set(scene: Scene, slo: Sequence[Objective]) -> SlowSet:
    if scene.whole is not None:
        assert scene.whole.objectives == tuple(slo)
        return scene.whole.slow
    # A row that was stored before its attribution has its time booked to nothing yet: it cannot say what is slow.
    return slow_set(where(scene.requests, pl.col("revision").is_not_null()), slo, scene.sampling)


def _drawn(scene: Scene) -> dict[str, object] | None:
    """How many requests of the window, of the time before, and scrapes were read, where that is not all of them."""
    parts = {"baseline": scene.drawn_before, "scrapes": scene.drawn_scrapes}
    if scene.drawn is None and not any(parts.values()):
        return None
    own = scene.drawn or Drawn(scene.sums.count, scene.sums.count)
    others = {name: None if one is None else one.json() for name, one in parts.items()}
    return own.json() | {"by": "request_key"} | others


def _judged_shares(finding: Finding, flight: InFlight) -> dict[str, float]:
    """Shares of the seconds the verdict is about: of the affected requests, or, live, of the requests in flight."""
    if not finding.live or flight.total_s <= 0:
        return shares_of(finding.seconds)
    waiting = {cause: seconds / flight.total_s for cause, seconds in flight.waiting_s.items() if seconds > 0}
    rest = 1.0 - sum(waiting.values())
    waiting["unexplained"] = waiting.get("unexplained", 0.0) + max(rest, 0.0)
    return waiting


def _rounded_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Six digits after the point, the largest takes what rounding left, so that the sum is 1."""
    if not shares:
        return {}
    cut = {cause: round(value, 6) for cause, value in shares.items()}
    largest = max(cut, key=lambda cause: (cut[cause], cause))
    cut[largest] = round(cut[largest] + 1.0 - sum(cut.values()), 6)
    return {cause: cut[cause] for cause in CAUSES if cause in cut}


def _objective_text(finding: Finding) -> dict[str, object]:
    if finding.objective is None:
        return {"metric": "e2e", "limit_s": None, "boundary": "engine", "text": "end-to-end time, slowest tenth"}
    one = finding.objective
    return {"metric": one.metric, "limit_s": one.limit_s, "boundary": one.boundary, "text": one.text}


def _affected(scene: Scene, finding: Finding) -> dict[str, object]:
    count = finding.sums.count
    slo = finding.objective.text if finding.objective is not None and finding.over_limit else None
    return {
        "count": count,
        "of": scene.sums.count,
        "slo": slo or ("slowest tenth by end-to-end time" if count else None),
        "over_limit": finding.over_limit,
        "matching": finding.sums.by_class[finding.primary],
    }


def _baseline(scene: Scene, finding: Finding) -> dict[str, object] | None:
    if scene.baseline is None:
        return None
    e2e, matched = shape_matched(finding.affected, scene.before, "e2e_s")
    return {
        "from": scene.baseline.from_unix_ns,
        "to": scene.baseline.to_unix_ns,
        "matched": matched,
        "requests": len(scene.before) if scene.drawn_before is None else scene.drawn_before.of,
        "e2e_p50_s": rounded(e2e),
    }


def _confidence(scene: Scene, finding: Finding, evidence: Sequence[Evidence], flight: InFlight) -> dict[str, object]:
    matching = finding.sums.by_class[finding.primary]
    if finding.over_limit is None:
        # Without an objective the slow set is a tenth by construction: every request of that class is a witness.
        matching = max(matching, scene.sums.by_class[finding.primary])
    return confidence(
        finding.primary,
        evidence,
        matching,
        finding.phase_ratio,
        finding.margin_ratio,
        flight.samples if finding.live else 0,
        scene.sampling,
    )


def _evidence_rows(evidence: Sequence[Evidence], finding: Finding, scene: Scene) -> list[dict[str, object]]:
    """Rows for the chosen class first, then against rivals; rows that say nothing about any class last, at most twelve."""
    rows = [one.row(finding.primary) for one in evidence]
    order = {"for": 0, "against": 1, "context": 2}
    if not scene.before.is_empty():
        for name, column in (
            ("TTFT, median of affected requests", "ttft_s"),
            ("TPOT, median of affected requests", "tpot_s"),
        ):
            value, matched = shape_matched(finding.affected, scene.before, column)
            now = finding.affected[column].median()
            if value is not None and isinstance(now, float):
                text = f"{value:.3g} before" + ("" if matched else " (shapes not matched)")
                rows.append(
                    {
                        "name": name, "observed": rounded(now), "expected": text, "unit": "s", "source": "request spans",
                        "status": "measured", "says": "context", "about": finding.primary, "for": [], "against": [],
                    }
                )  # fmt: skip
    rows.sort(key=lambda row: (row["about"] != finding.primary, order[str(row["says"])]))
    return rows[:12]


def _flight_json(flight: InFlight, leads: bool) -> dict[str, object] | None:
    if flight.samples == 0:
        return None
    return {
        "leads": leads,
        "open": flight.open,
        "waiting": flight.waiting_now,
        "running": flight.running_now,
        "kv_usage_ratio": rounded(flight.kv_usage_now_ratio),
        "waiting_ratio": rounded(flight.contention_ratio),
        "preemptions": flight.preempted,
        "from_unix_ns": flight.from_unix_ns,
        "to_unix_ns": flight.to_unix_ns,
    }


def _verify(
    finding: Finding, recommend: Sequence[Mapping[str, object]], rulebook: Rulebook
) -> dict[str, object] | None:
    """How to prove the first change: the same load with and without it, judged by rules the technique file states."""
    first = next((one for one in recommend if str(one.get("technique")) in rulebook.techniques), None)
    if first is None or finding.primary == "inconclusive":
        return None
    technique = rulebook.techniques[str(first["technique"])]
    rule = technique.verify
    return {
        "command": "phasewise analyze --from START --to END --json   (once for each arm)",
        "arms": ["as now", technique.title],
        "minutes": rule.minutes,
        "pass": rule.pass_rule,
        "refute": rule.refute_rule,
        "guard": rule.guard,
    }


def _roofline(scene: Scene, settings: Mapping[str, Setting], rulebook: Rulebook) -> dict[str, object]:
    built = machine(settings, typical_model(scene.requests), rulebook)
    return {phase: judgement_json(one, built) for phase, one in judge_phases(scene.requests, built, rulebook).items()}


def _stage(finding: Finding, recommend: Sequence[object]) -> str:
    if finding.cause is None:
        return "measured"
    return "chosen" if recommend else "caused"


def _examples(scene: Scene, finding: Finding) -> list[dict[str, object]]:
    rows = finding.affected if scene.whole is None else scene.whole.examples
    if finding.primary != "inconclusive" and len(rows):
        fits = where(rows, pl.col("primary_class") == finding.primary)
        rows = fits if len(fits) else rows
    chosen = rows.sort("e2e_s", "request_key", descending=[True, False], nulls_last=True).head(EXAMPLES)
    return [
        {
            "request_key": row["request_key"],
            "trace_id": row["trace_id"],
            "e2e_s": rounded(row["e2e_s"]),
            "cause": row["cause"],
        }
        for row in chosen.iter_rows(named=True)
    ]


def _phase_shares(scene: Scene) -> dict[str, float | None]:
    """Phases as shares of end-to-end seconds at the engine; other is what no phase covers."""
    total = scene.sums.e2e_s
    if total <= 0:
        return {}
    found: dict[str, float | None] = {}
    covered = 0.0
    for phase, seconds in scene.sums.phases_s.items():
        part = None if seconds is None else seconds / total
        found[phase] = rounded(part)
        covered += part or 0.0
    found["other"] = rounded(1.0 - covered)
    return found


def _slower_than_before(scene: Scene, finding: Finding) -> list[tuple[str, float, float]]:
    """Figures of the affected requests at least one and a half times those of a baseline of the same shapes."""
    found = []
    for name, column in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
        before, matched = shape_matched(finding.affected, scene.before, column)
        now = finding.affected[column].median() if len(finding.affected) else None
        if matched and before and isinstance(now, float) and now >= SLOWER_RATIO * before:
            found.append((name, now, before))
    return found


def _notes(scene: Scene, finding: Finding, flight: InFlight) -> list[str]:
    notes = [finding.reason]
    if waiting := scene.sums.unattributed:
        notes.append(
            f"{counted(waiting, 'request')} {'is' if waiting == 1 else 'are'} not attributed yet; the verdict rests on the others"
        )
    notes += [
        f"{name} is {now / before:.1f} times that of the same shapes before ({before:.3g} s)"
        for name, now, before in _slower_than_before(scene, finding)
    ]
    if (held := held_back_s(finding.affected)) is not None:
        notes.append(held_back_sentence(held))
    if flight.open:
        come = "its spans come when it ends" if flight.open == 1 else "their spans come when they end"
        notes.append(f"{counted(flight.open, 'request')} still open: {come}")
    if scene.sampling.is_partial:
        notes.append(sampling_sentence(scene.sampling))
    if scene.estimated_aborted:
        notes.append(
            f"about {counted(scene.estimated_aborted, 'call')} given up by clients (an estimate: HTTP answers less finished requests)"
        )
    if scene.unjoined:
        notes.append("scrapes without a known instance were left out: " + ", ".join(scene.unjoined))
    if scene.drawn is not None or scene.drawn_before is not None:
        notes.append(drawn_sentence(scene.drawn, scene.drawn_before))
    if (scrapes := scene.drawn_scrapes) is not None:
        notes.append(f"engine metrics rest on {scrapes.count:,} of {scrapes.of:,} scrapes, evenly over the window")
    if clamped := scene.sums.clamped:
        notes.append(f"cut where phases exceed the end-to-end time within tolerance: {counted(clamped, 'request')}")
    if finding.cause in ("decode.weights", "decode.kv", "decode.compute"):
        notes.append("the roofline locates what bounds decoding; it does not predict each kernel")
    return notes


__all__ = ["analyzer_version", "request_report", "scene_verdict", "window_verdict"]
