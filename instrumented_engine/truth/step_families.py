"""Families in which the time of steps, or time beside them, is plausible to decide. See `families`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phasewise.instrumented_engine.truth.machines import deployment
from phasewise.instrumented_engine.truth.plan import ANY, CHAT, MILD, Draw, Plan, settings_for
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


def prompt_compute(at: Draw) -> Plan:
    """Long prompts and short answers under little load: often the prompt's own compute, sometimes others' prompts."""
    name = at.one("azure_code", "arxiv", "mooncake_synthetic")
    specs = at.specs(Source(name, 32_768, 24, shortest_prompt=512))
    machine = deployment(at.rng, accelerators=("l40s", "a100-sxm-80gb", "h100-sxm", "mi300x"), devices=(1, 2, 4))
    config = settings_for(machine, specs, step_token_budget=at.number(4096, 8192, 16_384), prefix_sharing=False)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.03, 0.3),
        notes={"prompts": name},
    )


def weight_stream(at: Draw) -> Plan:
    """Sequences decode on a large model. Few of them: often its weights, sometimes the host. A crowd of them on weights of 4 bits:
    often compute, though decoding is known to wait for weights."""
    if at.rng.random() < 0.4:
        return _crowd(at)
    name = at.one(*CHAT, "deepseek_r1")
    specs = at.specs(Source(name, 2_048, 400, shortest_output=16))
    machine = deployment(
        at.rng, models=("llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b"), host_step_s=at.between(4e-4, 3e-3)
    )
    config = settings_for(machine, specs)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        concurrency=at.between(0.5, 8),
        notes={"prompts": name},
    )


def _crowd(at: Draw) -> Plan:
    """4-bit weights put the ridge at a quarter of the batch; short prompts and long answers leave few prompts to interfere."""
    specs = at.specs(Source("deepseek_r1", 256, 700, shortest_output=64))
    machine = deployment(at.rng, models=("llama-3.1-70b",), least_pool_tokens=200_000, weight_bits=4.25)
    return Plan(
        deployment=machine,
        config=settings_for(machine, specs, max_num_seqs=384),
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.8, 1.8),  # of what 96 at once give
        notes={"prompts": "deepseek_r1, up to 384 at once"},
    )


def context_stream(at: Draw) -> Plan:
    """Long contexts, of shared documents or of long answers: often KV bytes, in the first token too, where it looks like prefill;
    sometimes the wait for tokens or seats."""
    if at.rng.random() < 0.4:
        return _long_answers(at)
    machine = deployment(at.rng, models=("llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b"), least_pool_tokens=200_000)
    documents = np.exp(at.rng.uniform(np.log(6_000), np.log(30_000), 12)).astype(np.int64)
    questions = drawn_lengths(Source("azure_conv", 512, 512, shortest_output=128), at.rng, at.count, at.folder)
    specs = prefixed(over_documents(at.rng, documents, questions), 32_768, 512)
    config = settings_for(machine, specs, max_num_seqs=at.number(32, 64, 128))
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.4, 0.9),
        notes={"prompts": "12 shared documents of 6k to 30k tokens, azure_conv questions"},
    )


def _long_answers(at: Draw) -> Plan:
    """Contexts that grow by answering: no prompts to speak of, so also the first token waits for others' KV."""
    specs = at.specs(Source("deepseek_r1", 512, 2_500, shortest_output=300))
    machine = deployment(
        at.rng, models=("llama-3.2-1b", "llama-3.1-8b"), least_pool_tokens=200_000, host_step_s=at.between(2e-4, 6e-4)
    )
    return Plan(
        deployment=machine,
        config=settings_for(machine, specs, max_num_seqs=256),
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.9, 1.7),  # of what 96 at once give
        notes={"prompts": "deepseek_r1, answers of 300 to 2,500 tokens"},
    )


def launch_bound(at: Draw) -> Plan:
    """A small model without graphs on a slow host: often the host, though the steps look bound by bandwidth."""
    name = at.one("servegen_small", "servegen_large", "azure_conv")
    specs = at.specs(Source(name, 2_048, 300, shortest_output=8))
    machine = deployment(
        at.rng,
        models=("llama-3.2-1b", "llama-3.1-8b"),
        accelerators=("a100-sxm-80gb", "h100-sxm", "h200-sxm", "mi300x"),
        cuda_graphs=bool(at.rng.random() < 0.3),
        launch_s=at.between(5e-6, 1.5e-5),
        async_scheduling=False,
        host_step_s=at.between(1.5e-3, 8e-3),
        host_token_s=at.between(8e-6, 6e-5),
    )
    config = settings_for(machine, specs)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.1, 0.7),
        notes={"prompts": name},
    )


def split_small(at: Draw) -> Plan:
    """Many devices for a model that needs few: often collectives, though the steps look bound by bandwidth."""
    name = at.one(*CHAT)
    specs = at.specs(Source(name, 2_048, 400, shortest_output=16))
    machine = deployment(
        at.rng,
        models=("llama-3.1-8b", "qwen3-30b-a3b"),
        devices=(at.number(4, 8),),
        communication_slow_ratio=at.between(2, 8),
        host_step_s=at.between(2e-4, 8e-4),
    )
    config = settings_for(machine, specs)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.05, 0.5),
        notes={"prompts": name},
    )


def prompt_interference(at: Draw) -> Plan:
    """Chats decode beside long prompts of others: often interference, though it looks like compute."""
    chats = drawn_lengths(Source("azure_conv", 1_024, 400, shortest_output=50), at.rng, at.count, at.folder)
    long = drawn_lengths(
        Source("mooncake_conversation", 32_768, 24, shortest_prompt=6_000), at.rng, at.count, at.folder
    )
    share = at.between(0.03, 0.25)
    rows = np.where(at.rng.random(at.count)[:, None] < share, long, chats)
    specs = requests(rows, 400)
    machine = deployment(at.rng)
    config = settings_for(
        machine, specs, step_token_budget=at.number(2048, 8192, 16_384), prefix_sharing=False, max_num_seqs=256
    )
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*ANY),
        load=at.between(0.35, 0.8),
        notes={"prompts": f"azure_conv, {share:.0%} of mooncake_conversation from 6,000 tokens on"},
    )


def slow_context(at: Draw) -> Plan:
    """Retrieval before the queue: often context, though TTFT is all a user sees and prefill is what it suggests."""
    name = at.one("azure_conv", "azure_code", "arxiv")
    specs = at.specs(Source(name, 8_192, 300, shortest_output=8))
    machine = deployment(at.rng)
    mean_s = at.between(0.15, 4.0)
    specs = with_context(specs, skewed(at.rng, mean_s, at.between(0.2, 0.9), at.count))
    config = settings_for(machine, specs)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.04, 0.6),
        notes={"prompts": name, "context": f"{mean_s:.2f} s on average"},
    )


def tool_calls(at: Draw) -> Plan:
    """Tools before and inside the stream: often external, though it looks like slow decoding."""
    name = at.one(*CHAT, "deepseek_r1")
    specs = at.specs(Source(name, 4_096, 400, shortest_output=8))
    mean_s = at.between(0.3, 6.0)
    specs = with_tools(specs, at.rng, at.between(0.15, 0.9), mean_s, at.rng.uniform(0, 0.4), 3)
    machine = deployment(at.rng)
    config = settings_for(machine, specs)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*ANY),
        load=at.between(0.04, 0.6),
        notes={"prompts": name, "tools": f"{mean_s:.2f} s a call on average"},
    )


def cold_start(at: Draw) -> Plan:
    """A replica that has just started: its first steps are slow, and what waits meanwhile looks like a queue."""
    name = at.one(*CHAT, "azure_code")
    specs = at.specs(Source(name, 4_096, 300))
    steps, extra_s = at.number(60, 120, 200), at.between(0.1, 1.0)
    machine = deployment(at.rng)
    config = settings_for(machine, specs)
    machine = replace(machine, cold_steps=steps, cold_s=extra_s)
    return Plan(
        deployment=machine,
        config=config,
        specs=specs,
        pattern=at.one(*MILD),
        load=at.between(0.1, 0.6),
        notes={"prompts": name, "cold": f"{extra_s:.2f} s on the first step, falling over {steps}"},
    )
