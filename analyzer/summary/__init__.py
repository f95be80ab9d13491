"""A deployment without spans, told by its numbers: phasewise-summary/1 in, a verdict object out.

Detectors are small pure functions, one a mechanism; each yields what speaks for and against it. `verdict` weighs them.
"""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary import (
    cold,
    comparison,
    decode,
    definitions,
    external,
    frontend,
    health,
    host,
    interference,
    load,
    memory,
    prefill,
    prefix,
    views,
    waiting,
)
from phasewise.analyzer.summary.boundary import within_the_engine
from phasewise.analyzer.summary.document import validate_summary
from phasewise.analyzer.summary.hypothesis import Detector, Hypothesis
from phasewise.analyzer.summary.machine import Machine, read_machine
from phasewise.analyzer.summary.points import Summary
from phasewise.analyzer.summary.reader import read_summary
from phasewise.analyzer.summary.shares import of_consequence
from phasewise.analyzer.summary.verdict import verdict_json
from phasewise.rules.load import Rulebook

__all__ = ["DETECTORS", "explain_summary", "hypotheses_of", "validate_summary"]

DETECTORS: tuple[Detector, ...] = (
    views.buffering,
    views.flush_timer,
    views.hop,
    definitions.first_token_clock,
    definitions.impossible_numbers,
    definitions.load_generator,
    external.dominant_stage,
    external.blocked_loop,
    external.kv_transfer,
    external.slow_collectives,
    frontend.before_admission,
    frontend.preprocessing,
    frontend.grammar_first,
    frontend.equal_delay,
    waiting.slots,
    load.overload,
    load.admission_jump,
    waiting.offered_above_served,
    waiting.engine_queue,
    waiting.serial_prefill,
    waiting.uneven_replicas,
    memory.pool_too_small,
    memory.pool_full,
    memory.offload_slower,
    prefix.missed_prefix,
    prefix.two_populations,
    prefill.own_prompt,
    interference.beside_prefill,
    interference.long_steps,
    interference.unfair_lanes,
    interference.budget_trade,
    interference.stalls,
    decode.memory_roof,
    decode.clock,
    decode.costly_drafts,
    decode.room_in_the_batch,
    host.step_gap,
    host.eager_launches,
    host.cpu_quota,
    host.idle_device,
    cold.compiling,
    cold.adapters,
    host.swapping,
    comparison.compared,
    health.device_errors,
    health.far_from_limits,
    health.slowed_clock,
    health.unexplained_stalls,
)


def hypotheses_of(summary: Summary, machine: Machine) -> list[Hypothesis]:
    """What all detectors say, in their order."""
    return [hypothesis for detector in DETECTORS for hypothesis in detector(summary, machine)]


def explain_summary(document: Mapping[str, object], rulebook: Rulebook) -> dict[str, object]:
    """The verdict object of architecture section 8 for one phasewise-summary/1 document, with its `id`.

    Raises InputError for a document that is not of that format. Knows nothing but the document and the rules.
    """
    validate_summary(document)
    summary = read_summary(document)
    machine = read_machine(summary, rulebook)
    said = of_consequence(summary, within_the_engine(summary, hypotheses_of(summary, machine)))
    return verdict_json(summary, machine, said, rulebook)
