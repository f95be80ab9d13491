"""Percentiles of a window's latencies, as the verdict carries them, at the engine's boundary and at its clients'."""

from __future__ import annotations

import polars as pl

from phasewise.analyzer.scene import Scene
from phasewise.analyzer.statistics import floats, summary

_ENGINE_COLUMNS = {
    "ttft": "ttft_s", "queue": "queue_s", "context": "context_s", "prefill": "prefill_s", "decode": "decode_s",
    "e2e": "e2e_s", "tpot": "tpot_s",
}  # fmt: skip


def engine_statistics(scene: Scene) -> dict[str, object]:
    """By the engine's boundary: percentiles of each phase and of the whole."""
    weights = scene.sampling.row_weights(scene.requests)
    return {name: summary(floats(scene.requests, column), weights) for name, column in _ENGINE_COLUMNS.items()}


def client_statistics(scene: Scene) -> dict[str, object] | None:
    """The same at the client's boundary: its own records, gaps pooled over all requests; None without any."""
    rows = scene.requests
    if not scene.sums.told["entry_e2e_s"]:
        return None
    answer: dict[str, object] = {
        "ttft": summary(floats(rows, "entry_ttft_s")),
        "e2e": summary(floats(rows, "entry_e2e_s")),
    }
    gaps = rows["client_gaps"].drop_nulls()
    if len(gaps):
        answer["itl"] = summary(gaps.str.json_decode(pl.List(pl.Float64)).explode().to_numpy())
    between = (pl.col("entry_e2e_s") - pl.col("entry_ttft_s")) / (pl.col("output_tokens") - 1)
    counted = pl.when(pl.col("output_tokens") > 1).then(between)  # a tool that counts tokens itself states its own
    answer["tpot"] = summary(
        rows.select(pl.coalesce("entry_tpot_s", counted).alias("tpot"))["tpot"].drop_nulls().to_numpy()
    )
    return answer
