"""From effects to the right answer: cause and class of each request, and of a window for an objective.

Resource to cause (architecture section 5): compute is `prefill.compute` or `decode.compute` by phase, weight bytes
`decode.weights`, KV bytes `decode.kv` (in prefill `prefill.attention_io`), host `host`, communication `communication.node`, others'
prompts `interference`; context, external and cold start are their own.

A class gains the sum of its causes: they are taken from different work (compute from own and from others' prompts, weights and
KV from different kernels), so the sum is what taking all of them away would save. Only limits of the queue overlap; they cannot
save more than the request waited. Margin: the lead of the largest class over the next, as a share of the largest. Where the class of
the largest single effect is another one, or contention lies so near its threshold that either comparison may apply and they
disagree, the answer is ambiguous too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.instrumented_engine.recording import Floats
from phasewise.instrumented_engine.truth.direct import Direct
from phasewise.instrumented_engine.truth.parts import FIRST, PARTS, TOKENS
from phasewise.instrumented_engine.truth.run import Run
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, CONTENTION

METRICS = ("ttft", "tpot", "itl", "e2e")
SLOW_RATIO = 0.1  # of the requests: the slow set, as the analyzer takes it where no limit is given
SLOW_MIN = 3
CONTENTION_RATIO = 0.25  # of the slow set's time: from here on waiting for others decides (architecture section 3)
DOMINANT_MARGIN = 0.2  # a smaller lead over the next class is ambiguous: either answer may be right
UNSURE_RATIOS = (0.18, 0.35)  # of contention: near the threshold both comparisons must agree for a label to be dominant
DOMINANT_SHARE = 0.1  # of the slow set's time: a class that would save less than this dominates nothing
_CAUSE_OF_RESOURCE = {
    "weight_bytes": ("decode.weights", "decode.weights"),
    "kv_bytes": ("prefill.attention_io", "decode.kv"),
    "compute": ("prefill.compute", "decode.compute"),
    "host": ("host", "host"),
    "communication": ("communication.node", "communication.node"),
    "cold_start": ("cold_start", "cold_start"),
    "others_prefill": ("interference", "interference"),
    "context": ("context", "context"),
    "external": ("external", "external"),
}  # resource -> cause in steps of the prompt, in steps that decode
Choice = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowLabel:
    """The right answer for a window under one objective.

    slow: rows of the slow set; limit_s: what the fastest of it took: a limit just below gives the same set. contended:
    contention decided. by_class: seconds compared; metric_s: seconds of the objective in the slow set. cls, cause: None where nothing
    saves anything. dominant: the margin is large enough to call another answer wrong.
    """

    metric: str
    slow: Choice
    limit_s: float
    metric_s: float
    contention_ratio: float
    contended: bool
    by_class: Mapping[str, float]
    by_cause: Mapping[str, float]
    cls: str | None
    cause: str | None
    margin_ratio: float
    dominant: bool


def by_cause(direct: Direct, waiting: Mapping[str, Floats]) -> dict[str, Floats]:
    """Effects by cause, [PARTS, requests]; causes without any effect are left out. Direct ones are at least 0."""
    found: dict[str, Floats] = {}
    for resource, (in_prompt, in_token) in _CAUSE_OF_RESOURCE.items():
        for cause, seconds in ((in_prompt, direct.prompt[resource]), (in_token, direct.token[resource])):
            found[cause] = found[cause] + seconds if cause in found else seconds
    found |= waiting
    return {cause: found[cause] for cause in CAUSES if cause in found and found[cause].any()}


def class_seconds(effects: Mapping[str, Floats], waited_s: Floats) -> Floats:
    """[classes, PARTS, requests]; the queueing causes together at most the wait itself."""
    total = np.zeros((len(CLASSES), *waited_s.shape))
    for cause, seconds in effects.items():
        total[CLASSES.index(CLASS_OF_CAUSE[cause])] += seconds
    queue = CLASSES.index("queueing")
    total[queue] = np.minimum(total[queue], waited_s)
    return total


def request_labels(
    effects: Mapping[str, Floats], waited_s: Floats
) -> tuple[list[str | None], list[str | None], Floats]:
    """Class, cause and margin of each request over its whole time; None where nothing would save anything."""
    seconds = class_seconds(effects, waited_s).sum(axis=1)
    order = np.argsort(-seconds, axis=0, kind="stable")
    best = np.take_along_axis(seconds, order[:1], axis=0)[0]
    second = np.clip(np.take_along_axis(seconds, order[1:2], axis=0)[0], 0.0, None)
    margin = np.divide(best - second, best, out=np.zeros_like(best), where=best > 0)
    whole = {cause: values.sum(axis=0) for cause, values in effects.items()}
    classes: list[str | None] = []
    causes: list[str | None] = []
    for row in range(seconds.shape[1]):
        name = CLASSES[int(order[0, row])] if best[row] > 0 else None
        inside = [cause for cause in whole if CLASS_OF_CAUSE[cause] == name]
        classes.append(name)
        causes.append(max(inside, key=lambda cause: float(whole[cause][row])) if inside else None)
    return classes, causes, margin


def metric_seconds(run: Run, metric: str) -> tuple[Floats, Floats]:
    """(the figure of the objective, the seconds it is made of) of each served request; NaN and 0 where it has none.

    ttft: until the first token; tpot and itl: between tokens, tools inside the stream left out; e2e: everything.
    """
    arrival = np.array([one.spec.arrival_ns for one in run.served], dtype=np.int64)
    first = np.array([one.first_token_ns or 0 for one in run.served], dtype=np.int64)
    last = np.array([one.last_token_ns or 0 for one in run.served], dtype=np.int64)
    end = np.array([one.finished_ns or 0 for one in run.served], dtype=np.int64)
    if metric == "ttft":
        seconds = (first - arrival) / 1e9
        return seconds, seconds
    if metric == "e2e":
        seconds = (end - arrival) / 1e9
        return seconds, seconds
    if metric not in METRICS:
        raise ValueError(f"{metric!r} is not one of {', '.join(METRICS)}")
    gaps = np.array([one.output_tokens - 1 for one in run.served], dtype=np.int64)
    outside = np.array([_inside_stream_s(one.external, one.first_token_ns, one.last_token_ns) for one in run.served])
    seconds = np.where(gaps > 0, (last - first) / 1e9 - outside, 0.0)
    return np.divide(seconds, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0), seconds


def _inside_stream_s(external: list[tuple[int, int]], first: int | None, last: int | None) -> float:
    total = reached = 0
    for start, end in sorted(external):
        if first is not None and last is not None and first <= start < last:
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total / 1e9


def slow_set(figure: Floats) -> Choice:
    """The slowest tenth by the objective's figure, at least SLOW_MIN; ties by order of arrival."""
    known = np.flatnonzero(np.isfinite(figure))
    count = min(len(known), max(SLOW_MIN, -(-len(known) // round(1 / SLOW_RATIO))))
    return np.sort(known[np.argsort(-figure[known], kind="stable")[:count]]).astype(np.int64)


def window_label(run: Run, effects: Mapping[str, Floats], waited_s: Floats, metric: str) -> WindowLabel:
    """The analyzer's rule (architecture section 3) applied to effects instead of booked seconds.

    Slow set: the slowest tenth by the objective's figure. Effects are summed over it within the parts of a request the objective is
    about. Where the contention causes (queue.*, kv.*, interference, cold start) would save at least CONTENTION_RATIO of its time, the class
    with the largest sum of contention effects is the answer; else the class with the largest sum of all effects. The cause is the
    largest one inside the class.
    """
    figure, seconds = metric_seconds(run, metric)
    slow = slow_set(figure)
    parts = {"ttft": [FIRST], "tpot": [TOKENS], "itl": [TOKENS], "e2e": list(range(PARTS))}[metric]
    sums = {
        cause: float(values[parts][:, slow].sum())
        for cause, values in effects.items()
        if not (metric in ("tpot", "itl") and cause == "external")  # its time is not in the figure
    }
    total = float(seconds[slow].sum())
    queued = min(
        sum(max(0.0, value) for cause, value in sums.items() if cause.startswith("queue.")),
        float(waited_s[parts][:, slow].sum()),
    )
    contention = {cause: value for cause, value in sums.items() if cause in CONTENTION}
    held = queued + sum(max(0.0, value) for cause, value in contention.items() if not cause.startswith("queue."))
    ratio = held / total if total > 0 else 0.0
    contended = ratio >= CONTENTION_RATIO
    compared, other = (contention, sums) if contended else (sums, contention)
    classes, ordered = _ranked(compared, queued)
    best, following = classes[ordered[0]], classes[ordered[1]]
    margin = (best - following) / best if best > 0 else 0.0
    cls = ordered[0] if best > 0 else None
    inside = [cause for cause in compared if CLASS_OF_CAUSE[cause] == cls]
    single = CLASS_OF_CAUSE[max(compared, key=lambda cause: compared[cause])] if compared else None
    sure = not UNSURE_RATIOS[0] < ratio < UNSURE_RATIOS[1] or _ranked(other, queued)[1][0] == cls
    return WindowLabel(
        metric=metric,
        slow=slow,
        limit_s=float(figure[slow].min()) if len(slow) else 0.0,
        metric_s=total,
        contention_ratio=ratio,
        contended=contended,
        by_class={name: value for name, value in classes.items() if value > 0},
        by_cause=sums,
        cls=cls,
        cause=max(inside, key=lambda cause: compared[cause]) if inside else None,
        margin_ratio=margin,
        dominant=sure and single == cls and margin >= DOMINANT_MARGIN and best >= max(DOMINANT_SHARE * total, 1e-12),
    )


def _ranked(causes: Mapping[str, float], queued_s: float) -> tuple[dict[str, float], list[str]]:
    """Seconds by class, the queue's at most what was waited, and the classes from the largest on."""
    classes = dict.fromkeys(CLASSES, 0.0)
    for cause, value in causes.items():
        classes[CLASS_OF_CAUSE[cause]] += max(0.0, value)
    classes["queueing"] = min(classes["queueing"], queued_s)
    return classes, sorted(CLASSES, key=lambda name: (-classes[name], CLASSES.index(name)))
