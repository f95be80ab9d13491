"""The rulebook as a whole, and how it refuses a wrong file."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from phasewise.rules.errors import RuleError
from phasewise.rules.load import load_rulebook, normalized
from phasewise.rules.schema import CATEGORIES
from phasewise.rules.vocabulary import SIGNALS

PACKAGED = Path(str(files("phasewise.rules")))


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A copy of the rule files that a test may spoil."""
    for folder in ("gpus", "models", "techniques", "engines"):
        shutil.copytree(PACKAGED / folder, tmp_path / folder)
    return tmp_path


def spoil(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_packaged_rules_load_and_are_enough() -> None:
    rulebook = load_rulebook()
    assert len(rulebook.gpus) >= 14
    assert len(rulebook.models) >= 5
    assert "smollm2-135m" in rulebook.models
    assert len(rulebook.techniques) >= 70


def test_the_version_follows_the_content(rules: Path) -> None:
    before = load_rulebook(rules).version
    assert before == load_rulebook(rules).version
    spoil(rules / "gpus" / "t4.toml", "tdp_w = 70", "tdp_w = 71")
    assert load_rulebook(rules).version != before


@pytest.mark.parametrize("name", ["H100", "nvidia h100 80gb hbm3", "NVIDIA_H100-SXM", "h100-sxm"])
def test_a_device_is_found_by_any_of_its_names(name: str) -> None:
    found = load_rulebook().find_gpu(name)
    assert found is not None
    assert found.id == "h100-sxm"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-135m", "smollm2-135m"), ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("/models/Llama-3.1-8B/", "llama-3.1-8b"), ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ],
)  # fmt: skip
def test_a_model_is_found_by_served_names(name: str, expected: str) -> None:
    found = load_rulebook().find_model(name)
    assert found is not None
    assert found.id == expected


def test_what_is_unknown_is_not_guessed() -> None:
    rulebook = load_rulebook()
    assert rulebook.find_gpu("RTX 9999") is None
    assert rulebook.find_gpu("") is None
    assert rulebook.find_gpu(None) is None
    assert rulebook.find_model("gpt-99") is None


@pytest.mark.parametrize(
    ("alias", "identity"),
    [
        ("chunked prefill", "interleave_decode_with_prefill"), ("prefix sharing", "prefix_caching"),
        ("KV quantization", "kv_cache_quantization"), ("weight quantization", "weight_only_quantization"),
        ("FP8 compute", "low_precision_compute"), ("activation quantization", "low_precision_compute"),
        ("replicas", "add_replicas"), ("disaggregation", "prefill_decode_disaggregation"), ("offload", "kv_offload_tier"),
        ("context truncation", "shorten_prompt"), ("priority and preemption", "fair_or_priority_scheduling"),
    ],
)  # fmt: skip
def test_aliases_of_techniques(alias: str, identity: str) -> None:
    found = load_rulebook().find_technique(alias)
    assert found is not None
    assert found.id == identity


def test_every_signal_of_a_rule_is_in_the_vocabulary_and_each_unit_is_a_word() -> None:
    for name, signal in SIGNALS.items():
        assert signal.unit in (
            "ratio",
            "count",
            "truth",
            "word",
            "seconds",
            "tokens",
            "bytes",
            "per second",
            "tokens per second",
        ), name
        assert signal.text


def test_names_normalize() -> None:
    assert normalized("NVIDIA H100-SXM (80 GB)") == "nvidiah100sxm80gb"


# --- wrong files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new", "key", "hint"),
    [
        ("gpus/t4.toml", "tdp_w", "tdp_v", "tdp_v", "did you mean 'tdp_w'"),
        ("gpus/t4.toml", "memory_bytes = 16e9", 'memory_bytes = "16 GB"', "memory_bytes", "must be a number"),
        ("gpus/t4.toml", 'kind = "gpu"', 'kind = "gpus"', "kind", "did you mean 'gpu'"),
        ("gpus/t4.toml", "fp16 = 65e12", "fp61 = 65e12", "peak_flops.fp61", "unknown key"),
        ("gpus/t4.toml", "tdp_w = {", "achieved_flops = {", "sources.tdp_w", "no number without a source"),
        ("gpus/h100-sxm.toml", "bf16 = 795e12", "bf16 = 1200e12", "achieved_flops.bf16", "above the peak"),
        ("models/llama-3.1-8b.toml", "kv_heads = 8", "kv_heads = 7", "kv_heads", "does not divide"),
        ("models/llama-3.1-8b.toml", "layers = 32", "layers = 0", "layers", "at least 1"),
        ("models/llama-3.1-8b.toml", "layers = 32\n", "", "layers", "is missing"),
        ("models/mixtral-8x7b.toml", "experts_per_token = 2", "experts_per_token = 9", "moe.experts_per_token", "more than the 8"),
        ("techniques/prefix_caching.toml", 'signal = "prefix_reusable_ratio"', 'signal = "prefix_reusable"', "contraindication[0].signal", "did you mean 'prefix_reusable_ratio'"),
        ("techniques/prefix_caching.toml", 'acts_on = ["prefill.compute"]', 'acts_on = ["prefill.computer"]', "acts_on", "did you mean 'prefill.compute'"),
        ("techniques/raise_max_num_seqs.toml", 'requires_with = ["admission_control"]', 'requires_with = ["admision_control"]', "requires_with", "did you mean 'admission_control'"),
        ("techniques/raise_prefill_chunk.toml", 'signal = "share:interference"', 'signal = "share:interferences"', "contraindication[0].signal", "did you mean 'interference'"),
        ("techniques/prefix_caching.toml", "{observed}", "{value_seen}", "contraindication[0].reason", "unknown field"),
        ("techniques/prefix_caching.toml", "[[source]]", "[[sources]]", "sources", "unknown key"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_key_and_remedy(
    rules: Path, file: str, old: str, new: str, key: str, hint: str
) -> None:
    spoil(rules / file, old, new)
    with pytest.raises(RuleError) as caught:
        load_rulebook(rules)
    assert Path(file).name in str(caught.value)
    assert key in caught.value.key or key in str(caught.value)
    assert hint in str(caught.value)


def test_a_syntax_error_names_its_line(rules: Path) -> None:
    (rules / "gpus" / "t4.toml").write_text("name = \n", encoding="utf-8")
    with pytest.raises(RuleError, match="line 1"):
        load_rulebook(rules)


def test_two_files_may_not_claim_one_name(rules: Path) -> None:
    spoil(rules / "gpus" / "t4.toml", '"Tesla T4"', '"H100"')
    with pytest.raises(RuleError, match="already names"):
        load_rulebook(rules)


def test_a_source_needs_a_date(rules: Path) -> None:
    spoil(rules / "models" / "llama-3.1-8b.toml", 'date = "2026-11-29"', 'date = "lately"')
    with pytest.raises(RuleError, match="must be a date"):
        load_rulebook(rules)


def test_bytes_that_are_no_text_are_refused(rules: Path) -> None:
    (rules / "gpus" / "t4.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RuleError, match="UTF-8"):
        load_rulebook(rules)


# --- what the files must hold --------------------------------------------------------------------------------------------


def test_sparse_is_twice_dense_except_where_said() -> None:
    """FP8 and INT8 run at twice the 16-bit rate on the devices that have both; the exceptions are known."""
    for gpu in load_rulebook().gpus.values():
        for narrow in ("fp8", "int8"):
            if narrow in gpu.peak_flops and "bf16" in gpu.peak_flops and (gpu.id, narrow) != ("rtx-4090", "int8"):
                assert gpu.peak_flops[narrow] == pytest.approx(2 * gpu.peak_flops["bf16"], rel=0.02), (gpu.id, narrow)


def test_each_technique_file_is_complete() -> None:
    for technique in load_rulebook().techniques.values():
        assert set(technique.categories) <= set(CATEGORIES)
        expectations = {example.expect for example in technique.examples}
        assert "offered" in expectations, technique.id
        assert expectations - {"offered"}, technique.id
        assert technique.sources, technique.id
        assert len(technique.title) <= 70, technique.id
