"""KV memory: prefixes are shared, nothing is held twice or lost, and the right block is given up."""

from __future__ import annotations

import random
from hashlib import blake2b
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import make_spec

from phasewise.instrumented_engine.blocks import PagedPool, hash_blocks
from phasewise.instrumented_engine.contiguous import ContiguousPool
from phasewise.instrumented_engine.eviction import eviction_order
from phasewise.instrumented_engine.sequence import Sequence

P = 4


def sequence(tokens: tuple[int, ...]) -> Sequence:
    spec = make_spec(0, prompt_tokens=len(tokens), prompt=tokens, block_hashes=hash_blocks(tokens, P))
    return Sequence(spec)


def computed(pool: PagedPool, tokens: tuple[int, ...]) -> Sequence:
    """Admitted and its prompt run."""
    entering = sequence(tokens)
    need = pool.need(entering)
    assert pool.can_allocate(need)
    pool.allocate(entering, need)
    pool.publish(entering, entering.computed_tokens, len(tokens))
    entering.computed_tokens = len(tokens)
    return entering


def through(pool: PagedPool, tokens: tuple[int, ...]) -> None:
    pool.release(computed(pool, tokens))


def found(pool: PagedPool, tokens: tuple[int, ...]) -> int:
    """Tokens of this prompt that would not have to be computed."""
    return len(pool.need(sequence(tokens)).found) * P


def span(start: int, length: int) -> tuple[int, ...]:
    return tuple(range(start, start + length))


# --- hashes -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_equal_hash_means_equal_prefix(one: list[int], two: list[int], size: int) -> None:
    ours, theirs = hash_blocks(one, size), hash_blocks(two, size)
    assert len(ours) == len(one) // size
    for place in range(min(len(ours), len(theirs))):
        end = (place + 1) * size
        assert (ours[place] == theirs[place]) == (one[:end] == two[:end])


def test_hashes_continue_from_a_parent_and_a_salt_keeps_caches_apart() -> None:
    tokens = span(0, 16)
    whole = hash_blocks(tokens, P)
    assert hash_blocks(tokens[8:], P, parent=whole[1]) == whole[2:]
    assert not set(whole) & set(hash_blocks(tokens, P, parent=7))
    # The same in every process and on every machine: a stored workload may carry them.
    content = bytes(16) + b"".join(token.to_bytes(8, "little") for token in tokens[:P])
    assert whole[0] == int.from_bytes(blake2b(content, digest_size=16).digest(), "little")


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_a_prefix_is_shared_while_its_owner_runs_and_after() -> None:
    pool = PagedPool(16, P)
    first = computed(pool, span(0, 10))
    second = computed(pool, span(0, 8) + span(50, 5))
    assert second.blocks[:2] == first.blocks[:2] and second.cached_tokens == 8
    assert pool.used_blocks == 3 + 2 and pool.owners(first.blocks[0]) == 2
    pool.release(first)
    assert pool.owners(second.blocks[0]) == 1 and pool.used_blocks == 4
    pool.release(second)
    assert (pool.used_blocks, pool.free_blocks, pool.cached_blocks) == (0, 16, 3)
    assert found(pool, span(0, 10)) == 8
    assert (pool.queried_tokens, pool.hit_tokens) == (23, 8)


def test_one_token_is_always_computed() -> None:
    pool = PagedPool(16, P)
    through(pool, span(0, 8))
    assert found(pool, span(0, 8)) == 4
    assert found(pool, span(0, 9)) == 8


def test_what_is_not_computed_yet_cannot_be_found() -> None:
    pool = PagedPool(16, P)
    running = sequence(span(0, 12))
    pool.allocate(running, pool.need(running))
    assert found(pool, span(0, 12)) == 0
    pool.publish(running, 0, 6)  # a chunk that ends within a block
    assert found(pool, span(0, 12)) == 4
    pool.publish(running, 6, 12)
    assert found(pool, span(0, 13)) == 12


def test_computed_twice_at_the_same_time_is_kept_once() -> None:
    pool = PagedPool(16, P)
    twins = [sequence(span(0, 8)) for _ in range(2)]
    for twin in twins:
        pool.allocate(twin, pool.need(twin))
    for twin in twins:
        pool.publish(twin, 0, 8)
    assert not set(twins[0].blocks) & set(twins[1].blocks)
    for twin in twins:
        pool.release(twin)
    assert pool.cached_blocks == 2


def test_without_sharing_nothing_is_found_or_kept() -> None:
    pool = PagedPool(16, P, prefix_sharing=False)
    first = computed(pool, span(0, 8))
    assert first.cached_tokens == 0
    pool.release(first)
    assert (pool.cached_blocks, pool.queried_tokens, found(pool, span(0, 8))) == (0, 0, 0)


def test_a_share_is_charged_once_for_what_its_sequences_share() -> None:
    pool = PagedPool(16, P, shares=2)
    prompt = span(0, 9)
    held: list[tuple[Sequence, int]] = []
    for share in (0, 0, 1):
        entering = sequence(prompt)
        need = pool.need(entering, share)
        assert need.charged == (3, 1, 3)[len(held)]
        pool.allocate(entering, need, share)
        pool.publish(entering, 0, 9)
        held.append((entering, share))
    assert pool.share_used == [4, 3] and pool.used_blocks == 5
    for entering, share in held:
        pool.release(entering, share)
    assert pool.share_used == [0, 0] and pool.used_blocks == 0


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    pool = PagedPool(16, P)
    first = computed(pool, span(0, 6))
    pool.extend(first)
    first.output = [90, 91, 92, 93]
    first.computed_tokens = 9  # the last token's KV is never computed
    pool.publish_output(first)
    pool.release(first)
    assert found(pool, (*span(0, 6), 90, 91, 92, 93, 1, 2)) == 8
    assert found(pool, (*span(0, 6), 90, 99, 92, 93, 1, 2)) == 4


# --- eviction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eviction", "lost"), [("lru", 2), ("fifo", 0), ("lfu", 2)])
def test_the_block_given_up_follows_the_order(eviction: str, lost: int) -> None:
    """Prompt 0 came first and was used again, prompt 1 was used last, and one block is needed."""
    prompts = [span(100 * number, 5) for number in range(4)]
    pool = PagedPool(5, P, eviction=eviction)
    for number in (0, 1, 2, 0, 0, 1):
        through(pool, prompts[number])
    assert pool.cached_blocks == 3
    held = computed(pool, span(900, 12))
    assert pool.evicted_blocks == 1
    assert [number for number in range(3) if not found(pool, prompts[number])] == [lost]
    pool.release(held)


def test_lfu_gives_up_the_older_of_two_that_are_found_as_often() -> None:
    pool = PagedPool(5, P, eviction="lfu")
    for number in (0, 1, 2, 2):
        through(pool, span(100 * number, 5))
    computed(pool, span(900, 12))
    assert [number for number in range(3) if not found(pool, span(100 * number, 5))] == [0]


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_the_end_of_a_prefix_goes_before_its_beginning(eviction: str, lost: int) -> None:
    pool = PagedPool(5, P, eviction=eviction)
    through(pool, span(0, 17))
    assert pool.cached_blocks == 4
    computed(pool, span(1000, P * (lost + 1)))
    assert pool.evicted_blocks == lost and found(pool, span(0, 17)) == P * (4 - lost)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
def test_an_order_gives_each_block_once(eviction: str) -> None:
    order, drawn = eviction_order(eviction), random.Random(3)
    inside: set[int] = set()
    for turn in range(5000):
        block = drawn.randrange(50)
        if block in inside:
            order.discard(block)
            inside.remove(block)
        else:
            order.add(block, drawn.randrange(5), turn)
            inside.add(block)
        if turn % 7 == 0 and inside:
            given_up = order.pop()
            assert given_up in inside
            inside.remove(given_up)
        assert len(order) == len(inside)
    assert {order.pop() for _ in range(len(inside))} == inside


# --- conservation -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["lru", "lfu", "fifo"]), st.integers(1, 2))
def test_no_block_is_lost_or_in_two_places(seed: int, eviction: str, shares: int) -> None:
    drawn = random.Random(seed)
    pool = PagedPool(12, P, eviction=eviction, shares=shares)
    alive: list[tuple[Sequence, int]] = []
    for _ in range(120):
        act = drawn.random()
        if act < 0.5:
            tokens = tuple(drawn.choice((0, 0, 0, 1)) for _ in range(drawn.randrange(1, 20)))
            entering, share = sequence(tokens), drawn.randrange(shares)
            need = pool.need(entering, share)
            if pool.can_allocate(need):
                before = pool.free_blocks
                pool.allocate(entering, need, share)
                assert before - pool.free_blocks == need.taken
                if drawn.random() < 0.8:
                    pool.publish(entering, entering.computed_tokens, len(tokens))
                alive.append((entering, share))
        elif act < 0.6 and alive and pool.can_extend():
            entering, share = drawn.choice(alive)
            pool.extend(entering, share)
        elif alive:
            pool.release(*alive.pop(drawn.randrange(len(alive))))
        held = [block for entering, _ in alive for block in entering.blocks]
        assert all(pool.owners(block) == held.count(block) for block in range(12))
        assert pool.used_blocks == len(set(held)) and pool.free_blocks == 12 - pool.used_blocks
        for share in range(shares if shares > 1 else 0):
            mine = {block for entering, its in alive if its == share for block in entering.blocks}
            assert pool.share_used[share] == len(mine)
    for entering, share in alive:
        pool.release(entering, share)
    everything = Sequence(make_spec(0, prompt_tokens=12 * P))
    pool.allocate(everything, pool.need(everything))
    assert sorted(everything.blocks) == list(range(12)) and pool.cached_blocks == 0


# --- contiguous -------------------------------------------------------------------------------------------------------


def ranged(pool: ContiguousPool) -> Sequence | None:
    entering = Sequence(make_spec(0))
    need = pool.need(entering)
    if not pool.can_allocate(need):
        return None
    pool.allocate(entering, need)
    return entering


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_ranges_never_overlap_and_holes_join(seed: int, reserved: int) -> None:
    drawn = random.Random(seed)
    pool = ContiguousPool(40, P, reserved * P)
    alive: list[Sequence] = []
    for _ in range(80):
        if drawn.random() < 0.55:
            entering = ranged(pool)
            if entering is None:
                assert all(length < reserved for _, length in pool.holes)
            else:
                blocks = entering.blocks
                assert blocks == list(range(blocks[0], blocks[0] + reserved))
                alive.append(entering)
        elif alive:
            pool.release(alive.pop(drawn.randrange(len(alive))))
        held = [block for entering in alive for block in entering.blocks]
        assert len(set(held)) == len(held) == pool.used_blocks
        free = [block for start, length in pool.holes for block in range(start, start + length)]
        assert sorted(held + free) == list(range(40))
        assert all(a + length < b for (a, length), (b, _) in pairwise(pool.holes))


def test_first_fit_and_fragmentation() -> None:
    """Three ranges of 4 in 14 blocks: 2 are left over, and free blocks that do not touch serve nobody."""
    pool = ContiguousPool(14, P, 4 * P)
    held = [ranged(pool) for _ in range(3)]
    assert ranged(pool) is None and pool.free_blocks == 2
    first, middle, _ = held
    assert first is not None and middle is not None
    pool.release(middle)
    assert pool.holes == ((4, 4), (12, 2))
    again = ranged(pool)
    assert again is not None and again.blocks == [4, 5, 6, 7]
    pool.release(first)
    assert pool.free_blocks == 6 and pool.holes == ((0, 4), (12, 2))
    pool.release(first)  # twice changes nothing
    assert pool.free_blocks == 6


def test_a_contiguous_range_does_not_grow() -> None:
    pool = ContiguousPool(8, P, 8 * P)
    entering = ranged(pool)
    assert entering is not None and not pool.can_extend()
    with pytest.raises(AssertionError):
        pool.extend(entering)
