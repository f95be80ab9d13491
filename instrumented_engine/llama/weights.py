"""Weights into memory: from a folder of safetensors, or random ones of any shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phasewise.instrumented_engine.engine_extra import extra
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.model import Layer, Llama
from phasewise.instrumented_engine.torch_import import torch
from phasewise.rules.errors import InputError, MachineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INDEX = "model.safetensors.index.json"
_DEPTH_GAIN = 0.5  # of random layers, so that the sum over layers keeps the size of the embedding
_LOGIT_SPREAD = 3.0  # standard deviation of the logits of random weights, about what trained models have


def load_llama(folder: Path, *, dtype: str = "float32", device: str = "cpu") -> Llama:
    """A folder as Hugging Face publishes it: config.json and one or more safetensors files.

    dtype: a key of DTYPES. Raises InputError for a missing or misshapen tensor, MachineError for a device that is not there.
    """
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise InputError(path, "", f"cannot be read: {problem}") from problem
    config = LlamaConfig.from_hf(document, path)
    _check_device(device)
    with ExitStack() as opened:
        tensors = _Tensors(folder, opened, _dtype(dtype), device)
        layers = [_layer(tensors, config, number) for number in range(config.layers)]
        embedding = tensors.get("model.embed_tokens.weight", config.vocab, config.hidden)
        head = embedding if config.tied else tensors.get("lm_head.weight", config.vocab, config.hidden)
        return Llama(config, embedding, layers, tensors.get("model.norm.weight", config.hidden), head)


def random_llama(config: LlamaConfig, seed: int, *, dtype: str = "float32", device: str = "cpu") -> Llama:
    """Weights drawn on the device itself, scaled so that activations and logits keep the size they have in a trained model.

    The same seed gives the same weights on the same kind of device only.
    """
    _check_device(device)
    number_type = _dtype(dtype)
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=number_type, device=device)
        return values.normal_(0.0, gain / math.sqrt(columns), generator=generator)

    def norm() -> torch.Tensor:
        values = torch.empty(config.hidden, dtype=number_type, device=device)
        return values.normal_(1.0, 0.1, generator=generator)

    width = config.heads * config.head_dim
    layers = [
        Layer(
            attention_norm=norm(),
            qkv=matrix(width + 2 * config.kv_heads * config.head_dim, config.hidden),
            output=matrix(config.hidden, width, _DEPTH_GAIN),
            mlp_norm=norm(),
            gate_up=matrix(2 * config.ffn, config.hidden),
            down=matrix(config.hidden, config.ffn, _DEPTH_GAIN),
        )
        for _ in range(config.layers)
    ]
    embedding = matrix(config.vocab, config.hidden, _LOGIT_SPREAD if config.tied else 1.0)
    head = embedding if config.tied else matrix(config.vocab, config.hidden, _LOGIT_SPREAD)
    return Llama(config, embedding, layers, norm(), head)


def _layer(tensors: _Tensors, config: LlamaConfig, number: int) -> Layer:
    name, hidden = f"model.layers.{number}", config.hidden
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
    qkv = [tensors.get(f"{name}.self_attn.{part}.weight", rows, hidden) for part, rows in projections]
    gate_up = [tensors.get(f"{name}.mlp.{part}.weight", config.ffn, hidden) for part in ("gate_proj", "up_proj")]
    return Layer(
        attention_norm=tensors.get(f"{name}.input_layernorm.weight", hidden),
        qkv=torch.cat(qkv),
        output=tensors.get(f"{name}.self_attn.o_proj.weight", hidden, width),
        mlp_norm=tensors.get(f"{name}.post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(gate_up),
        down=tensors.get(f"{name}.mlp.down_proj.weight", hidden, config.ffn),
    )


class _Tensors:
    """The tensors of a folder by name; a layer at a time is read, so that memory holds the model once."""

    def __init__(self, folder: Path, opened: ExitStack, dtype: torch.dtype, device: str) -> None:
        open_file = extra("safetensors", "reading a model's weights").safe_open
        self._folder, self._dtype, self._device = folder, dtype, device
        self._where: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file = opened.enter_context(open_file(path, framework="pt", device="cpu"))
            except Exception as problem:  # the package's own error derives from Exception only
                raise InputError(path, "", f"cannot be read: {problem}") from problem
            self._where.update(dict.fromkeys(file.keys(), file))

    def get(self, name: str, *shape: int) -> torch.Tensor:
        file = self._where.get(name)
        if file is None:
            raise InputError(
                self._folder, name, "is missing", "the download is incomplete, or the model is another kind"
            )
        tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InputError(self._folder, name, f"has shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor.to(device=self._device, dtype=self._dtype)


def _files(folder: Path) -> Iterator[Path]:
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InputError(folder, "*.safetensors", "there is none", "convert the weights to safetensors first")
        yield from files
        return
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(index, "weight_map", f"cannot be read: {problem!r}") from problem
    for name in sorted(names):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise InputError(index, "weight_map", f"names {name!r}, which is not in the folder", "finish the download")
        yield path


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InputError("dtype", "", f"{name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError("there is no CUDA device here (device cpu works everywhere)")
