"""The sentences of a verdict: causes in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from phasewise.analyzer.coverage import Sampling
from phasewise.analyzer.draw import Drawn
from phasewise.analyzer.findings import Finding, shares_of
from phasewise.analyzer.inflight import InFlight
from phasewise.analyzer.scene import Scene
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

ENDS_NOW_NS = 120 * 10**9  # a window that ends within two minutes of the clock is about now

PLAIN = {
    "queue.slots": "wait for a free slot in the batch",
    "queue.capacity": "wait because the engine is at its capacity",
    "queue.empty_slots": "wait for seats that a static batch keeps for finished sequences",
    "queue.budget": "wait because others' prompts use up the tokens of each step",
    "queue.window": "wait for a batch to be collected",
    "queue.policy": "wait for requests of higher priority or another tenant's turn",
    "queue.head_of_line": "wait behind a request that cannot be admitted",
    "queue.upstream": "wait in the router in front of the engine",
    "kv.wait": "wait for free KV cache blocks",
    "kv.preempt": "are preempted for lack of KV blocks and computed again",
    "kv.evicted": "compute prefixes again that the KV cache had dropped",
    "kv.load": "load their KV cache from another tier",
    "prefill.compute": "compute their own prompts",
    "prefill.attention_io": "move attention data during prefill",
    "interference": "are slowed down while others' prompts are prefilled",
    "decode.weights": "decode at the speed at which weights are read",
    "decode.kv": "decode at the speed at which the KV cache is read",
    "decode.compute": "decode at the device's compute limit",
    "context": "are prepared before the engine can start them",
    "external": "wait for tools or other services",
    "client": "are held up at the client",
    "communication.network": "wait for data between nodes",
    "communication.node": "wait for collectives between devices",
    "host": "wait for work on the host",
    "host.scheduler": "wait for the scheduler",
    "cold_start": "meet an engine that is still warming up",
}

# Of a healthy deployment: what bounds it, where "requests mostly are ..." would read oddly.
SPENT = {
    "kv.preempt": "into computing again what preemptions dropped",
    "interference": "into steps that others' prompts make longer",
    "context": "into preparing requests, before the engine starts them",
    "external": "to tools and other services",
    "client": "to the client and the way to it",
    "cold_start": "into steps of an engine that is still warming up",
}


OUTSIDE = {
    "host": "pass in the server in front of the engine",
    "client": "pass at the client or on the way to it",
}


def counted(count: int, noun: str) -> str:
    """A count of things with its noun: 1 request, 2,000 requests."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def headline(scene: Scene, finding: Finding, flight: InFlight) -> str:
    """One sentence in plain words."""
    if finding.status == "unknown":
        strangers = counted(scene.unmapped_spans, "span")
        strange = f"; {strangers} came that no engine profile knows" if scene.unmapped_spans else ""
        return f"Not enough evidence: {finding.reason}{strange}."
    if finding.live:
        cause = PLAIN.get(finding.cause or "", "wait, for a reason the samples do not tell")
        if not flight.open:
            return f"Slow, by engine metrics alone: requests {cause}."
        now = scene.newest_unix_ns is not None and scene.window.to_unix_ns >= scene.now_unix_ns - ENDS_NOW_NS
        of = f"of {flight.open:,} requests in flight, most" if flight.open > 1 else "requests in flight (1)"
        return f"Slow{' now' if now else ''}: {of} {cause}."
    if finding.primary == "inconclusive":
        word = "Slow" if finding.status == "slow" else "Healthy"
        return f"{word}, but no single cause stands out: {finding.reason}."
    share = shares_of(finding.seconds if finding.status == "slow" else scene.sums.seconds)
    held = sum(value for cause, value in share.items() if CLASS_OF_CAUSE[cause] == finding.primary)
    part = share.get(finding.cause or "", 0.0)
    what = PLAIN[finding.cause or ""]
    whole = f", {held:.0%} with all of {finding.primary}" if held - part > 0.05 else ""
    named = any("accelerator" in replica.settings for replica in scene.replicas)
    unsure = (finding.cause or "").startswith("decode.") and not named
    caveat = " The accelerator is not named, so time on the host is not ruled out." if unsure else ""
    if finding.status == "healthy":
        spent = SPENT.get(finding.cause or "")
        if spent is not None:
            return f"Healthy: time goes mostly {spent} ({part:.0%} of it{whole}).{caveat}"
        return f"Healthy: requests mostly {what} ({part:.0%} of their time{whole}).{caveat}"
    return f"Slow: affected requests {what} for {part:.0%} of their time{whole}.{caveat}"


def request_sentence(
    row: Mapping[str, object], partition: Mapping[str, object], outside: Mapping[str, float] = MappingProxyType({})
) -> str:
    """Where most of one request's time went. outside: its seconds outside the engine by cause, which no partition holds."""
    e2e, cause = row["e2e_s"], row["cause"]
    if not isinstance(e2e, float) or not partition:
        return "Nothing is known of where this request's time went."
    largest = str(cause) if cause else max(partition, key=lambda c: float(str(partition[c])))
    seconds = float(str(partition.get(largest, 0.0)))
    if (beside := outside.get(largest, 0.0)) > seconds:
        whole = e2e + sum(outside.values())
        before = row.get("entry_before_s")
        part = f" {before:.3g} s of it before the engine gets the request." if isinstance(before, float) else ""
        return f"{beside:.3g} s of {whole:.3g} s ({beside / whole:.0%}): {OUTSIDE[largest]}{',' if part else '.'}{part}"
    what = PLAIN.get(largest, "cannot be explained").removeprefix("are ")
    return f"{seconds:.3g} s of {e2e:.3g} s ({seconds / e2e:.0%}): {what}." if e2e > 0 else "This request took no time."


def sampling_sentence(sampling: Sampling) -> str:
    """What a reader has to know of spans that only some of the requests sent."""
    seen = f"{100 * (sampling.ratio or 0.0):.2g} % of the finished requests sent spans"
    if sampling.kind == "head":
        return f"{seen}, evenly (sampled): counts are those of the sample, rates are scaled"
    kept = {
        "tail": "the slow ones more often",
        "gaps": "some of the time hardly any",
        "uneven": "not evenly over their latencies",
    }[sampling.kind]
    if sampling.is_fair:
        return f"{seen}, {kept}: shares and percentiles are weighted by {sampling.by}, counts are those of the sample"
    return f"{seen}, {kept}: shares and percentiles are theirs, not those of all requests"


def drawn_sentence(drawn: Drawn | None, before: Drawn | None) -> str:
    """What a reader has to know of figures that rest on some of the requests; one of both is told."""
    parts = [
        f"{one.count:,} of {counted(one.of, 'request')}{when}"
        for one, when in ((drawn, ""), (before, " before"))
        if one is not None
    ]
    whole = "; counts, sums of seconds and the slowest requests are those of all" if drawn is not None else ""
    return f"percentiles and typical requests rest on {' and on '.join(parts)}, drawn evenly{whole}"


def held_back_sentence(seconds: float) -> str:
    """seconds: median by which clients see the first token later than the engine made it."""
    return (
        f"clients get the first token {seconds:.3g} s after the engine made it (median): something between holds the stream back, "
        "or they count visible text alone"
    )
