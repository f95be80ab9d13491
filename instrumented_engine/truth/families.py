"""Fourteen families of scenarios. A family says what is drawn and makes one resource plausible; it never says the answer.

The causes that architecture section 5 maps from a resource, and the look-alikes that a diagnosis confuses, are spread so that each
resource has a family in which it often decides, and most families have a second resource close behind it:

| family | drawn so that | often decides | looks like |
|---|---|---|---|
| prompt_compute | long prompts, short answers, little load | prefill.compute | a queue, or others' prompts |
| weight_stream | few sequences decode on a large model, or a crowd on 4-bit weights | decode.weights, decode.compute | host; each other |
| context_stream | questions over long shared documents, or long answers | decode.kv, prefill.attention_io | weight bytes; prefill |
| launch_bound | small model, no graphs, slow host | host | bandwidth: the step is short and nothing computes |
| split_small | many devices for a model that needs few | communication.node | bandwidth |
| prompt_interference | chats decode beside long prompts of others | interference | compute |
| slow_context | retrieval before the queue | context | prefill: TTFT is all the user sees |
| tool_calls | tools before and inside the stream | external | decode |
| cold_start | a replica that has just started | cold_start | queue, host |
| full_seats | too few seats, or more load than any number of seats serves | queue.slots, queue.capacity | each other |
| kv_pool | a pool smaller than what the seats would fill | kv.wait, kv.preempt | a queue for seats |
| batch_forming | static batches, or a window before each batch | queue.empty_slots, queue.window | capacity |
| rationed | a tight step budget, or tenants, priorities and pools | queue.budget, queue.policy | capacity |
| mixture | two or three of these at once | any | any |

kv.preempt has no family in which it often decides: who is put back waits until blocks for all its tokens are free again, and that wait
(kv.wait) is mostly longer than computing them again. Longer prompts make it costlier but rarer, since only answers grow. `kv_pool`
draws runs of a thousand preemptions in which the class is KV between tokens too; the cause itself is checked in closed form.
decode.compute needs a large model, few bits a weight and short contexts, else the batch that fills the ridge reads more KV than it
computes (design/roofline.md, finding 1).

Loads are set against what the drawn deployment itself serves, measured by a short run of at most PILOT_COUNT requests at once
(`scenario.capacity_per_s`): with more seats than that it serves more, and a load above 1 need not be too much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from phasewise.instrumented_engine.simulation import Setup
from phasewise.instrumented_engine.truth import limit_families, step_families
from phasewise.instrumented_engine.truth.lengths import workload_folder
from phasewise.instrumented_engine.truth.machines import machine_notes
from phasewise.instrumented_engine.truth.plan import Draw, Plan
from phasewise.instrumented_engine.truth.scenario import Scenario, alone_s, capacity_per_s
from phasewise.instrumented_engine.truth.traffic import timed
from phasewise.rules.errors import InputError

FAMILIES: Mapping[str, Callable[[Draw], Plan]] = {
    "prompt_compute": step_families.prompt_compute,
    "weight_stream": step_families.weight_stream,
    "context_stream": step_families.context_stream,
    "launch_bound": step_families.launch_bound,
    "split_small": step_families.split_small,
    "prompt_interference": step_families.prompt_interference,
    "slow_context": step_families.slow_context,
    "tool_calls": step_families.tool_calls,
    "cold_start": step_families.cold_start,
    "full_seats": limit_families.full_seats,
    "kv_pool": limit_families.kv_pool,
    "batch_forming": limit_families.batch_forming,
    "rationed": limit_families.rationed,
    "mixture": limit_families.mixture,
}


def draw(family: str, seed: int, requests_count: int = 1000) -> Scenario:
    """One scenario of a family; the same family, seed, count and trace files give the same one.

    The traces are read where `workload_folder` finds them. InputError for a family that is not there.
    """
    return draw_from(family, seed, requests_count, workload_folder())


def draw_from(family: str, seed: int, requests_count: int, folder: Path | None) -> Scenario:
    """The same with the folder of the traces given; None: from their published quantiles."""
    if family not in FAMILIES:
        raise InputError("scenario", family, "is not a family", f"give one of {', '.join(FAMILIES)}")
    rng = np.random.default_rng([list(FAMILIES).index(family), seed])
    plan = FAMILIES[family](Draw(rng, requests_count, folder))
    if plan.load is not None:
        rate = plan.load * capacity_per_s(plan.config, plan.deployment, plan.specs, seed)
        load = f"{plan.load:.2f} of capacity"
    else:
        assert plan.concurrency is not None
        rate = plan.concurrency / alone_s(plan.config, plan.deployment, plan.specs, seed)
        load = f"{plan.concurrency:.1f} requests at once"
    notes = machine_notes(plan.deployment) | {
        "load": f"{load}, {rate:.3g} a second, {plan.pattern} arrivals",
        "lengths": "traces" if folder else "published quantiles",
        **plan.notes,
    }
    specs = timed(plan.specs, rate, plan.pattern, rng, folder)
    return Scenario(family, seed, Setup(plan.config, plan.deployment), specs, notes)
