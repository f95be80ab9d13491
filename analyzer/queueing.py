"""Why requests waited: slots, KV blocks, the step's token budget, or not known.

Engines give no wait reason worth trusting (architecture section 3), so the reason is read from what was true while a
request waited: KV use of the nearest sample, running sequences against the slot limit, others' prompts in the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats, Steps, covered, held, integrals
from phasewise.collector.context import Setting
from phasewise.rules.engine_settings import RANKS

KV_FULL_RATIO = 0.9  # from here on a waiting request is taken to wait for blocks
KV_HIGH_RATIO = 0.8  # the same, where slots are free or sequences are being preempted
PLATEAU_RATIO = 0.5  # running stands at its maximum for this share of the waiting time: that maximum is the slot limit
HELD_RATIO = 0.02  # a level of running held for less of the busy time is taken for noise of the clocks
ENOUGH_SAMPLES = 3  # with waiting requests, before samples alone show a plateau
HOLD_S = 60.0  # a sample speaks for at most this long before and after itself

STATED_LIMITS = ("effective_max_num_seqs", "max_num_seqs")  # settings, what a scheduler says of itself first
REASONS = ("kv.wait", "queue.slots", "queue.budget", "unexplained")


@dataclass(frozen=True, slots=True)
class Samples:
    """Engine samples of one instance in time order; NaN is unknown. time in seconds; preempted since the sample before."""

    time: Floats
    running: Floats
    waiting: Floats
    kv_usage: Floats
    preempted: Floats
    prompt_tokens: Floats  # computed since the sample before

    def __len__(self) -> int:
        return len(self.time)

    def step(self, values: Floats) -> Steps:
        """Some column of the samples as a function of time: each holds until the next known one."""
        known = np.isfinite(values)
        return Steps(self.time[known], values[known])

    def hold(self, chosen: Bools) -> Steps:
        """1 while the nearest sample is a chosen one and no farther than HOLD_S, else 0."""
        if not len(self.time):
            return Steps(np.empty(0), np.empty(0))
        middle = (self.time[1:] + self.time[:-1]) / 2
        left = np.maximum(np.concatenate(([-np.inf], middle)), self.time - HOLD_S)
        right = np.minimum(np.concatenate((middle, [np.inf])), self.time + HOLD_S)
        return covered(left[chosen], right[chosen])


@dataclass(frozen=True, slots=True)
class SlotLimit:
    """How many sequences may run at once: value None where nothing tells."""

    value: float | None
    source: str
    full_ratio: float | None  # share of the waiting time in which running stood there


def tells_reasons(settings: Mapping[str, Setting], samples: Samples) -> bool:
    """Whether anything can tell why requests waited: a stated slot limit, or samples of KV use."""
    return any(name in settings for name in STATED_LIMITS) or bool(np.isfinite(samples.kv_usage).any())


def slot_limit(
    settings: Mapping[str, Setting], samples: Samples, running: Steps | None, waiting: Steps | None
) -> SlotLimit:
    """The engine's setting, else the plateau: running at its maximum for most of the time in which requests wait.

    running, waiting: step functions made from spans, None without full coverage; samples alone serve a live window, where
    spans come only when a request ends.
    """
    stated = next((settings[name] for name in STATED_LIMITS if name in settings), None)
    known = float(stated.value) if stated is not None and isinstance(stated.value, int | float) else None
    ranks = settings.get(RANKS)
    if (
        known is not None
        and "effective_max_num_seqs" in settings
        and ranks is not None
        and isinstance(ranks.value, int)
    ):
        known *= ranks.value  # what a scheduler says of itself is one rank's; running is counted over all
    seen = [float(np.nanmax(samples.running))] if np.isfinite(samples.running).any() else []
    if running is not None and len(running.value):
        seen.append(held_top(running))
    top = known if known is not None else max(seen, default=0.0)
    if top <= 0:
        return SlotLimit(known, stated.source if stated else "unknown", None)
    ratio = None
    if running is not None and waiting is not None and waiting.value.any():
        ratio = _time_ratio(running, waiting, top)
    waits = samples.waiting > 0
    # One sample that happens to stand at the highest value seen is no plateau.
    if waits.sum() >= ENOUGH_SAMPLES or (known is not None and waits.any()):
        sampled = float((samples.running[waits] >= top - 0.5).mean())
        ratio = sampled if ratio is None else max(ratio, sampled)
    if known is not None:
        assert stated is not None
        return SlotLimit(known, stated.source, ratio)
    if ratio is None or ratio < PLATEAU_RATIO:
        return SlotLimit(None, "unknown", ratio)
    return SlotLimit(top, "plateau", ratio)


def held_top(running: Steps) -> float:
    """Highest level held for at least HELD_RATIO of the busy time: ends and starts of two spans may cross by some
    milliseconds of clock, which makes short peaks no engine ever saw."""
    length = np.diff(running.time, append=running.time[-1:])
    order = np.argsort(-running.value)
    held = np.cumsum(length[order])
    busy = float(length[running.value > 0.5].sum())
    reached = np.flatnonzero(held >= HELD_RATIO * busy)
    return float(running.value[order][reached[0]]) if busy > 0 and len(reached) else 0.0


def _time_ratio(running: Steps, waiting: Steps, top: float) -> float:
    grid = np.unique(np.concatenate((running.time, waiting.time)))
    length = np.diff(grid, append=grid[-1:])
    waits = held(waiting.time, waiting.value > 0.5, grid)
    total = float(length[waits].sum())
    full = float(length[waits & held(running.time, running.value >= top - 0.5, grid)].sum())
    return full / total if total > 0 else 0.0


def kv_limited(samples: Samples, slots: SlotLimit) -> Bools:
    """Which samples show requests that wait for KV blocks, one flag a sample."""
    full = samples.kv_usage >= KV_FULL_RATIO
    high = samples.kv_usage >= KV_HIGH_RATIO
    top = slots.value if slots.value is not None else np.inf
    free_slot = samples.running < top - 0.5
    return (samples.waiting > 0) & (full | (high & (free_slot | (samples.preempted > 0))))


def wait_reasons(
    queued: Floats,
    scheduled: Floats,
    samples: Samples,
    slots: SlotLimit,
    running: Steps,
    others_prefill: Steps,
    waiting: Steps,
) -> dict[str, Floats]:
    """Seconds of each wait [queued, scheduled) by reason (REASONS); they add up to the wait. waiting: all requests that wait.

    Without a sample near, KV use is unknown and a wait at a plateau may be either: it stays unexplained unless the limit
    is the engine's own setting.
    """
    kv_known = samples.hold(np.isfinite(samples.kv_usage))
    kv_full = samples.hold(kv_limited(samples, slots))
    grid = np.unique(np.concatenate((waiting.time, running.time, others_prefill.time, kv_known.time, kv_full.time)))
    kv, told, prefilling = (held(one.time, one.value > 0.5, grid) for one in (kv_full, kv_known, others_prefill))
    limit = slots.value
    at_limit = np.zeros(len(grid), dtype=np.bool_)
    if limit is not None:
        at_limit = held(running.time, running.value >= limit - 0.5, grid)
    sure = told | (slots.source not in ("plateau", "unknown"))
    # A slot that changes hands is empty for a moment: where the limit rules the waiting, it rules that moment too.
    ruled = limit is not None and (slots.full_ratio or 0.0) >= PLATEAU_RATIO
    slot = ~kv & sure & (at_limit | (ruled & ~(prefilling & told & ~at_limit)))
    budget = ~kv & ~slot & told & prefilling
    unknown = ~kv & ~slot & ~budget
    return dict(zip(REASONS, integrals(grid, (kv, slot, budget, unknown), queued, scheduled), strict=True))


def sampled_reasons(samples: Samples, slots: SlotLimit) -> dict[str, Bools]:
    """The same from samples alone, for requests that have not ended yet: one flag a sample and reason."""
    waits = samples.waiting > 0
    kv = kv_limited(samples, slots)
    top = slots.value if slots.value is not None else np.inf
    slot = waits & ~kv & (samples.running >= top - 0.5) & np.isfinite(samples.kv_usage)
    budget = waits & ~kv & ~slot & (samples.prompt_tokens > 0) & (samples.kv_usage < KV_HIGH_RATIO)
    return {"kv.wait": kv, "queue.slots": slot, "queue.budget": budget, "unexplained": waits & ~kv & ~slot & ~budget}
