"""A GGUF file of a Llama-family model, dequantized into a folder of safetensors, config.json and tokenizer.json.

Format: github.com/ggml-org/ggml docs/gguf.md; names and the order of rotary pairs: llama.cpp `convert_hf_to_gguf.py`. Matrices that
were quantized become float16, which holds a 4- to 8-bit value times a float16 scale far better than the quantization did;
what was float32 stays float32.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phasewise.instrumented_engine.engine_extra import extra
from phasewise.instrumented_engine.llama.gguf_tokenizer import tokenizer_files
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig, RopeScaling
from phasewise.rules.errors import InputError

if TYPE_CHECKING:
    from gguf import GGUFReader

UNPACKED_VERSION = 1  # of what this module writes: another number, another folder in the cache
SHARD_BYTES = 2 << 30
Array = npt.NDArray[Any]

_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}  # fmt: skip
_INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Metadata:
    """The key-value part of one file."""

    path: Path
    fields: dict[str, Any]

    def value(self, key: str, default: Any = None) -> Any:
        """Raises InputError where there is neither the key nor a default."""
        found = self.fields.get(key, default)
        if found is None:
            raise InputError(self.path, key, "is missing", "the file is incomplete or too old")
        return found


def unpack(path: Path, folder: Path) -> None:
    """Writes `folder`, complete or not at all. Raises InputError for a file that is no such model, OSError for a full disk."""
    reader = _open(path)
    metadata = Metadata(path, {key: field.contents() for key, field in reader.fields.items()})
    config = llama_config(metadata, reader)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (building / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
        for name, text in tokenizer_files(metadata.fields, path).items():
            (building / name).write_text(text)
        _write_shards(_tensors(reader, config, path), building)
        _synced(building)
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody else was faster, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def llama_config(metadata: Metadata, reader: GGUFReader) -> LlamaConfig:
    """Shape from the keys `llama.*`. Raises InputError for another architecture or what this engine does not compute."""
    path, value = metadata.path, metadata.value
    if (kind := value("general.architecture")) != "llama":
        raise InputError(path, "general.architecture", f"{kind!r} is not supported", "Llama-family files are")
    if value("llama.expert_count", 0):
        raise InputError(path, "llama.expert_count", "mixtures of experts are not supported")
    heads, hidden = int(value("llama.attention.head_count")), int(value("llama.embedding_length"))
    kv_heads = value("llama.attention.head_count_kv", heads)
    if not isinstance(kv_heads, int):
        raise InputError(path, "llama.attention.head_count_kv", "differs between layers, which is not supported")
    head_dim = int(value("llama.attention.key_length", hidden // max(heads, 1)))
    if int(value("llama.rope.dimension_count", head_dim)) != head_dim:
        raise InputError(path, "llama.rope.dimension_count", "rotary embedding of part of a head is not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return LlamaConfig(
        vocab=int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        hidden=hidden,
        layers=int(value("llama.block_count")),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=int(value("llama.feed_forward_length")),
        max_context_tokens=int(value("llama.context_length")),
        rms_eps=float(value("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=float(value("llama.rope.freq_base", 10_000.0)),
        rope_scaling=_scaling(metadata, tensors.get(_ROPE_FACTORS)),
        tied="output.weight" not in tensors,
    )


def rotary_halves(weight: Array, heads: int) -> Array:
    """[heads * D, h] with pairs next to each other, as GGUF keeps q and k, to pairs D/2 apart, as `model.rotate` wants them."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _open(path: Path) -> GGUFReader:
    reader = extra("gguf", "reading a GGUF file").GGUFReader
    try:
        opened: GGUFReader = reader(path)
    except (ValueError, IndexError, KeyError) as problem:
        raise InputError(path, "", f"is no GGUF file this can read: {problem}") from problem
    return opened


def _scaling(metadata: Metadata, factors: Any) -> RopeScaling | None:
    kind = metadata.value("llama.rope.scaling.type", "none")
    if factors is not None:
        return RopeScaling(kind="factors", factors=tuple(float(factor) for factor in factors.data))
    if kind == "none":
        return None
    if kind != "linear":
        raise InputError(metadata.path, "llama.rope.scaling.type", f"{kind!r} is not supported", "linear is")
    return RopeScaling(kind="linear", factor=float(metadata.value("llama.rope.scaling.factor")))


def _tensors(reader: GGUFReader, config: LlamaConfig, path: Path) -> Iterator[tuple[str, Array]]:
    """Name as Hugging Face has it, and values; in the order of the file."""
    quants = extra("gguf.quants", "reading a GGUF file")
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name = _translated(tensor.name, path)
        stored = tensor.data
        values = stored if stored.dtype == np.float32 else quants.dequantize(stored, tensor.tensor_type)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = rotary_halves(values, config.heads if name.endswith("q_proj.weight") else config.kv_heads)
        if stored.dtype != np.float32:
            values = values.astype(np.float16)
        if not np.isfinite(values).all():
            raise InputError(path, tensor.name, "holds values that are no finite numbers")
        yield name, np.ascontiguousarray(values)


def _translated(name: str, path: Path) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.weight"
    raise InputError(path, name, "is a tensor that Llama-family models without biases do not have")


def _write_shards(tensors: Iterator[tuple[str, Array]], folder: Path) -> None:
    """Files of about SHARD_BYTES and their index, so that no more than one shard is in memory."""
    save_file = extra("safetensors.numpy", "keeping a dequantized model").save_file
    where: dict[str, str] = {}
    shard: dict[str, Array] = {}
    size = total = number = 0

    def write() -> None:
        nonlocal size, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()
        size = 0

    for name, values in tensors:
        shard[name] = values
        size += values.nbytes
        total += values.nbytes
        if size >= SHARD_BYTES:
            write()
    if shard:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _synced(folder: Path) -> None:
    """On disk before the rename says so: a power cut must not leave a complete-looking folder of empty files."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
