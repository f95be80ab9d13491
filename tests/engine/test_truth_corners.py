"""The real time law where one resource plainly binds: its cause must be the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from truth_laws import spec

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall
from phasewise.instrumented_engine.truth.direct import RESOURCES
from phasewise.instrumented_engine.truth.families import draw_from
from phasewise.instrumented_engine.truth.machines import rulebook
from phasewise.instrumented_engine.truth.truth import Truth, truth_from, truth_of


def truth(specs: list[RequestSpec], gpu: str, model: str, *, budget: int = 65_536, **settings: object) -> Truth:
    rules = rulebook()
    machine = Deployment(gpu=rules.gpus[gpu], model=rules.models[model], **settings)  # type: ignore[arg-type]
    config = EngineConfig(kv_blocks=200_000, step_token_budget=budget, max_model_tokens=65_536)
    found = truth_from(config, TimeLaw(machine), tuple(specs), seed=1)
    assert all((found.direct.of(name) >= 0).all() for name in RESOURCES)
    return found


def answer(found: Truth, metric: str) -> tuple[str | None, str | None, bool]:
    window = found.windows[metric]
    return window.cls, window.cause, window.dominant


def apart(count: int, prompt: int, output: int, seconds: float, **more: object) -> list[RequestSpec]:
    return [spec(k, k * seconds, prompt, output, **more) for k in range(count)]  # type: ignore[arg-type]


def test_steps_timed_again_take_what_they_took() -> None:
    """With noise, mixed steps and preemption: the direct rerun begins at the run itself."""
    scenario = draw_from("kv_pool", 3, 80, None)
    one = truth_of(scenario).run
    assert len(one.steps["start_ns"]) > 100 and one.noise.std() > 0
    again = one.law.seconds_of(one.steps) * one.noise
    assert again == pytest.approx(one.steps["duration_ns"] / 1e9, abs=1e-9)


def test_one_sequence_on_a_large_model_reads_weights() -> None:
    found = truth(apart(5, 32, 60, 60), "mi300x", "llama-3.1-70b")
    assert answer(found, "tpot") == ("bandwidth", "decode.weights", True)
    # 80 layers of 855.6 M weights and the head of 128,256 x 8,192, two bytes each, at 5.3 TB/s: 26.2 ms a token on the data sheet.
    sheet_s = 2 * (80 * 855_638_016 + 128_256 * 8_192) / 5.3e12
    saved_s = found.direct.token["weight_bytes"].sum(axis=0) / 59
    assert ((0.8 * sheet_s < saved_s) & (saved_s < 1.6 * sheet_s)).all()  # what is left is the compute that hid beneath


def test_a_short_question_to_a_cached_document_reads_kv() -> None:
    """The document of 120,000 tokens was computed by the first request; the others add eight tokens to it."""
    cached, new = 120_000, 8
    hashes = tuple(range(cached // 16))
    specs = [replace(one, block_hashes=hashes) for one in apart(6, cached + new, 1, 60)]
    rules = rulebook()
    machine = Deployment(gpu=rules.gpus["l40s"], model=rules.models["llama-3.2-1b"])
    config = EngineConfig(kv_blocks=20_000, step_token_budget=200_000, max_model_tokens=200_000)
    found = truth_from(config, TimeLaw(machine), tuple(specs), seed=1)
    rows = found.rows()
    assert rows["cause"].to_list() == ["prefill.compute"] + ["prefill.attention_io"] * 5
    assert rows["class"].to_list() == ["compute"] + ["bandwidth"] * 5
    # 16 layers, 8 heads of 64, K and V, two bytes: 32,768 a token, at 864 GB/s.
    sheet_s = (cached + new) * 16 * 8 * 64 * 2 * 2 / 864e9
    saved_s = found.effects["prefill.attention_io"][0, 1:]
    assert ((sheet_s < saved_s) & (saved_s < 3.5 * sheet_s)).all()  # a chunk of few rows reads at a third


def test_a_first_token_among_long_contexts_waits_for_their_kv() -> None:
    """What the contract calls KV bytes in prefill: those of the step, whoever's they are. A small prompt looks like the culprit."""
    decoding = [spec(k, 0, 12_000, 3_000) for k in range(40)]
    short = [spec(40 + k, 6 + 0.1 * k, 8, 2) for k in range(10)]
    found = truth([*decoding, *short], "h200-sxm", "llama-3.2-1b", budget=10**6, host_step_s=1e-4)
    first_s = {cause: values[0, 40:].sum() for cause, values in found.effects.items()}
    assert max(first_s, key=lambda cause: first_s[cause]) == "prefill.attention_io"
    assert first_s["prefill.attention_io"] > 0.5 * float(found.rows()["ttft_s"].to_numpy()[40:].sum())


def test_many_long_contexts_read_kv() -> None:
    specs = [spec(k, 0, 16_000, 200) for k in range(40)]
    assert answer(truth(specs, "h200-sxm", "llama-3.2-1b"), "tpot")[1] == "interference"  # of the prompts before it
    found = truth(specs, "h200-sxm", "llama-3.2-1b", budget=10**6)  # all prompts in one step: none left to interfere
    assert answer(found, "tpot") == ("bandwidth", "decode.kv", True)


def test_a_long_prompt_alone_computes() -> None:
    found = truth(apart(5, 30_000, 4, 600), "l40s", "llama-3.1-8b")
    assert answer(found, "ttft") == ("compute", "prefill.compute", True)


def test_many_sequences_with_little_context_compute() -> None:
    specs = [spec(k, 0, 2, 40) for k in range(2048)]
    rules = rulebook()
    machine = Deployment(gpu=rules.gpus["a100-sxm-80gb"], model=rules.models["llama-3.1-8b"], host_token_s=0.0)
    config = EngineConfig(kv_blocks=100_000, step_token_budget=8192, max_num_seqs=4096)
    found = truth_from(config, TimeLaw(machine), tuple(specs), seed=1)
    assert answer(found, "tpot") == ("compute", "decode.compute", True)


def test_a_slow_host_holds_a_tiny_model() -> None:
    found = truth(apart(5, 32, 60, 60), "h100-sxm", "qwen2.5-0.5b", host_step_s=0.02, async_scheduling=False)
    assert answer(found, "tpot") == ("host", "host", True)
    assert answer(found, "ttft") == ("host", "host", True)


def test_eight_devices_for_a_tiny_model_talk() -> None:
    specs = [spec(k, 0, 32, 60) for k in range(32)]
    found = truth(
        specs, "h100-sxm", "llama-3.2-1b", tensor_parallel_count=8, communication_slow_ratio=8.0, host_step_s=1e-4
    )
    assert answer(found, "tpot") == ("external", "communication.node", True)


def test_chats_beside_long_prompts_are_interfered_with() -> None:
    chats = [spec(k, 0, 100, 200) for k in range(8)]
    prompts = [spec(8 + k, 0.2 + 0.4 * k, 8_000, 2) for k in range(10)]
    found = truth([*chats, *prompts], "l40s", "llama-3.1-8b")
    rows = found.rows().filter(found.rows()["output_tokens"] == 200)
    assert set(rows["cause"]) == {"interference"}
    # Lone prompts of the same length are their own compute: the two look alike in TTFT alone.
    assert answer(truth(apart(5, 8_000, 2, 60), "l40s", "llama-3.1-8b"), "ttft")[1] == "prefill.compute"


def test_a_delay_before_the_queue_is_context() -> None:
    found = truth(apart(5, 200, 20, 60, context_s=2.0), "h100-sxm", "llama-3.1-8b")
    assert answer(found, "ttft") == ("context", "context", True)
    assert answer(found, "tpot")[1] == "decode.weights"


def test_a_tool_inside_the_stream_is_external() -> None:
    found = truth(apart(5, 200, 20, 60, tools=(ToolCall(5, 3 * 10**9),)), "h100-sxm", "llama-3.1-8b")
    assert answer(found, "e2e") == ("external", "external", True)
    assert found.windows["tpot"].cls == "bandwidth"
    assert found.levers["external"].e2e_mean_s == pytest.approx(found.levers["factual"].e2e_mean_s - 3.0, abs=0.02)


def test_a_replica_that_has_just_started_is_cold() -> None:
    found = truth(apart(10, 200, 20, 0.3), "h100-sxm", "llama-3.1-8b", cold_steps=60, cold_s=0.5)
    assert answer(found, "e2e") == ("host", "cold_start", True)
