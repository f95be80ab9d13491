"""What attribution is given, and what it gives back: the seam between the writer and the analyzer.

The collector imports nothing above it, so ``dashboard/commands/serve.py`` hands the analyzer's function to the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine setting as seen, and where: user, server_info, scrape, resource, startup_log, pod_arguments, plateau.

    others: what less believed sources say instead, each as (value, source).
    """

    value: object
    source: str
    others: tuple[tuple[object, str], ...] = ()


# Columns of `requests` that attribution is given: of the many rows around a target each column costs.
REQUEST_COLUMNS = (
    "request_key", "call_key", "engine", "instance", "model", "outcome", "input_tokens", "cached_tokens", "output_tokens",
    "arrival_unix_ns", "finished_unix_ns", "queued_unix_ns", "scheduled_unix_ns", "first_token_unix_ns",
    "e2e_s", "queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s", "combined_covers",
    "preemptions", "entry_e2e_s", "entry_side", "queue_slot_s", "queue_kv_s", "queue_budget_s", "queue_window_s", "queue_policy_s", "queue_upstream_s",
    "kv_load_s", "segments",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Context:
    """Everything attribution may look at for one instance.

    requests: at least REQUEST_COLUMNS of `requests`, the targets and rows of the instance that finish shortly before them or overlap
    them; samples, steps: the joined `engine_samples` and `engine_steps` of the same time; targets: keys of the rows to attribute. Of
    rows that become final by this, where all of it begins and ends follows from the rows alone (collector/blocks.py).
    """

    instance: str
    requests: pl.DataFrame
    samples: pl.DataFrame
    steps: pl.DataFrame
    targets: Collection[str]  # a Polars column of keys is the cheapest
    settings: Mapping[str, Setting] = field(default_factory=dict)


# The answer has `request_key` and any columns of `requests` to set: causes, class, margin, and what the context fills
# (concurrency_at_arrival, decode_batch_mean, kv_usage_*, model). One row a target of any of the contexts, whose requests have the same
# columns; a context's answer is the same whatever others are asked about with it.
Attribute = Callable[[Sequence[Context]], pl.DataFrame]
