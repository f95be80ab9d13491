"""Families in which a limit of the engine is plausible to decide, and mixtures. See `families`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phasewise.instrumented_engine.config import PoolShare, TenantShare
from phasewise.instrumented_engine.executors.time_law import kv_blocks_for
from phasewise.instrumented_engine.truth.lengths import prefixed_prompts
from phasewise.instrumented_engine.truth.machines import BLOCK_TOKENS, deployment
from phasewise.instrumented_engine.truth.plan import ANY, CHAT, MILD, Draw, Plan, mean_tokens, settings_for
from phasewise.instrumented_engine.truth.traffic import (
    Source,
    drawn_lengths,
    over_documents,
    prefixed,
    requests,
    skewed,
    with_context,
    with_tools,
)


def full_seats(at: Draw) -> Plan:
    """Too few seats, or contexts so long that no number of seats serves more: the limit against the capacity."""
    machine = deployment(at.rng, least_pool_tokens=400_000)
    if at.rng.random() < 0.5:
        name = at.one(*CHAT, "azure_code")
        specs, seats = at.specs(Source(name, 4_096, 300)), at.number(2, 4, 8, 16, 32)
    else:
        name = "4 shared documents, azure_conv questions"
        documents = np.exp(at.rng.uniform(np.log(10_000), np.log(30_000), 4)).astype(np.int64)
        questions = drawn_lengths(Source("azure_conv", 256, 384, shortest_output=96), at.rng, at.count, at.folder)
        specs, seats = prefixed(over_documents(at.rng, documents, questions), 32_768, 384), at.number(48, 96, 160)
    config = settings_for(machine, specs, max_num_seqs=seats, step_token_budget=at.number(2048, 8192, 16_384))
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*ANY, "azure_code"),
        load=at.between(0.75, 1.6),
        notes={"prompts": name, "seats": f"{seats}"},
    )


def kv_pool(at: Draw) -> Plan:
    """A KV pool smaller than what the seats would fill: a queue, but often one for memory."""
    kind = at.rng.random()
    if kind < 0.3:
        return _outgrown_pool(at)
    machine = deployment(at.rng)
    if kind < 0.65:
        name = "mooncake_conversation"
        specs = prefixed(prefixed_prompts(name, at.folder, at.rng, at.count), 16_384, 400)
    else:
        name = at.one(*CHAT)
        specs = at.specs(Source(name, 4_096, 500, shortest_output=64))
    seats = at.number(32, 64, 128)
    longest = max(spec.prompt_tokens + spec.max_output_tokens for spec in specs)
    wanted = at.between(0.15, 1.0) * seats * mean_tokens(specs)
    blocks = int(max(wanted, 1.25 * longest)) // BLOCK_TOKENS + 1
    layout = "contiguous" if at.rng.random() < 0.2 else "paged"
    if layout == "contiguous":
        blocks = max(blocks, 3 * (-(-longest // BLOCK_TOKENS)))
    config = settings_for(
        machine,
        specs,
        max_num_seqs=seats,
        kv_blocks=min(blocks, kv_blocks_for(machine, BLOCK_TOKENS)),
        kv_layout=layout,
        step_token_budget=at.number(2048, 8192),
    )
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*ANY),
        load=at.between(0.7, 1.25),
        notes={"prompts": name, "pool": f"{config.kv_blocks} blocks for {seats} seats, {layout}"},
    )


def _outgrown_pool(at: Draw) -> Plan:
    """Answers that outgrow the pool: preemptions, so that the gaps between tokens are a matter of memory too."""
    specs = at.specs(Source("deepseek_r1", 1_024, 1_600, shortest_output=400))
    machine = deployment(at.rng, models=("llama-3.1-8b", "llama-3.1-70b"))
    blocks = int(at.between(16, 48) * mean_tokens(specs)) // BLOCK_TOKENS
    config = settings_for(
        machine,
        specs,
        max_num_seqs=128,
        kv_blocks=min(blocks, kv_blocks_for(machine, BLOCK_TOKENS)),
        prefix_sharing=bool(at.rng.random() < 0.5),
    )
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.8, 1.1),
        notes={
            "prompts": "deepseek_r1, answers of 400 to 1,600 tokens",
            "pool": f"{config.kv_blocks} blocks for 128 seats",
        },
    )


def batch_forming(at: Draw) -> Plan:
    """Static batches, or a window before each batch: often empty seats or the window."""
    static = at.rng.random() < 0.5  # first, so that it does not depend on how many numbers the lengths draw
    name = at.one(*CHAT, "deepseek_r1")
    specs = at.specs(Source(name, 2_048, 500))
    machine = deployment(at.rng, least_pool_tokens=100_000)
    if static:
        seats = at.number(8, 16, 32)
        config = settings_for(machine, specs, batching="static", max_num_seqs=seats, step_token_budget=16_384)
        load, words = at.between(0.5, 1.2), f"static batches of {seats}"
    else:
        window_s = at.between(0.1, 2.0)
        config = settings_for(machine, specs, batching_window_s=window_s, max_num_seqs=at.number(32, 128))
        load, words = at.between(0.15, 0.6), f"a window of {window_s:.2f} s"
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=load,
        notes={"prompts": name, "batching": words},
    )


def rationed(at: Draw) -> Plan:
    """A tight step budget, or tenants, priorities and pools: often the budget or the policy, though seats look short."""
    if at.rng.random() < 0.4:
        return _small_budget(at)
    return _favoured(at)


def _small_budget(at: Draw) -> Plan:
    name = at.one("arxiv", "azure_code", "azure_conv")
    specs = at.specs(Source(name, 8_192, 120))
    machine = deployment(at.rng, least_pool_tokens=200_000)
    budget = at.number(128, 256, 512)
    config = settings_for(machine, specs, step_token_budget=budget, max_num_seqs=256)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*ANY),
        load=at.between(0.7, 1.3),
        notes={"prompts": name, "budget": f"{budget} tokens a step"},
    )


def _favoured(at: Draw) -> Plan:
    """Interactive requests and offline ones share an engine, under one of three rules."""
    name = at.one(*CHAT)
    rows = drawn_lengths(Source(name, 4_096, 300), at.rng, at.count, at.folder)
    offline = at.rng.random(at.count) < at.rng.uniform(0.3, 0.7)
    specs = tuple(
        replace(
            spec,
            request_class="offline" if late else "interactive",
            tenant="batch" if late else "chat",
            priority=1 if late else 0,
        )
        for spec, late in zip(requests(rows, 300), offline.tolist(), strict=True)
    )
    machine = deployment(at.rng, least_pool_tokens=200_000)
    seats = at.number(16, 32, 64)
    rule = at.one("priority", "fair", "pools", "pools")
    config = settings_for(machine, specs, max_num_seqs=seats)
    if rule == "priority":
        config = replace(config, order="priority", preempt_for_priority=bool(at.rng.random() < 0.4))
    elif rule == "fair":
        config = replace(config, order="fair", tenants={"chat": TenantShare(4.0), "batch": TenantShare(1.0)})
    else:
        share = at.rng.uniform(0.55, 0.9)
        pools = (
            PoolShare("interactive", ("interactive",), share, share, share),
            PoolShare("offline", ("offline",), 1 - share, 1 - share, 1 - share),
        )
        config = replace(config, pools=pools)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*ANY),
        # A pool too small for its class while the other idles needs no overload; an order decides little where nobody waits.
        load=at.between(0.45, 0.9) if rule == "pools" else at.between(0.7, 1.2),
        notes={"prompts": name, "rule": rule},
    )


def mixture(at: Draw) -> Plan:
    """Two or three things wrong at once, each mild enough that none need decide."""
    name = at.one(*CHAT, "azure_code")
    specs = at.specs(Source(name, 8_192, 300))
    host = at.between(1e-3, 8e-3)
    machine = deployment(at.rng, least_pool_tokens=100_000, host_step_s=host, devices=(1, 2, 4, 8))
    wrong = sorted(
        at.rng.choice(["context", "tools", "seats", "pool", "host", "cold", "window"], int(at.number(2, 3)), False)
    )
    settings: dict[str, object] = {}
    if "context" in wrong:
        specs = with_context(specs, skewed(at.rng, at.between(0.1, 1.0), 0.5, at.count))
    if "tools" in wrong:
        specs = with_tools(specs, at.rng, at.between(0.1, 0.5), at.between(0.2, 2.0), 0.2, 2)
    if "seats" in wrong:
        settings["max_num_seqs"] = at.number(8, 16, 32)
    if "window" in wrong:
        settings["batching_window_s"] = at.between(0.02, 0.3)
    if "pool" in wrong:
        seats = settings.get("max_num_seqs", 64)
        assert isinstance(seats, int)
        longest = max(spec.prompt_tokens + spec.max_output_tokens for spec in specs)
        wanted = max(at.between(0.2, 0.8) * seats * mean_tokens(specs), 1.25 * longest)
        settings["kv_blocks"] = min(int(wanted) // BLOCK_TOKENS + 1, kv_blocks_for(machine, BLOCK_TOKENS))
    if "host" in wrong:
        machine = replace(machine, async_scheduling=False)
    if "cold" in wrong:
        machine = replace(machine, cold_steps=100, cold_s=at.between(0.05, 0.5))
    return Plan(
        deployment=machine,
        config=settings_for(machine, specs, **settings),
        specs=specs,
        pattern=at.one(*ANY),
        load=at.between(0.5, 1.1),
        notes={"prompts": name, "wrong": ", ".join(wrong)},
    )
