"""Random settings and random traffic for the scheduler's properties (Hypothesis strategies)."""

from __future__ import annotations

from hypothesis import strategies as st
from scheduling import MS, VOCABULARY, make_config, make_spec, prompted

from phasewise.instrumented_engine.config import EngineConfig, PoolShare, TenantShare
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall

MAX_TOKENS = 64
TENANTS = (None, "a", "b")
CLASSES = (None, "interactive", "offline")


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """All techniques in all combinations, small enough that everything runs short."""
    chunked = draw(st.booleans())
    slots = draw(st.integers(1, 8))
    tenants = draw(
        st.sampled_from(
            [{}, {"a": TenantShare(weight=3.0)}, {"a": TenantShare(reserved_slots=1)}] if slots > 1 else [{}]
        )
    )
    pools: tuple[PoolShare, ...] = ()
    if slots >= 4 and chunked and draw(st.booleans()):
        lends = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
        pools = (
            PoolShare("interactive", ("interactive",), 0.5, 0.5, 0.5, lends[0]),
            PoolShare("offline", ("offline",), 0.25, 0.25, 0.25, lends[1]),
        )
    return make_config(
        batching=draw(st.sampled_from(["continuous", "continuous", "static"])),
        max_num_seqs=slots,
        step_token_budget=draw(st.integers(3, 80)) if chunked and not pools else draw(st.integers(MAX_TOKENS, 120)),
        chunked_prefill=chunked,
        prefill_chunk_tokens=draw(st.none() | st.integers(1, 30)),
        max_prefill_tokens=draw(st.none() | st.integers(1, 70)),
        batching_window_s=draw(st.sampled_from([0.0, 0.0, 0.02])),
        order=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        preempt_for_priority=draw(st.booleans()),
        tenants=tenants,
        pools=pools,
        kv_layout=draw(st.sampled_from(["paged", "paged", "paged", "contiguous"])),
        kv_blocks=draw(st.integers(16, 40)) if not pools else draw(st.integers(34, 70)),
        prefix_sharing=draw(st.booleans()),
        eviction=draw(st.sampled_from(["lru", "lfu", "fifo"])),
        max_model_tokens=MAX_TOKENS,
    )


@st.composite
def requests(draw: st.DrawFn, most: int = 20, real: bool = False) -> list[RequestSpec]:
    """Lengths, gaps, priorities, tenants, classes. real: with token ids, many beginning alike, some continuing another."""
    stems = [tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=20, max_size=20))) for _ in range(2)]
    found = []
    at_ns = 0
    for number in range(draw(st.integers(1, most))):
        at_ns += draw(st.sampled_from([0, 0, 1, 3 * MS, 20 * MS]))
        output = draw(st.integers(1, 24))
        spec = make_spec(
            number,
            arrival_ns=at_ns,
            prompt_tokens=draw(st.integers(1, MAX_TOKENS - output)),
            max_output_tokens=output,
            stop_after_tokens=draw(st.none() | st.integers(1, 24)),
            priority=draw(st.integers(0, 2)),
            tenant=draw(st.sampled_from(TENANTS)),
            request_class=draw(st.sampled_from(CLASSES)),
            tools=tuple(
                ToolCall(after, length * MS)
                for after, length in sorted(
                    draw(st.dictionaries(st.integers(1, 24), st.integers(1, 60), max_size=2)).items()
                )
            ),
        )
        if real:
            stem = draw(st.sampled_from(stems))[: spec.prompt_tokens]
            own = draw(st.lists(st.integers(0, 3), max_size=max(0, spec.prompt_tokens - len(stem))))
            stops = draw(st.sampled_from([(), (7,), tuple(range(10))]))
            spec = prompted(spec, stem + tuple(own))
            spec = make_spec(
                number, arrival_ns=at_ns, prompt_tokens=spec.prompt_tokens, prompt=spec.prompt, stop_token_ids=stops,
                max_output_tokens=output, priority=spec.priority, tenant=spec.tenant, request_class=spec.request_class,
                tools=spec.tools,
            )  # fmt: skip
        found.append(spec)
    return found


def cancels() -> st.SearchStrategy[list[tuple[int, str]]]:
    """When, and whom; also of requests that are not there, or have ended."""
    return st.lists(
        st.tuples(st.integers(0, 300 * MS), st.integers(0, 19).map(lambda number: f"r{number}")), max_size=5
    )
