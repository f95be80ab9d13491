"""Seconds of one engine step on any accelerator and model of the rules.

    device = matrix products by family + attention (prefill, decode) + elementwise + head + sampling + collectives
    step   = device and host, overlapped (asynchronous scheduling) or one after the other, + cold start

Each call of a kernel takes the smooth maximum of its compute and memory time, both with efficiencies that grow with the shape
(`rules/kernels/operators.py`), plus the floor of a call; the coefficients are fitted to published measurements (`rules/gpus/*.toml`, table
`efficiency`, else `rules/efficiency.toml`). No efficiency is above 1, so no step beats the data sheet. FLOPs and bytes are
those of `rules/counting.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from phasewise.instrumented_engine.executors.deployment import Deployment, kv_blocks_for
from phasewise.instrumented_engine.recording import Floats, Ints, StepComposition
from phasewise.rules.kernels.operators import Amount, Kept, one_where_any, smooth_maximum
from phasewise.rules.kernels.replica import Replica, replica_of

__all__ = ["LAW_COLUMNS", "RESOURCES", "Deployment", "TimeLaw", "kv_blocks_for"]

RESOURCES = ("compute", "weight_bytes", "kv_bytes", "host", "communication", "cold_start")
# Columns of steps that a law reads: five of the prompts, two of what decodes.
LAW_COLUMNS = (
    "prefill_tokens", "prefill_pairs", "prefill_past_tokens", "chunks", "last_chunks", "decode_sequences", "context_tokens",
)  # fmt: skip
OVERLAP_SHARPNESS = (
    8.0  # two things that run at once and wait for each other now and then: 9 % over the larger when equal
)


class TimeLaw:
    """The time law of one deployment; noiseless, without state but for what it has computed before.

    without: one of RESOURCES that this law knows nothing of, for a run in which it costs nothing.
    """

    def __init__(self, deployment: Deployment, without: str | None = None) -> None:
        self.deployment = deployment
        self.kept = _left(Kept(), without)
        self.replica: Replica = replica_of(deployment)
        self._by_tokens: dict[int, float] = {}
        self._by_logits: dict[int, float] = {}

    def seconds(self, composition: StepComposition) -> float:
        """One step."""
        chunk_tokens, sequences = composition.prefill_tokens, composition.decode_sequences
        tokens, logits = chunk_tokens + sequences, composition.last_chunks + sequences
        if not tokens:
            return 0.0
        kept = self.kept
        by_tokens = self._by_tokens.get(tokens)
        if by_tokens is None:
            by_tokens = self._by_tokens[tokens] = self.replica.token_seconds(float(tokens), kept)
        by_logits = self._by_logits.get(logits)
        if by_logits is None:
            by_logits = self._by_logits[logits] = self.replica.logit_seconds(float(logits), kept)
        device_s = by_tokens + by_logits
        if chunk_tokens:
            pairs, past = float(composition.prefill_pairs), float(composition.prefill_past_tokens)
            device_s += self.replica.prefill_seconds(float(chunk_tokens), pairs, past, float(composition.chunks), kept)
        if sequences:
            device_s += self.replica.decode_seconds(float(sequences), float(composition.context_tokens), kept)
        return float(self._step_seconds(device_s, float(tokens), float(logits), float(composition.number), kept))

    def seconds_of(self, columns: Mapping[str, Ints], without: str | None = None) -> Floats:
        """Each row of recorded step columns, the row number being the step number unless a column `number` gives it.

        without: one of RESOURCES taken away: compute: FLOPs take no time; weight_bytes, kv_bytes: those bytes cost nothing;
        host: neither CPU work nor launches nor the floor of a call; communication: no collectives; cold_start: no extra.
        The columns may have been altered; a row without tokens takes no time.
        """
        kept = _left(self.kept, without)
        column = {name: columns[name].astype(np.float64) for name in LAW_COLUMNS}
        tokens = column["prefill_tokens"] + column["decode_sequences"]
        logits = column["last_chunks"] + column["decode_sequences"]
        number = columns["number"] if "number" in columns else np.arange(len(tokens))
        different, rows = np.unique(tokens, return_inverse=True)
        device_s = self.replica.token_seconds(different, kept)[rows]
        different, rows = np.unique(logits, return_inverse=True)
        device_s = device_s + self.replica.logit_seconds(different, kept)[rows]
        device_s = device_s + self.replica.prefill_seconds(
            column["prefill_tokens"], column["prefill_pairs"], column["prefill_past_tokens"], column["chunks"], kept
        )
        device_s = device_s + self.replica.decode_seconds(column["decode_sequences"], column["context_tokens"], kept)
        seconds: Floats = self._step_seconds(device_s, tokens, logits, number.astype(np.float64), kept)
        return seconds

    def _step_seconds(self, device_s: Amount, tokens: Amount, logits: Amount, number: Amount, kept: Kept) -> Amount:
        """Device time together with launches, host and cold start."""
        at = self.deployment
        works = one_where_any(tokens)
        eager = one_where_any(tokens - at.graph_tokens) if at.cuda_graphs else works
        launches_s = eager * (self.replica.kernels * at.launch_s * kept.host)
        busy_s = smooth_maximum(device_s, launches_s, OVERLAP_SHARPNESS)
        host_s = works * (at.host_step_s + at.host_token_s * logits) * kept.host
        step_s = smooth_maximum(busy_s, host_s, OVERLAP_SHARPNESS) if at.async_scheduling else busy_s + host_s
        if at.cold_steps and at.cold_s:
            left = one_where_any(at.cold_steps - number) * (1.0 - number / at.cold_steps)  # from 1 at step 0 down to 0
            step_s = step_s + works * left * (at.cold_s * kept.cold_start)
        return step_s


def _left(kept: Kept, without: str | None) -> Kept:
    if without is None:
        return kept
    if without not in RESOURCES:
        raise ValueError(f"{without!r} cannot be taken away; known: {', '.join(RESOURCES)}")
    return replace(kept, **{without: 0.0})
