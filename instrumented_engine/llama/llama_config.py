"""The shape of a Llama-family decoder, read from a Hugging Face `config.json` or taken from `rules/models`. No torch.

Only what this engine computes exactly is accepted; a model with biases, sliding windows, experts or another rotary scaling is
refused by name, because it would run and answer nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phasewise.rules.errors import InputError
from phasewise.rules.schema import Model, Source

RopeKind = Literal["linear", "llama3", "factors"]
_SUPPORTED = "Llama-family models without biases, windows or experts run here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies differ from theta^(-2i/D).

    linear: all divided by `factor`. llama3: long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1,
    section 3.2 of arXiv 2407.21783 and its reference code). factors: each divided by its own number, as GGUF stores them.
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes in elements. heads: of queries (H); kv_heads: K, a divisor of H; ffn: width of the MLP; tied: LM head = embedding."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_context_tokens: int = 8192
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        """Raises InputError naming the size."""
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_context_tokens"):
            if getattr(self, name) < 1:
                raise InputError("model shape", name, f"{getattr(self, name)} is below 1", "give a positive number")
        if self.heads % self.kv_heads:
            raise InputError("model shape", "kv_heads", f"{self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % 2:
            raise InputError("model shape", "head_dim", f"{self.head_dim} is odd, rotary embedding needs pairs")
        factors = self.rope_scaling.factors if self.rope_scaling else ()
        if factors and len(factors) != self.head_dim // 2:
            raise InputError("model shape", "rope_scaling", f"{len(factors)} factors for head_dim {self.head_dim}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, value_bytes: int) -> int:
        """Of all layers, K and V."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes

    @property
    def parameters(self) -> int:
        """Elements of all matrices and norms."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * layer + self.hidden + tables

    def as_model(self, name: str, dtype: str) -> Model:
        """The same shape for `rules/counting.py` and the time law."""
        return Model(
            id=name, name=name, layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, ffn=self.ffn, vocab=self.vocab, gated=True, tied=self.tied, params=self.parameters,
            native_dtype=dtype, sources=(Source("configuration of the loaded model", ""),),
            max_context_tokens=self.max_context_tokens,
        )  # fmt: skip

    @classmethod
    def of(cls, model: Model, *, rope_theta: float = 500_000.0) -> LlamaConfig:
        """Shape of `rules/models` for random weights. Raises InputError for what is no plain gated decoder."""
        if model.moe or model.mla or model.sliding_window or not model.gated:
            raise InputError(model.id, "", "has experts, latent attention, a window or an ungated MLP", _SUPPORTED)
        return cls(
            vocab=model.vocab, hidden=model.hidden, layers=model.layers, heads=model.heads, kv_heads=model.kv_heads,
            head_dim=model.head_dim, ffn=model.ffn, max_context_tokens=model.max_context_tokens or 8192,
            rope_theta=rope_theta, tied=model.tied,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, document: Mapping[str, Any], source: Path | str) -> LlamaConfig:
        """From a parsed `config.json`. Raises InputError naming the key."""
        _refuse_unsupported(document, source)
        heads = _whole(document, "num_attention_heads", source)
        hidden = _whole(document, "hidden_size", source)
        rope = _mapping(document, "rope_parameters", source)  # newer files keep theta and scaling together
        theta = rope.get("rope_theta", document.get("rope_theta", 10_000.0))
        scaling = rope or _mapping(document, "rope_scaling", source)
        return cls(
            vocab=_whole(document, "vocab_size", source),
            hidden=hidden,
            layers=_whole(document, "num_hidden_layers", source),
            heads=heads,
            kv_heads=_whole(document, "num_key_value_heads", source, heads),
            head_dim=_whole(document, "head_dim", source, hidden // max(heads, 1)),
            ffn=_whole(document, "intermediate_size", source),
            max_context_tokens=_whole(document, "max_position_embeddings", source, 2048),
            rms_eps=_number(document, "rms_norm_eps", source, 1e-6),
            rope_theta=_number({"rope_theta": theta}, "rope_theta", source),
            rope_scaling=_scaling(scaling, source),
            tied=bool(document.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that from_hf reads back equal."""
        document: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": self.vocab,
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.ffn,
            "max_position_embeddings": self.max_context_tokens, "rms_norm_eps": self.rms_eps, "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied, "attention_bias": False, "mlp_bias": False,
        }  # fmt: skip
        if (scaling := self.rope_scaling) is not None:
            document["rope_scaling"] = {
                "rope_type": scaling.kind, "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor, "factors": list(scaling.factors),
                "original_max_position_embeddings": scaling.original_max_tokens,
            }  # fmt: skip
        return document


def _refuse_unsupported(document: Mapping[str, Any], source: Path | str) -> None:
    kind = document.get("model_type")
    if kind not in ("llama", "mistral"):
        raise InputError(source, "model_type", f"{kind!r} is not supported", _SUPPORTED)
    if (activation := document.get("hidden_act", "silu")) != "silu":
        raise InputError(source, "hidden_act", f"{activation!r} is not supported", _SUPPORTED)
    for key in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        if document.get(key):
            raise InputError(source, key, f"{document[key]!r} is not supported", _SUPPORTED)


def _scaling(document: Mapping[str, Any], source: Path | str) -> RopeScaling | None:
    kind = document.get("rope_type", document.get("type", "default"))
    if not document or kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(document, "factor", source))
    if kind == "factors":
        return RopeScaling(kind="factors", factors=tuple(float(value) for value in document["factors"]))
    if kind != "llama3":
        raise InputError(source, "rope_scaling", f"{kind!r} is not supported", "default, linear and llama3 are")
    return RopeScaling(
        kind="llama3",
        factor=_number(document, "factor", source),
        low_freq_factor=_number(document, "low_freq_factor", source),
        high_freq_factor=_number(document, "high_freq_factor", source),
        original_max_tokens=_whole(document, "original_max_position_embeddings", source),
    )


def _mapping(document: Mapping[str, Any], key: str, source: Path | str) -> Mapping[str, Any]:
    value = document.get(key) or {}
    if not isinstance(value, Mapping):
        raise InputError(source, key, f"{value!r} is not an object")
    return value


def _number(document: Mapping[str, Any], key: str, source: Path | str, default: float | None = None) -> float:
    value = document.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(source, key, "is missing" if value is None else f"{value!r} is not a number")
    return float(value)


def _whole(document: Mapping[str, Any], key: str, source: Path | str, default: int | None = None) -> int:
    value = _number(document, key, source, default)
    if value != int(value):
        raise InputError(source, key, f"{value!r} is not a whole number")
    return int(value)
