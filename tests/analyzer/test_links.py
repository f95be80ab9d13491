"""Slow links, told from what prompts take beyond their kernels."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.analyzer.kernel_times import KernelTimes, kernel_times
from phasewise.analyzer.links import divided, links_of
from phasewise.analyzer.machine import Machine
from phasewise.rules.counting import Precision
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
TOKENS = np.linspace(100.0, 4000.0, 80)
ALONE = np.ones(len(TOKENS), dtype=np.bool_)


def kernels(devices: int) -> KernelTimes:
    built = Machine(RULES.models["llama-3.1-8b"], RULES.gpus["l40s"], Precision(weight_bits=16.0), "bf16", devices)
    found = kernel_times(built)
    assert found is not None
    return found


@pytest.mark.parametrize("slow_ratio", [2.0, 5.0])
def test_what_grows_with_the_tokens_beyond_the_kernels_are_slow_links(slow_ratio: float) -> None:
    own = kernels(4)
    parts = own.linear(TOKENS, np.ones_like(TOKENS))
    found = links_of(own, TOKENS, parts.total + (slow_ratio - 1) * parts.links + 0.005, ALONE)
    assert found.slow_ratio == pytest.approx(slow_ratio, rel=0.02)
    share = found.share(TOKENS)
    assert share == pytest.approx(slow_ratio * parts.links / (parts.total + (slow_ratio - 1) * parts.links), rel=0.02)


def test_a_constant_of_each_prompt_is_not_the_links() -> None:
    own = kernels(4)
    assert links_of(own, TOKENS, own.linear(TOKENS, np.ones_like(TOKENS)).total + 0.05, ALONE).slow_ratio == 1.0


def test_one_device_has_no_links() -> None:
    own = kernels(1)
    found = links_of(own, TOKENS, 3 * own.linear(TOKENS, np.ones_like(TOKENS)).total, ALONE)
    assert found.slow_ratio == 1.0
    assert not found.share(TOKENS).any()


def test_the_links_share_of_others_prompts_is_divided_between_both() -> None:
    assert [one.tolist() for one in divided(np.array([2.0]), np.array([0.5]), others=True)] == [[1.5], [0.5]]
    assert [one.tolist() for one in divided(np.array([2.0]), np.array([0.5]), others=False)] == [[1.0], [1.0]]
