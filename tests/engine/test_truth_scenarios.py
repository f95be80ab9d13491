"""Lengths, arrivals and the fourteen families."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence as Items
from itertools import product

import numpy as np
import pytest
from shared_data import shared_path

from phasewise.instrumented_engine.truth.arrivals import PATTERNS, gamma_gaps, unit_gaps
from phasewise.instrumented_engine.truth.families import FAMILIES, draw, draw_from
from phasewise.instrumented_engine.truth.lengths import (
    PrefixedPrompt,
    block_hashes,
    lengths,
    prefixed_prompts,
)
from phasewise.instrumented_engine.truth.machines import ACCELERATORS, MODELS, deployment
from phasewise.instrumented_engine.truth.published import LEVELS, MOONCAKE_BLOCK_TOKENS, PUBLISHED
from phasewise.instrumented_engine.truth.traffic import over_documents
from phasewise.instrumented_engine.truth.truth import truth_of
from phasewise.rules.errors import InputError

QUANTILES_ONLY = None


@pytest.mark.parametrize("name", PUBLISHED)
def test_drawn_lengths_have_the_published_quantiles(name: str) -> None:
    drawn = lengths(name, QUANTILES_ONLY).draw(np.random.default_rng(1), 40_000)
    assert drawn.min() >= 1
    for column, published in enumerate((PUBLISHED[name].prompt_tokens, PUBLISHED[name].output_tokens)):
        for level, tokens in list(zip(LEVELS, published, strict=True))[1:-1]:
            low, high = np.quantile(drawn[:, column], [max(0, level - 0.006), level + 0.006])  # 40,000 draws: 12 sigma
            assert low - 1 <= tokens <= high + 1, (name, level)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_quantiles_are_those_of_the_traces(name: str) -> None:
    folder = shared_path("workloads")
    drawn = lengths(name, folder).draw(np.random.default_rng(1), 40_000)
    for column, published in enumerate((PUBLISHED[name].prompt_tokens, PUBLISHED[name].output_tokens)):
        for level, tokens in list(zip(LEVELS, published, strict=True))[3:-1]:
            # A level that falls between two lumps of the trace may land on either.
            low, high = np.quantile(drawn[:, column], [max(0, level - 0.01), min(1, level + 0.01)])
            assert 0.93 * low - 2 <= tokens <= 1.07 * high + 2, (name, level)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gaps_have_mean_one_and_keep_their_burstiness(pattern: str) -> None:
    gaps = unit_gaps(pattern, np.random.default_rng(3), 1500, QUANTILES_ONLY)
    assert gaps.mean() == pytest.approx(1)
    assert (gaps >= 0).all()
    variation = float(gaps.std())
    assert {"even": variation == 0, "poisson": 0.9 < variation < 1.1, "azure_code": variation > 4}.get(pattern, True)


def test_traced_arrivals_keep_their_shape_and_lose_their_ticks() -> None:
    folder = shared_path("workloads")
    rng = np.random.default_rng(5)
    code = unit_gaps("azure_code", rng, 6000, folder)
    conversation = unit_gaps("azure_conv", rng, 6000, folder)
    assert code.std() > 5 > 1.5 > conversation.std()
    mooncake = unit_gaps("mooncake", rng, 5000, folder)
    assert mooncake.std() < 1.3  # as published the ticks make it 2.97
    assert (mooncake == 0).mean() < 0.01


def test_gamma_gaps_have_the_asked_variation() -> None:
    gaps = gamma_gaps(np.random.default_rng(0), 200_000, 2.0)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.03)


def test_unknown_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="poisson"):
        unit_gaps("weekly", np.random.default_rng(0), 10, None)


def reusable_ratio(prompts: Items[PrefixedPrompt]) -> float:
    """Prompt tokens whose block an earlier prompt had, with a cache without end."""
    seen: set[int] = set()
    hit = total = 0
    for prompt in prompts:
        for place, block in enumerate(prompt.block_ids):
            tokens = min(MOONCAKE_BLOCK_TOKENS, prompt.prompt_tokens - place * MOONCAKE_BLOCK_TOKENS)
            total += tokens
            hit += tokens if block in seen else 0
        seen.update(prompt.block_ids)
    return hit / total


def test_prefixes_of_the_trace_and_of_its_stand_in_can_be_reused() -> None:
    stand_in = prefixed_prompts("mooncake_conversation", None, np.random.default_rng(2), 1500)
    assert 0.2 < reusable_ratio(stand_in) < 0.6
    folder = shared_path("workloads")
    traced = prefixed_prompts("mooncake_conversation", folder, np.random.default_rng(2), 7000)
    assert reusable_ratio(traced) == pytest.approx(0.358, abs=0.03)  # of the whole file


def test_finer_blocks_are_equal_where_the_coarse_ones_are() -> None:
    first = block_hashes(PrefixedPrompt(1300, 1, (7, 8, 9)), 16)
    second = block_hashes(PrefixedPrompt(1100, 1, (7, 8, 10)), 16)
    assert len(first) == 1300 // 16 and len(second) == 1100 // 16
    assert first[:64] == second[:64]
    assert not set(first[64:]) & set(second[64:])
    assert len(set(first)) == len(first)


def test_questions_over_documents_share_the_document_only() -> None:
    documents = np.array([2048, 4096])
    questions = np.array([[100, 10]] * 50)
    prompts = over_documents(np.random.default_rng(0), documents, questions)
    assert {prompt.prompt_tokens for prompt in prompts} == {2148, 4196}
    own = [prompt.block_ids[-1] for prompt in prompts]
    assert len(set(own)) == 50
    assert len({prompt.block_ids[:-1] for prompt in prompts}) == 2


def test_there_are_fourteen_families_five_accelerators_and_four_models() -> None:
    assert (len(FAMILIES), len(ACCELERATORS), len(MODELS)) == (14, 5, 4)
    assert all(family.__doc__ for family in FAMILIES.values())  # what a list of scenarios says of them
    rng = np.random.default_rng(0)
    drawn = [deployment(rng) for _ in range(120)]
    assert {one.gpu.id for one in drawn} == set(ACCELERATORS)
    assert {one.model.id for one in drawn} == set(MODELS)
    assert {one.precision.weight_bits for one in drawn} == {16, 8, 4.25}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("workloads", [None, pytest.param("traces", marks=pytest.mark.slow)])
def test_every_family_draws_runs_and_is_labelled(family: str, workloads: str | None) -> None:
    """From the traces where they are, and from their quantiles alone."""
    folder = None if workloads is None else shared_path("workloads")
    scenario = draw_from(family, 11, 60, folder)
    assert scenario.arrivals == draw_from(family, 11, 60, folder).arrivals
    assert scenario.arrivals != draw_from(family, 12, 60, folder).arrivals
    at = [spec.arrival_ns for spec in scenario.arrivals]
    assert at == sorted(at) and len(at) == 60
    truth = truth_of(scenario)
    rows = truth.rows()
    assert len(rows) == 60  # nothing is refused in a scenario: its rows would have no truth
    assert (rows["e2e_s"] >= rows["ttft_s"]).all()
    assert {"ttft", "tpot", "itl", "e2e"} == set(truth.windows)
    for window in truth.windows.values():
        assert window.cls is not None and window.cause is not None
        assert 0 <= window.margin_ratio <= 1


_DIGEST = """
import hashlib, sys
from pathlib import Path
from phasewise.instrumented_engine.truth.families import draw_from
from phasewise.instrumented_engine.truth.truth import truth_of
folder = Path(sys.argv[1]) if sys.argv[1] else None
told = hashlib.sha256()
for family in sys.argv[2].split(","):
    scenario = draw_from(family, 5, 60, folder)
    truth = truth_of(scenario)
    told.update(repr((scenario.arrivals, sorted(scenario.notes.items()))).encode())
    told.update(repr([(name, label.cls, label.cause, label.margin_ratio, label.by_cause) for name, label in truth.windows.items()]).encode())
    told.update(repr(truth.rows().to_dicts()).encode())
    told.update(repr(truth.levers).encode())
print(told.hexdigest())
"""


@pytest.mark.parametrize("workloads", [None, pytest.param("traces", marks=pytest.mark.slow)])
def test_the_same_seed_gives_the_same_labels_in_any_process(workloads: str | None) -> None:
    """To the last digit, whatever the order of sets is there, and in whatever order families were drawn before."""
    folder = "" if workloads is None else str(shared_path("workloads"))
    families = ["kv_pool", "rationed", "mixture", "context_stream"]
    told = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _DIGEST, folder, ",".join(families)]
        told.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(told) == 1
    draw_from("mixture", 5, 60, None)
    one, other = (truth_of(draw_from("kv_pool", 5, 60, None)) for _ in range(2))
    assert one.windows.keys() == other.windows.keys()
    assert one.rows().equals(other.rows())


def test_a_family_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="kv_pool"):
        draw("kv", 1)


@pytest.mark.slow
def test_families_give_many_causes_and_no_single_one_everywhere() -> None:
    """Labels come from effects: no family may be decided by its name alone, and the common causes must all occur."""
    missing: set[str | None] = {
        "prefill.compute", "interference", "decode.weights", "decode.kv", "host", "communication.node", "context", "external",
        "cold_start", "kv.wait", "queue.slots", "queue.budget", "queue.window", "queue.policy", "queue.empty_slots",
    }  # fmt: skip
    for seed, family in product(range(4), FAMILIES):
        truth = truth_of(draw(family, seed, 300))
        missing -= {window.cause for window in truth.windows.values() if window.dominant}
        if not missing:
            break
    assert missing == set()
