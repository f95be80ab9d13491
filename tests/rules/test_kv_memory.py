"""KV memory of requests and pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.rules.counting import Precision, kv_bytes_per_token
from phasewise.rules.kv_memory import (
    blocks_needed,
    kv_bytes,
    kv_pool_bytes,
    model_kv_pool_bytes,
    pool_blocks,
    resident_requests,
)
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
LLAMA_31_8B = RULES.models["llama-3.1-8b"]  # 32 layers, 8 KV heads of 128


def test_8000_tokens_of_32_layers_and_8_kv_heads() -> None:
    assert kv_bytes(LLAMA_31_8B, 8000) == 1.048576e9
    assert kv_bytes(LLAMA_31_8B, 8000, batch=16) == pytest.approx(16.78e9, rel=1e-3)


def test_llama_2_70b_store_of_eight_sequences() -> None:
    assert kv_bytes(RULES.models["llama-2-70b"], 4096, batch=8) == pytest.approx(10.737e9, rel=1e-4)


def test_pool_of_llama_3_8b_on_80_gb_comes_near_what_vllm_reports() -> None:
    pool = model_kv_pool_bytes(LLAMA_31_8B, Precision(), 80 * 2**30, 0.9, reserve_bytes=2.0e9)
    assert pool / 2**30 == pytest.approx(55.1, rel=0.02)


def test_nothing_is_left_when_weights_fill_the_device() -> None:
    assert kv_pool_bytes(24e9, 0.9, 30e9) == 0
    assert pool_blocks(0.0, 16, kv_bytes_per_token(LLAMA_31_8B)) == 0


def test_a_shared_prefix_counts_once() -> None:
    assert resident_requests(100, tokens_each=160, block_tokens=16) == 10
    assert resident_requests(100, tokens_each=160, block_tokens=16, shared_prefix_tokens=80) == 19
    assert resident_requests(100, tokens_each=160, block_tokens=16, shared_prefix_tokens=160) is None


def test_a_prefix_that_ends_inside_a_block_shares_whole_blocks_only() -> None:
    assert resident_requests(100, 160, 16, shared_prefix_tokens=95) == resident_requests(100, 160, 16, 80)


@given(st.integers(1, 10_000), st.integers(1, 256), st.integers(1, 4096))
def test_residents_fit_and_one_more_does_not(blocks: int, block_tokens: int, tokens: int) -> None:
    fitting = resident_requests(blocks, tokens, block_tokens)
    assert fitting is not None
    need = blocks_needed(tokens, block_tokens)
    assert fitting * need <= blocks < (fitting + 1) * need
