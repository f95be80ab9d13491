"""Conditions of technique files against a situation: true, false, or unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phasewise.collector.context import Setting
from phasewise.rules.engine_settings import HOW_TO_READ
from phasewise.rules.schema import Condition, InForce, Scalar
from phasewise.rules.vocabulary import CLASS_OF_CAUSE, SIGNALS

Value = float | str | bool | None

# Below this share of the time the host is not worth splitting: the parts are noise.
LEAST_HOST = 0.03


@dataclass(frozen=True, slots=True)
class Situation:
    """What was found, told by telemetry or by a summary.

    shares: cause -> share of the affected end-to-end seconds, empty where unknown; signals: of `rules/vocabulary.py`, absent
    and None both unknown; settings: engine settings as seen, each with its source.
    """

    primary: str
    cause: str | None
    shares: Mapping[str, float]
    signals: Mapping[str, Value]
    engine: str | None
    engine_version: str | None
    settings: Mapping[str, Setting]


def complete_signals(situation: Situation) -> dict[str, Value]:
    """The signals with those that follow from others filled in where they are missing."""
    signals = dict(situation.signals)
    signals["primary"] = situation.primary
    signals["cause"] = situation.cause
    reusable, hit = _number(signals.get("prefix_reusable_ratio")), _number(signals.get("prefix_hit_ratio"))
    if signals.get("prefix_missed_ratio") is None and reusable is not None:
        if hit is not None:
            signals["prefix_missed_ratio"] = max(0.0, reusable - hit)
        elif signals.get("prefix_caching") is False:
            signals["prefix_missed_ratio"] = reusable
    if signals.get("host_before_queue_ratio") is None:
        signals["host_before_queue_ratio"] = _host_before_queue(situation.shares, signals)
    weight_bits = _number(signals.get("weight_bits"))
    if signals.get("compute_bits") is None and weight_bits is not None and weight_bits >= 16:
        signals["compute_bits"] = weight_bits
    fp8, int8 = signals.get("device_has_fp8"), signals.get("device_has_int8")
    if signals.get("device_has_faster_dtype") is None:
        if (signals.get("compute_bits") or 16) == 16 and True in (fp8, int8):
            signals["device_has_faster_dtype"] = True
        elif fp8 is False and int8 is False:
            signals["device_has_faster_dtype"] = False
    return signals


def _host_before_queue(shares: Mapping[str, float], signals: Mapping[str, Value]) -> float | None:
    """Part of the host seconds that passes before the engine's queue: the frontend's part of the time to first token times
    what is not decode, over the host's share. None where one of them is unknown or the host
    holds next to nothing."""
    frontend, decode = _number(signals.get("frontend_ratio")), _number(signals.get("decode_ratio"))
    host = sum(share for cause, share in shares.items() if CLASS_OF_CAUSE.get(cause) == "host")
    if frontend is None or decode is None or host < LEAST_HOST:
        return None
    return min(1.0, frontend * max(0.0, 1 - decode) / host)


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def signal_value(name: str, situation: Situation, signals: Mapping[str, Value]) -> Value:
    """A signal, or the share of a cause or class; a share is unknown only where no shares are known at all."""
    head, _, rest = name.partition(":")
    if head != "share":
        return signals.get(name)
    if not situation.shares:
        return None
    group, _, member = rest.partition(":")
    if group == "class":
        return sum(share for cause, share in situation.shares.items() if CLASS_OF_CAUSE.get(cause) == member)
    return situation.shares.get(rest, 0.0)


def compare(observed: Value, op: str, value: Scalar | tuple[Scalar, ...]) -> bool | None:
    """`observed op value`; None where observed is unknown or of another kind than the rule compares with."""
    if observed is None:
        return None
    if op in ("in", "not_in"):
        assert isinstance(value, tuple)
        return (observed in value) == (op == "in")
    if op in ("eq", "ne"):
        return (observed == value) == (op == "eq")
    number = _number(observed)
    if number is None or not isinstance(value, int | float):
        return None
    return {"lt": number < value, "le": number <= value, "gt": number > value, "ge": number >= value}[op]


def applies(condition: Condition, situation: Situation) -> bool:
    """Whether the condition is meant for this verdict at all."""
    return not condition.only_for or situation.cause in condition.only_for or situation.primary in condition.only_for


@dataclass(frozen=True, slots=True)
class Checked:
    """One condition against the situation. holds None: the signal is unknown."""

    condition: Condition
    observed: Value
    holds: bool | None

    @property
    def reason(self) -> str:
        return self.condition.reason.format(
            observed=shown(self.observed, self.condition.signal), value=shown_operand(self.condition)
        )

    @property
    def read(self) -> str:
        """How a user reads the missing value."""
        return how_to_read(self.condition.signal)


def check(condition: Condition, situation: Situation, signals: Mapping[str, Value]) -> Checked:
    observed = signal_value(condition.signal, situation, signals)
    return Checked(condition, observed, compare(observed, condition.op, condition.value))


def in_force(state: InForce | None, situation: Situation, signals: Mapping[str, Value]) -> bool | None:
    """Whether a technique is switched on already: False where its file names no state, None where it is unknown."""
    if state is None:
        return False
    observed: Value
    if state.signal is not None:
        observed = signal_value(state.signal, situation, signals)
    else:
        seen = situation.settings.get(state.setting or "")
        observed = seen.value if seen is not None and isinstance(seen.value, str | int | float | bool) else None
    return compare(observed, state.op, state.value)


def how_to_read(signal: str) -> str:
    if signal in HOW_TO_READ:
        return HOW_TO_READ[signal]
    return f"needed: {SIGNALS[signal].text}" if signal in SIGNALS else "needed: the phases of the requests"


def shown(value: Value, signal: str) -> str:
    """A value as a reader sees it: ratios in percent, truths as on and off."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    unit = "ratio" if signal.startswith("share:") else SIGNALS[signal].unit if signal in SIGNALS else ""
    if unit == "ratio" and 0 <= value <= 1:
        return f"{_short(100 * value)} %"
    if unit == "ratio":
        return f"{_short(value)} times"
    suffix = {"seconds": " s", "tokens": " tokens", "bytes": " bytes"}.get(unit, "")
    return f"{_short(value)}{suffix}"


def shown_operand(condition: Condition) -> str:
    value = condition.value
    if isinstance(value, tuple):
        return ", ".join(shown(item, condition.signal) for item in value)
    return shown(value, condition.signal)


def _short(value: float) -> str:
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"
