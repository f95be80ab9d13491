"""Evidence of requests that have not ended: engines report a request when it ends, so a growing queue is silent in spans.

Running, waiting, KV use and the TTFT counter (which moves at the first token) tell of it while it lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from phasewise.analyzer.attribution import read_samples
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.queueing import Samples, sampled_reasons, slot_limit
from phasewise.analyzer.replicas import LIVE_NS, Replica
from phasewise.analyzer.scene import STALE_NS, Scene
from phasewise.analyzer.step_samples import SOURCE as STEPS

SILENT_NS = 30 * 10**9  # an engine with work makes steps; one that made none for so long has none


@dataclass(frozen=True, slots=True)
class InFlight:
    """waiting_s by cause: request-seconds spent waiting in the last minute of data; total_s: of all requests in flight.

    open: running and waiting at the newest sample, less those that ended since. from_unix_ns, to_unix_ns: the stretch looked at.
    first_tokens: requests that got their first token in it, None where the engine does not count.
    """

    open: int = 0
    waiting_s: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    samples: int = 0
    waiting_now: float | None = None
    running_now: float | None = None
    kv_usage_now_ratio: float | None = None
    preempted: float = 0.0
    first_tokens: float | None = None
    from_unix_ns: int | None = None
    to_unix_ns: int | None = None

    @property
    def contention_ratio(self) -> float:
        """Share of the in-flight request-seconds spent waiting."""
        return sum(self.waiting_s.values()) / self.total_s if self.total_s > 0 else 0.0


def in_flight(scene: Scene) -> InFlight:
    """In-flight evidence of all replicas at the end of the window; empty where the data are older than the window's end."""
    parts = [part for replica in scene.replicas if (part := _of_replica(replica, scene)) is not None]
    if not parts:
        return InFlight()
    causes = sorted({cause for part in parts for cause in part.waiting_s})
    return InFlight(
        open=sum(part.open for part in parts),
        waiting_s={cause: sum(part.waiting_s.get(cause, 0.0) for part in parts) for cause in causes},
        total_s=sum(part.total_s for part in parts),
        samples=sum(part.samples for part in parts),
        waiting_now=_total([part.waiting_now for part in parts]),
        running_now=_total([part.running_now for part in parts]),
        kv_usage_now_ratio=max((p.kv_usage_now_ratio for p in parts if p.kv_usage_now_ratio is not None), default=None),
        preempted=sum(part.preempted for part in parts),
        first_tokens=_total([part.first_tokens for part in parts]),
        from_unix_ns=min(p.from_unix_ns for p in parts if p.from_unix_ns is not None),
        to_unix_ns=max(p.to_unix_ns for p in parts if p.to_unix_ns is not None),
    )


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _of_replica(replica: Replica, scene: Scene) -> InFlight | None:
    frame = replica.samples
    newest = scene.newest_unix_ns
    if frame.is_empty() or newest is None:
        return None
    end = min(newest, scene.window.to_unix_ns)
    live = not {"scrape", "steps"}.isdisjoint(frame["source"].fill_null("").unique().to_list())
    if live and min(scene.now_unix_ns, scene.window.to_unix_ns) - newest > STALE_NS:
        return None
    # Without a single span the samples are all there is of the window, not only of its end.
    origin = end - LIVE_NS if scene.sums.count else max(end - LIVE_NS * 60, scene.window.from_unix_ns)
    whole = read_samples(frame.filter(frame["unix_ns"] <= end), origin)
    if not len(whole) or whole.time[-1] < 0:
        return None
    recent = _cut(whole, 0.0)
    slots = slot_limit(replica.settings, whole, scene.traffic.running(replica, origin), None)
    reasons = sampled_reasons(recent, slots)
    weight = _weights(recent.time)
    waiting = np.nan_to_num(recent.waiting)
    running = np.nan_to_num(recent.running)
    counter = replica.counters["ttft_count"].drop_nulls()
    running_now, waiting_now = _now(replica, scene, whole, end)
    open_now = round((running_now or 0.0) + (waiting_now or 0.0))
    return InFlight(
        open=open_now,
        waiting_s={cause: float((waiting * weight)[chosen].sum()) for cause, chosen in reasons.items() if chosen.any()},
        total_s=float(((waiting + running) * weight).sum()),
        samples=len(recent),
        waiting_now=waiting_now,
        running_now=running_now,
        kv_usage_now_ratio=_last(recent.kv_usage) if open_now or not _steps_last(frame, end) else None,
        preempted=float(np.nansum(recent.preempted)),
        first_tokens=float(counter[-1] - counter[0]) if len(counter) > 1 and counter[-1] >= counter[0] else None,
        from_unix_ns=origin + round(float(recent.time[0]) * 1e9),
        to_unix_ns=origin + round(float(recent.time[-1]) * 1e9),
    )


def _now(replica: Replica, scene: Scene, samples: Samples, end_unix_ns: int) -> tuple[float | None, float | None]:
    """Requests running and waiting at the end of the window: those of the newest sample, less the ones whose rows say that they
    ended since. A step tells who runs during it, not after it: an engine that made none since then runs nobody."""
    running, waiting = _last(samples.running), _last(samples.waiting)
    frame = replica.samples
    newest = frame["unix_ns"].filter(frame["unix_ns"] <= end_unix_ns).max()
    assert isinstance(newest, int)  # there are samples
    silent = min(scene.now_unix_ns, scene.window.to_unix_ns) - newest > SILENT_NS
    if silent and _steps_last(frame, end_unix_ns):
        return (None if running is None else 0.0), (None if waiting is None else 0.0)
    ran, waited = scene.ended.get(replica.instance, (0, 0))
    left = None if running is None else max(running - ran, 0.0)
    return left, None if waiting is None else max(waiting - waited, 0.0)


def _steps_last(frame: pl.DataFrame, until_unix_ns: int) -> bool:
    """The newest sample up to a moment is a step."""
    before = frame.filter(frame["unix_ns"] <= until_unix_ns)
    return len(before) > 0 and before["source"][-1] == STEPS


def _cut(samples: Samples, start: float) -> Samples:
    keep = samples.time >= start
    return Samples(
        samples.time[keep],
        samples.running[keep],
        samples.waiting[keep],
        samples.kv_usage[keep],
        samples.preempted[keep],
        samples.prompt_tokens[keep],
    )


def _weights(time: Floats) -> Floats:
    """Seconds each sample stands for: half the way to its neighbours; one alone stands for one second."""
    if len(time) == 1:
        return np.ones(1)
    gap = np.diff(time)
    left, right = np.concatenate((gap[:1], gap)), np.concatenate((gap, gap[-1:]))
    return (left + right) / 2


def _last(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None
