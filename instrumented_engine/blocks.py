"""The KV memory as equal blocks: who holds which, which hold a prefix that another prompt begins with, which are free.

A block is in one of three places: owned (by one sequence, or by several that share a prefix), cached (nobody's, but its content
can be found again by its hash) or unused. Only full blocks are shared, so that no shared block is ever written again.
Chained hashes: Kwon et al. 2023 (PagedAttention, arXiv 2309.06180) section 4.4, vLLM's automatic prefix caching.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from phasewise.instrumented_engine.eviction import eviction_order
from phasewise.instrumented_engine.sequence import Sequence

_HASH_BYTES = 16  # a prompt built to collide would be answered from another's cache: 64 bits are too few


def hash_blocks(tokens: Items[int], block_tokens: int, parent: int = 0) -> tuple[int, ...]:
    """One hash a full block, each covering the tokens of all blocks before it: equal hash = equal prefix.

    parent: the hash before the first block given, or a salt that keeps tenants' caches apart. The same in every process.
    """
    hashes = []
    layout = f"<{block_tokens}q"
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        content = struct.pack(layout, *tokens[start : start + block_tokens])
        digest = blake2b(parent.to_bytes(_HASH_BYTES, "little") + content, digest_size=_HASH_BYTES).digest()
        parent = int.from_bytes(digest, "little")
        hashes.append(parent)
    return tuple(hashes)


@dataclass(frozen=True, slots=True)
class Need:
    """What a sequence would take from the pool now. found: cached blocks of its prefix; fresh: further blocks; taken: how much
    `free_blocks` would fall; charged: by how much the use of its own pool share would rise."""

    found: list[int]
    fresh: int
    taken: int
    charged: int


class KvPool(Protocol):
    """Either layout. used_blocks have an owner; free_blocks have none, cached ones included, and can be had at once."""

    total_blocks: int
    block_tokens: int
    used_blocks: int
    share_used: list[int]  # by pool share: distinct blocks its sequences hold
    queried_tokens: int  # prompt tokens looked up in the prefix cache, at first admissions
    hit_tokens: int  # of those, found
    evicted_blocks: int

    @property
    def free_blocks(self) -> int: ...

    @property
    def cached_blocks(self) -> int: ...

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence holds when `tokens` of it are computed."""
        ...

    def need(self, sequence: Sequence, share: int = 0) -> Need:
        """For all its target tokens; changes nothing."""
        ...

    def can_allocate(self, need: Need, spare: int = 0) -> bool:
        """With `spare` blocks left over."""
        ...

    def allocate(self, sequence: Sequence, need: Need, share: int = 0) -> None:
        """Fills `blocks`, sets `computed_tokens` to what was found. Only after can_allocate said yes."""
        ...

    def can_extend(self) -> bool: ...

    def extend(self, sequence: Sequence, share: int = 0) -> None:
        """One more block at the end. Only after can_extend said yes."""
        ...

    def publish(self, sequence: Sequence, before: int, after: int) -> None:
        """Tokens `before`…`after` were computed: full blocks among them can be found from now on."""
        ...

    def publish_output(self, sequence: Sequence) -> None:
        """As publish, for generated tokens whose ids are known: a request that brings the conversation back finds them."""
        ...

    def release(self, sequence: Sequence, share: int = 0) -> None:
        """Gives all its blocks back; what can be found again stays cached."""
        ...

    def exclusive_blocks(self, sequence: Sequence) -> int:
        """Blocks that would be free if this sequence let go."""
        ...


class PagedPool:
    """Blocks anywhere, prefixes shared, cached blocks given up by `eviction` when unused ones run out."""

    def __init__(
        self, blocks: int, block_tokens: int, *, prefix_sharing: bool = True, eviction: str = "lru", shares: int = 1
    ) -> None:
        self.total_blocks = blocks
        self.block_tokens = block_tokens
        self.used_blocks = 0
        self.share_used = [0] * shares
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evicted_blocks = 0
        self._prefix_sharing = prefix_sharing
        self._unused = list(range(blocks - 1, -1, -1))
        self._cached = eviction_order(eviction)
        self._owners = [0] * blocks
        self._share_owners: list[dict[int, int]] | None = [{} for _ in range(shares)] if shares > 1 else None
        self._hash_of: list[int | None] = [None] * blocks
        self._by_hash: dict[int, int] = {}
        self._uses = [0] * blocks
        self._born = [0] * blocks
        self._births = 0

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def need(self, sequence: Sequence, share: int = 0) -> Need:
        total = self.blocks_for(sequence.target_tokens)
        found = self._found(sequence) if self._prefix_sharing else []
        fresh = total - len(found)
        owners = self._owners
        taken = fresh + sum(1 for block in found if not owners[block])
        if self._share_owners is None:
            return Need(found, fresh, taken, taken)
        held = self._share_owners[share]
        return Need(found, fresh, taken, fresh + sum(1 for block in found if block not in held))

    def _found(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest known prefix that leaves at least one token to compute: without it there are no logits."""
        found = []
        most = (sequence.target_tokens - 1) // self.block_tokens
        by_hash = self._by_hash
        for block_hash in sequence.block_hashes[:most]:
            block = by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, need: Need, spare: int = 0) -> bool:
        return need.taken + spare <= self.total_blocks - self.used_blocks

    def allocate(self, sequence: Sequence, need: Need, share: int = 0) -> None:
        owners = self._owners
        for block in need.found:
            if not owners[block]:
                self._cached.discard(block)
                self.used_blocks += 1
            owners[block] += 1
            self._uses[block] += 1
        blocks = need.found + [self._take() for _ in range(need.fresh)]
        sequence.blocks = blocks
        sequence.computed_tokens = len(need.found) * self.block_tokens
        if self._share_owners is not None:
            for block in blocks:
                self._charge(block, share)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens  # without sharing 0, and known to be
            if self._prefix_sharing:
                self.queried_tokens += sequence.target_tokens
                self.hit_tokens += sequence.computed_tokens

    def _take(self) -> int:
        """A block without content, owned once."""
        if self._unused:
            block = self._unused.pop()
        else:
            block = self._cached.pop()
            block_hash = self._hash_of[block]
            assert block_hash is not None
            del self._by_hash[block_hash]
            self._hash_of[block] = None
            self.evicted_blocks += 1
        self._owners[block] = 1
        self.used_blocks += 1
        return block

    def _charge(self, block: int, share: int) -> None:
        assert self._share_owners is not None
        held = self._share_owners[share]
        count = held.get(block, 0)
        held[block] = count + 1
        if not count:
            self.share_used[share] += 1

    def can_extend(self) -> bool:
        return self.used_blocks < self.total_blocks

    def extend(self, sequence: Sequence, share: int = 0) -> None:
        block = self._take()
        sequence.blocks.append(block)
        if self._share_owners is not None:
            self._charge(block, share)

    def publish(self, sequence: Sequence, before: int, after: int) -> None:
        if not self._prefix_sharing:
            return
        last = min(after // self.block_tokens, len(sequence.block_hashes))
        for position in range(before // self.block_tokens, last):
            block_hash = sequence.block_hashes[position]
            if block_hash in self._by_hash:  # computed twice at the same time: the first one serves those to come
                continue
            block = sequence.blocks[position]
            self._births += 1
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block
            self._uses[block] = 0
            self._born[block] = self._births

    def publish_output(self, sequence: Sequence) -> None:
        prompt, output = sequence.spec.prompt, sequence.output
        if prompt is None or not output or not self._prefix_sharing:
            return
        known = len(sequence.block_hashes)
        start, end = known * self.block_tokens, sequence.computed_tokens // self.block_tokens * self.block_tokens
        if end <= start:
            return
        tokens = prompt[start:] + tuple(output[max(0, start - len(prompt)) : end - len(prompt)])
        parent = sequence.block_hashes[-1] if known else 0
        sequence.block_hashes += hash_blocks(tokens, self.block_tokens, parent)
        self.publish(sequence, start, end)

    def release(self, sequence: Sequence, share: int = 0) -> None:
        owners = self._owners
        for block in reversed(sequence.blocks):  # the end of a prefix is of use only while its beginning is there
            if self._share_owners is not None:
                self._discharge(block, share)
            owners[block] -= 1
            if owners[block]:
                continue
            self.used_blocks -= 1
            if self._hash_of[block] is None:
                self._unused.append(block)
            else:
                self._cached.add(block, self._uses[block], self._born[block])
        sequence.blocks = []

    def _discharge(self, block: int, share: int) -> None:
        assert self._share_owners is not None
        held = self._share_owners[share]
        if held[block] == 1:
            del held[block]
            self.share_used[share] -= 1
        else:
            held[block] -= 1

    def exclusive_blocks(self, sequence: Sequence) -> int:
        owners = self._owners
        return sum(1 for block in sequence.blocks if owners[block] == 1)

    def owners(self, block: int) -> int:
        """Sequences that hold it."""
        return self._owners[block]
