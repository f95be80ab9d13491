"""What the engine's settings say of model, precision and machine; everything not said is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from phasewise.collector.context import Setting
from phasewise.rules.counting import Precision
from phasewise.rules.load import Rulebook
from phasewise.rules.schema import DTYPE_BITS, Gpu, Model

_DTYPE_NAMES = {
    "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
    "awq": "int4", "gptq": "int4", "compressed-tensors": "int8", "nvfp4": "fp4", "mxfp4": "fp4", "w4a16": "int4",
    "w8a8": "int8", "int8": "int8", "fp8": "fp8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """gpu: None for an accelerator nobody named; devices: tensor-parallel degree the weights are divided by."""

    model: Model | None
    gpu: Gpu | None
    precision: Precision
    dtype: str
    devices: int


def dtype_name(text: object) -> str | None:
    """One of rules.schema.DTYPE_BITS for an engine's word; None for `auto` and unknown words."""
    word = str(text).lower().removeprefix("torch.")
    word = _DTYPE_NAMES.get(word, word)
    return word if word in DTYPE_BITS else None


def _bits(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _model(settings: Mapping[str, Setting], named: str | None, rulebook: Rulebook) -> Model | None:
    """What the operator states; else the first known of what the requests, and the engine itself, call it."""
    stated = settings.get("model")
    if stated is not None and stated.source == "user":
        return rulebook.find_model(str(stated.value))
    told = [settings[name].value for name in ("model", "served_model") if name in settings]
    names = [str(name) for name in (named, *told) if name]
    return next((model for name in names if (model := rulebook.find_model(name)) is not None), None)


def machine(settings: Mapping[str, Setting], model_name: str | None, rulebook: Rulebook) -> Machine:
    """The machine behind one replica, as far as settings and model name tell."""

    def word(name: str) -> object:
        return settings[name].value if name in settings else None

    model = _model(settings, model_name, rulebook)
    native = dtype_name(word("weight_dtype")) or (model.native_dtype if model else None) or "bf16"
    weights = dtype_name(word("quantization")) or native
    kv = dtype_name(word("kv_dtype")) or native
    degree = word("tensor_parallel")
    accelerator = word("accelerator")
    gpu = rulebook.find_gpu(str(accelerator)) if accelerator is not None else None
    return Machine(
        model=model,
        gpu=gpu,
        precision=Precision(
            weight_bits=_bits(word("weight_bits")) or DTYPE_BITS[weights],
            kv_bits=_bits(word("kv_bits")) or DTYPE_BITS[kv],
        ),
        dtype="fp8" if weights == "fp8" and gpu is not None and gpu.roof("fp8") else native,
        devices=int(degree) if isinstance(degree, int | float) and degree >= 1 else 1,
    )


def typical_model(rows: pl.DataFrame) -> str | None:
    """The model most of the rows name; None where none does."""
    names = rows["model"].drop_nulls()
    return str(names.mode().sort()[0]) if len(names) else None
