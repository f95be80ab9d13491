"""config.json in, a shape out; what this engine would compute wrongly is refused by name. Needs no torch."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.instrumented_engine.llama.llama_config import LlamaConfig, RopeScaling
from phasewise.rules.errors import InputError

PUBLISHED: dict[str, Any] = {  # Llama 3.2 1B
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip


def read(**changes: object) -> LlamaConfig:
    document = {key: value for key, value in {**PUBLISHED, **changes}.items() if value is not ...}
    return LlamaConfig.from_hf(document, "config.json")


def test_published_file() -> None:
    config = read()
    assert (config.layers, config.heads, config.kv_heads, config.group, config.tied) == (16, 32, 8, 4, True)
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=32, low_freq_factor=1, high_freq_factor=4, original_max_tokens=8192
    )
    assert config.kv_bytes_per_token(2) == 2 * 16 * 8 * 64 * 2
    assert config.parameters == 1_235_814_400


def test_defaults_of_older_files() -> None:
    config = read(head_dim=..., num_key_value_heads=..., rope_scaling=None, rope_theta=..., tie_word_embeddings=...)
    assert (config.head_dim, config.kv_heads, config.rope_theta, config.tied) == (64, 32, 10_000.0, False)
    assert config.rope_scaling is None


def test_newer_files_keep_theta_beside_the_scaling() -> None:
    together = {**PUBLISHED["rope_scaling"], "rope_theta": 250_000.0}
    config = read(rope_theta=..., rope_scaling=..., rope_parameters=together)
    assert config.rope_theta == 250_000.0
    assert config.rope_scaling == read().rope_scaling
    assert read(rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_scaling is None


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=2.0),
        RopeScaling(kind="llama3", factor=8.0, original_max_tokens=100),
        RopeScaling(kind="factors", factors=(1.0,) * 32),
    ],
)
def test_what_is_written_is_read_back(scaling: RopeScaling | None) -> None:
    document = {**read().to_hf(), "rope_scaling": None}
    config = LlamaConfig.from_hf(document, "x")
    changed = LlamaConfig(**{name: getattr(config, name) for name in config.__slots__} | {"rope_scaling": scaling})
    again = LlamaConfig.from_hf(changed.to_hf(), "x")
    assert again.to_hf() == changed.to_hf()
    assert (again.rope_scaling is None) == (scaling is None)
    if scaling is not None and again.rope_scaling is not None:
        assert (again.rope_scaling.kind, again.rope_scaling.factors) == (scaling.kind, scaling.factors)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: 4096"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_scaling": "yes"}, "rope_scaling"),
        ({"hidden_size": ...}, "hidden_size: is missing"),
        ({"vocab_size": "many"}, "vocab_size: 'many'"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers: 1.5"),
        ({"num_key_value_heads": 5}, "5 does not divide"),
        ({"num_attention_heads": 0}, "heads"),
        ({"head_dim": 63}, "63 is odd"),
    ],
)  # fmt: skip
def test_what_it_would_compute_wrongly_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        read(**changes)
