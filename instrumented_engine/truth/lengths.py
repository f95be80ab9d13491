"""How long prompts and outputs are: drawn from the public traces where they are at hand, else from their published quantiles.

In the per-request traces input and output are drawn together, one row a request; ServeGen publishes only their marginals, which
are drawn independently (rank correlation is below 0.1 in the real traces that have both).
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from phasewise.instrumented_engine.recording import Floats, Ints
from phasewise.instrumented_engine.truth.published import (
    LEVELS,
    MOONCAKE_BLOCK_TOKENS,
    MOONCAKE_REUSE_RATIO,
    PUBLISHED,
)

_FILES = {
    "azure_conv": "azure2023/AzureLLMInferenceTrace_conv.first40min.csv.gz",
    "azure_code": "azure2023/AzureLLMInferenceTrace_code.first35min.csv.gz",
    "mooncake_conversation": "mooncake/conversation_trace.first40min.jsonl.gz",
    "mooncake_synthetic": "mooncake/synthetic_trace.first2662rows.jsonl.gz",
    "arxiv": "vidur_arxiv/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.first18838.csv.gz",
}
_SERVEGEN = {"servegen_large": "m-large", "servegen_small": "m-small", "deepseek_r1": "deepseek-r1"}
_SERVEGEN_RATES = {"m-large": "m-large.days1-3", "m-small": "m-small.day1", "deepseek-r1": "deepseek-r1.day1"}
_DAY_S = 86_400
_LENGTH_WINDOW_S = 21_600


def workload_folder() -> Path | None:
    """The traces: `workloads` below the folder named by PHASEWISE_SHARED, by default `../shared`, seen from the folder of the
    process or from the checkout; None where there is none."""
    named = Path(os.environ.get("PHASEWISE_SHARED", "../shared"))
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        folder = (root / named / "workloads").resolve()
        if folder.is_dir():
            return folder
    return None


class Lengths(Protocol):
    """A distribution of (prompt tokens, output tokens)."""

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """[count, 2]: prompt and output tokens, at least 1 each."""
        ...


@dataclass(frozen=True, slots=True)
class JointLengths:
    """Rows of a trace, [rows, 2]; drawn with replacement."""

    rows: Ints

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return np.maximum(self.rows[rng.integers(0, len(self.rows), count)], 1)


@dataclass(frozen=True, slots=True)
class Marginal:
    """Inverse distribution function through (level, tokens), linear in the logarithm of tokens between the points."""

    levels: Floats
    log_tokens: Floats

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        drawn = np.exp(np.interp(rng.random(count), self.levels, self.log_tokens))
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class IndependentLengths:
    prompt: Marginal
    output: Marginal

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return np.stack([self.prompt.draw(rng, count), self.output.draw(rng, count)], axis=1)


def lengths(name: str, folder: Path | None) -> Lengths:
    """A distribution by its name in PUBLISHED, from the files below `folder` (see `workload_folder`) or from quantiles.

    KeyError for a name that is not there.
    """
    published = PUBLISHED[name]
    if folder is not None:
        if name in _FILES:
            return JointLengths(_joint_rows(folder / _FILES[name]))
        return _pooled_clients(folder / "servegen", _SERVEGEN[name])
    return IndependentLengths(_quantiles(published.prompt_tokens), _quantiles(published.output_tokens))


def _quantiles(tokens: tuple[int, ...]) -> Marginal:
    return Marginal(np.array(LEVELS), np.log(np.array(tokens, dtype=np.float64)))


@lru_cache(maxsize=16)
def _joint_rows(path: Path) -> Ints:
    if path.name.endswith(".jsonl.gz"):
        rows = [(row["input_length"], row["output_length"]) for row in _json_lines(path)]
    else:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            table = csv.reader(file)
            header = next(table)
            names = ("ContextTokens", "GeneratedTokens")
            if names[0] not in header:
                names = ("num_prefill_tokens", "num_decode_tokens")
            first, second = header.index(names[0]), header.index(names[1])
            rows = [(int(float(row[first])), int(float(row[second]))) for row in table]
    return np.array(rows, dtype=np.int64)


def _json_lines(path: Path) -> Iterator[dict[str, list[int] | int]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


@lru_cache(maxsize=4)
def _pooled_clients(folder: Path, model: str) -> IndependentLengths:
    """All clients of the first day, each length window weighted by the requests its client sent in it."""
    sent: Counter[tuple[int, int]] = Counter()
    with gzip.open(folder / f"{_SERVEGEN_RATES[model]}.rates.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            at = int(float(row["timestamp"]))
            if at < _DAY_S:
                sent[int(row["client_id"]), at // _LENGTH_WINDOW_S] += float(row["rate"])  # type: ignore[assignment]
    pooled: dict[str, Counter[int]] = {"input_tokens": Counter(), "output_tokens": Counter()}
    with gzip.open(folder / f"{model}.day1.lengths.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            window = json.loads(line)
            weight = sent[window["client_id"], window["timestamp"] // _LENGTH_WINDOW_S]
            for column, counts in pooled.items():
                for tokens, share in window[column].items():
                    counts[int(tokens)] += share * weight
    return IndependentLengths(_tabulated(pooled["input_tokens"]), _tabulated(pooled["output_tokens"]))


def _tabulated(weights: Counter[int]) -> Marginal:
    tokens = np.array(sorted(weights), dtype=np.int64)
    weight = np.array([weights[int(value)] for value in tokens], dtype=np.float64)
    levels = np.cumsum(weight) / weight.sum()
    return Marginal(levels, np.log(np.maximum(tokens, 1).astype(np.float64)))


# --- prompts that share prefixes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefixedPrompt:
    """block_ids: one id a MOONCAKE_BLOCK_TOKENS tokens, each covering all before it; the last block may be partial."""

    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def prefixed_prompts(name: str, folder: Path | None, rng: np.random.Generator, count: int) -> list[PrefixedPrompt]:
    """`count` prompts in the order they came, so that reuse keeps its distance; without the file a stand-in that continues
    an earlier prompt as often as the trace does."""
    if folder is None:
        return _chained(lengths(name, None).draw(rng, count), rng)
    rows = _prefix_rows(folder / _FILES[name])
    start = int(rng.integers(0, max(1, len(rows) - count)))
    return [rows[index % len(rows)] for index in range(start, start + count)]


@lru_cache(maxsize=4)
def _prefix_rows(path: Path) -> tuple[PrefixedPrompt, ...]:
    found = []
    for row in _json_lines(path):
        ids, prompt, output = row["hash_ids"], row["input_length"], row["output_length"]
        assert isinstance(ids, list) and isinstance(prompt, int) and isinstance(output, int)
        found.append(PrefixedPrompt(prompt, max(1, output), tuple(ids)))
    return tuple(found)


def _chained(tokens: Ints, rng: np.random.Generator) -> list[PrefixedPrompt]:
    """Block 0 is common to all; MOONCAKE_REUSE_RATIO of the prompts continue one of the 200 before them: of ten looked at, the
    longest that they can hold, for a conversation grows."""
    found: list[PrefixedPrompt] = []
    fresh = 1
    for prompt, output in tokens.tolist():
        needed = -(-prompt // MOONCAKE_BLOCK_TOKENS)
        ids: tuple[int, ...] = (0,)
        if found and rng.random() < MOONCAKE_REUSE_RATIO:
            looked_at = rng.integers(max(0, len(found) - 200), len(found), 10).tolist()
            whole = [found[one].block_ids[: found[one].prompt_tokens // MOONCAKE_BLOCK_TOKENS] for one in looked_at]
            ids = max((one for one in whole if len(one) <= needed), key=len, default=ids) or ids
        ids = ids[:needed]
        more = needed - len(ids)
        found.append(PrefixedPrompt(prompt, output, (*ids, *range(fresh, fresh + more))))
        fresh += more
    return found


def block_hashes(prompt: PrefixedPrompt, block_tokens: int) -> tuple[int, ...]:
    """Hashes of the prompt's full blocks of `block_tokens` tokens, finer than the trace's: a block inherits the id it lies in.

    block_tokens must divide MOONCAKE_BLOCK_TOKENS, else a block would lie in two ids.
    """
    parts, rest = divmod(MOONCAKE_BLOCK_TOKENS, block_tokens)
    assert rest == 0
    full = prompt.prompt_tokens // block_tokens
    return tuple(prompt.block_ids[index // parts] * parts + index % parts for index in range(full))
