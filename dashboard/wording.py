"""Causes, classes and phases in plain words and in colours; the same everywhere a person reads them.

Colours are those of Okabe and Ito, which people with any common colour vision can tell apart; a label always stands beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phasewise.rules.vocabulary import CLASS_OF_CAUSE


@dataclass(frozen=True, slots=True)
class Phase:
    """letter: of the accounting identity; column: of `requests`."""

    name: str
    title: str
    letter: str
    column: str
    colour: str


# In the order of time. What an engine cannot split lies, where it holds context, before the request is queued.
PHASES: Mapping[str, Phase] = MappingProxyType(
    {
        phase.name: phase
        for phase in (
            Phase("combined", "Not split by the engine", "C+F", "combined_s", "#7C93B8"),
            Phase("context", "Context", "C", "context_s", "#4C7BC9"),
            Phase("queue", "Queue", "Q", "queue_s", "#E69F00"),
            Phase("prefill", "Prefill", "P", "prefill_s", "#56B4E9"),
            Phase("first_token", "First token", "F", "first_token_s", "#A9DCF7"),
            Phase("decode", "Decode", "D", "decode_s", "#009E73"),
            Phase("external", "External", "X", "external_s", "#CC79A7"),
            Phase("residual", "Unattributed", "?", "residual_s", "#6F7A89"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class CauseText:
    """title: on the card, at most 70 characters, no metric names; spent: completes "time is spent ..."."""

    title: str
    spent: str
    short: str


_CAUSES: Mapping[str, CauseText] = MappingProxyType(
    {
        "queue.slots": CauseText(
            "Requests wait for a free batch slot", "waiting for a free batch slot", "Wait for a slot"
        ),
        "queue.capacity": CauseText(
            "Offered load is above what the engine can serve",
            "waiting in front of an engine that is at capacity",
            "Over capacity",
        ),
        "queue.empty_slots": CauseText(
            "A static batch keeps seats for finished sequences",
            "waiting for seats that a static batch keeps empty",
            "Empty seats of a static batch",
        ),
        "queue.budget": CauseText(
            "Other prompts use up each step's token budget",
            "waiting for room in the step's token budget",
            "Wait for token budget",
        ),
        "queue.window": CauseText(
            "The batching window holds requests back", "waiting for a batch to fill", "Batching window"
        ),
        "queue.policy": CauseText(
            "Priority or quota rules hold requests back", "waiting behind priority or quota rules", "Priority or quota"
        ),
        "queue.head_of_line": CauseText(
            "One request that cannot start blocks those behind it",
            "waiting behind a request that cannot be admitted",
            "Head of line",
        ),
        "queue.upstream": CauseText(
            "Requests queue in the router, before the engine", "waiting in the router", "Upstream queue"
        ),
        "kv.wait": CauseText(
            "Requests wait for free KV cache blocks", "waiting for free KV cache blocks", "Wait for KV"
        ),
        "kv.preempt": CauseText(
            "The KV cache is full: requests are preempted and recomputed",
            "lost to preemption because the KV cache is full",
            "Preempted",
        ),
        "kv.evicted": CauseText(
            "Prefixes are evicted and computed again", "computing evicted prefixes again", "Evicted prefix"
        ),
        "kv.load": CauseText("KV cache is loaded from a slower tier", "loading KV cache from a slower tier", "KV load"),
        "prefill.compute": CauseText(
            "Prefill is bound by compute", "computing prompts (prefill, compute-bound)", "Prefill compute"
        ),
        "decode.compute": CauseText(
            "Decode is bound by compute", "computing output tokens (decode, compute-bound)", "Decode compute"
        ),
        "interference": CauseText(
            "Other requests' prefill holds this work up", "held up by other requests' prefill", "Others' prefill"
        ),
        "decode.weights": CauseText(
            "Decode is bound by reading the weights", "reading weights from memory during decode", "Decode: weights"
        ),
        "decode.kv": CauseText(
            "Decode is bound by reading the KV cache", "reading the KV cache from memory during decode", "Decode: KV"
        ),
        "prefill.attention_io": CauseText(
            "Prefill attention is bound by memory traffic",
            "moving attention data through memory during prefill",
            "Prefill attention I/O",
        ),
        "context": CauseText(
            "Preparing the prompt takes the time", "preparing prompts: templates, tokenizer, retrieval", "Context"
        ),
        "external": CauseText("Tools and other services take the time", "in tools and other services", "External"),
        "client": CauseText("The client side is the slow part", "at the client or on the connection to it", "Client"),
        "communication.network": CauseText(
            "Transfers between nodes take the time", "moving data between nodes", "Network"
        ),
        "communication.node": CauseText(
            "Communication between devices takes the time", "in collectives between devices", "Collectives"
        ),
        "host": CauseText("The host does not keep the device busy", "on the host, outside the device", "Host"),
        "host.scheduler": CauseText("The scheduler takes the time", "in the engine's scheduler", "Scheduler"),
        "cold_start": CauseText("The engine is still warming up", "warming up after a start", "Cold start"),
        "unexplained": CauseText("Not explained by any known cause", "not explained by the telemetry", "Unexplained"),
    }
)
assert set(_CAUSES) == set(CLASS_OF_CAUSE)

CLASS_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "queueing": "Queueing",
        "kv": "KV cache",
        "compute": "Compute",
        "bandwidth": "Memory bandwidth",
        "context": "Context preparation",
        "external": "Outside the engine",
        "host": "Host",
        "inconclusive": "Unexplained",
    }
)
CLASS_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "queueing": "#E69F00",
        "kv": "#D55E00",
        "compute": "#56B4E9",
        "bandwidth": "#009E73",
        "context": "#4C7BC9",
        "external": "#CC79A7",
        "host": "#8C8C8C",
        "inconclusive": "#5B6675",
    }
)
# Causes that do not wear the colour of their class, because a reader tells them apart by phase.
_CAUSE_COLOURS = {
    "interference": "#B48EDC",
    "decode.compute": "#35C79A",
    "decode.kv": "#7BD3B4",
    "queue.capacity": "#F2B84B",
    "kv.preempt": "#D55E00",
    "kv.wait": "#F0875A",
    "client": "#F0E442",
}


SIMULATED = "simulated-"  # how the names of data sets begin that a simulated executor made


def cause_text(cause: str | None) -> CauseText:
    """The words for a cause; one that this version does not know is shown by its name."""
    if cause is None:
        return CauseText("No single cause explains it", "without a cause that could be named", "No single cause")
    return _CAUSES.get(cause, CauseText(cause, f"in {cause}", cause))


def cause_colour(cause: str) -> str:
    return _CAUSE_COLOURS.get(cause, CLASS_COLOURS.get(CLASS_OF_CAUSE.get(cause, ""), "#5B6675"))


def dataset_kind(name: object) -> str:
    """What tells the rows of a data set from live traffic, in one word."""
    return "simulated" if str(name).startswith(SIMULATED) else "recorded"


def class_title(name: str | None) -> str:
    return CLASS_TITLES.get(name or "", name or "Unknown")


OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "queue": "queue time", "throughput": "throughput"}
)
