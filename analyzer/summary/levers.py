"""What each setting acts on: which cause, in which numbers it must show, and which change it is.

One entry for each setting that people vary, by what the setting decides. `comparison` measures what moved; here stands
what that means.
"""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary.change import Change, Choose, Lever
from phasewise.analyzer.summary.flags import flag_lever
from phasewise.analyzer.summary.lever_admission import ADMISSION
from phasewise.analyzer.summary.lever_memory import MEMORY
from phasewise.analyzer.summary.lever_steps import STEPS, unknown
from phasewise.analyzer.summary.lever_surroundings import SURROUNDINGS
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary

LEVERS: Mapping[str, Choose] = {**ADMISSION, **MEMORY, **STEPS, **SURROUNDINGS}


def lever_of(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """What the changed setting acts on; None where the entry says that this change, in this direction, means nothing."""
    if change.path.startswith("engine.extra_flags."):
        return flag_lever(change) or unknown(summary, machine, change)
    choose = LEVERS.get(change.path)
    return None if choose is None else choose(summary, machine, change)
