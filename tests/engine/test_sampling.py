"""Drawing tokens: the distribution is the one asked for, and a seed fixes the draw whatever the batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_runs import request

from phasewise.instrumented_engine.llama.sampling import choose, draw, uniform
from phasewise.instrumented_engine.sequence import Sequence

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0])


def asked(position: int = 0, **changes: object) -> Sequence:
    sequence = Sequence(request("r", (1, 2), 9, **changes))
    sequence.output_tokens = position
    return sequence


def many(count: int, **changes: object) -> Counter[int]:
    sequences = [asked(position, **changes) for position in range(count)]
    return Counter(choose(LOGITS.repeat(count, 1), sequences, engine_seed=0))


def test_temperature_0_is_greedy() -> None:
    assert many(20) == Counter({4: 20})


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    count = 20_000
    found = many(count, temperature=temperature, seed=7)
    for token, share in enumerate((LOGITS / temperature).softmax(-1).tolist()):
        assert abs(found[token] / count - share) < 4 * math.sqrt(share * (1 - share) / count), token


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    """Shares are 0.64, 0.23, 0.09, 0.03, 0.01: the two likeliest hold 0.7, and are drawn in proportion."""
    found = many(20_000, temperature=1.0, top_p=0.7, seed=7)
    assert set(found) == {4, 0}
    assert found[0] / found[4] == pytest.approx(math.exp(-1), rel=0.05)
    assert set(many(200, temperature=1.0, top_p=0.0, seed=7)) == {4}


def test_a_seed_fixes_the_draw_whatever_else_is_in_the_batch() -> None:
    mine = {"temperature": 1.5, "seed": 11}
    alone = [choose(LOGITS[None], [asked(position, **mine)], 0)[0] for position in range(60)]
    crowd = [
        choose(LOGITS.repeat(3, 1), [asked(0), asked(position, **mine), asked(3, temperature=1.0)], 5)[1]
        for position in range(60)
    ]
    assert alone == crowd
    assert len(set(alone)) > 2
    assert alone != [choose(LOGITS[None], [asked(position, temperature=1.5, seed=12)], 0)[0] for position in range(60)]


def test_without_a_seed_the_engine_and_the_request_decide() -> None:
    draws = {
        (engine, name): [uniform(Sequence(request(name, (1,), 9)), engine)] for engine in (0, 1) for name in ("a", "b")
    }
    assert len({value for (value,) in draws.values()}) == 4


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=40), st.floats(0.01, 5), st.floats(1e-9, 1),
    st.floats(0, 1, exclude_max=True),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_draw_is_always_a_token_of_the_kept_set(
    logits: list[float], temperature: float, top_p: float, chance: float
) -> None:
    values = torch.tensor([logits], dtype=torch.float64)
    one = [torch.tensor([value], dtype=torch.float64) for value in (temperature, top_p, chance)]
    token = int(draw(values, *one))
    shares = (values[0] / temperature).softmax(-1)
    likelier = float(shares[shares > shares[token]].sum())
    assert likelier < top_p or likelier == pytest.approx(top_p)
