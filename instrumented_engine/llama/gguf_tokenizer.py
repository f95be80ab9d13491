"""The tokenizer inside a GGUF file, as the files a Hugging Face folder has: tokenizer.json, tokenizer_config.json, generation_config.json.

Two kinds exist: byte-level BPE (`gpt2`, with merges and the name of a way to split text first) and SentencePiece BPE (`llama`, with
scores instead of merges). Splitting: llama.cpp `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.instrumented_engine.engine_extra import extra
from phasewise.rules.errors import InputError, PhasewiseError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "codeshell", "command-r")
_PLAIN = ("gpt-2", "gpt2", "default")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACE = "\u2581"


def tokenizer_files(fields: Mapping[str, Any], path: Path) -> dict[str, str]:
    """File name to content. Raises InputError for a vocabulary of another kind, or one that does not fit together."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise InputError(path, "tokenizer.ggml.tokens", "is missing", "the file holds no vocabulary")
    try:
        named = {
            f"{role}_token": tokens[fields[f"tokenizer.ggml.{role}_token_id"]]
            for role in ("bos", "eos")
            if fields.get(f"tokenizer.ggml.{role}_token_id") is not None
        }
        tokenizer = _tokenizer(fields, tokens, named.get("bos_token"), path)
    except PhasewiseError:
        raise
    except Exception as problem:  # the package has no error of its own: a merge of unknown tokens is a plain Exception
        raise InputError(
            path, "tokenizer.ggml", f"does not fit together: {problem!r}", "the file is broken"
        ) from problem
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    settings: dict[str, Any] = dict(named)
    if (template := fields.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "generation_config.json": json.dumps({"eos_token_id": sorted({end for end in ends if end is not None})}),
    }


def _tokenizer(fields: Mapping[str, Any], tokens: Sequence[str], begin: str | None, path: Path) -> Tokenizer:
    types = list(fields.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens, path)
    elif kind == "llama":
        tokenizer = _sentence_piece(fields, tokens, types)
    else:
        raise InputError(path, "tokenizer.ggml.model", f"{kind!r} is not supported", "gpt2 and llama are")
    _add_special(tokenizer, tokens, types)
    begins = (
        kind == "llama" or fields.get("tokenizer.ggml.pre") in _LLAMA3
    )  # what llama.cpp does where the file is silent
    if begin is not None and fields.get("tokenizer.ggml.add_bos_token", begins):
        _begin_with(tokenizer, begin)
    return tokenizer


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    made = extra("tokenizers", "a tokenizer")
    split, name = made.pre_tokenizers, fields.get("tokenizer.ggml.pre", "default")
    begins_with_space = bool(fields.get("tokenizer.ggml.add_space_prefix", False))
    if name in _DIGIT_BY_DIGIT:
        before = split.Sequence([split.Digits(individual_digits=True), split.ByteLevel(begins_with_space)])
    elif name in _PLAIN:
        before = split.ByteLevel(begins_with_space)
    elif name in _LLAMA3:
        pattern = made.Regex(_LLAMA3_SPLIT)
        before = split.Sequence([split.Split(pattern, "isolated"), split.ByteLevel(begins_with_space, use_regex=False)])
    else:
        remedy = "use the model's Hugging Face folder, which has a tokenizer.json"
        raise InputError(path, "tokenizer.ggml.pre", f"{name!r} is a way to split text that is not known here", remedy)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: Tokenizer = made.Tokenizer(made.models.BPE(vocabulary, merges, ignore_merges=name in _LLAMA3))
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = made.decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """SentencePiece joins the pair whose result has the best score: a merge for each way to split a token, best result first."""
    made = extra("tokenizers", "a tokenizer")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = fields["tokenizer.ggml.scores"]
    merges: list[tuple[float, int, int, str, str]] = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = made.models.BPE(
        vocabulary, [(left, right) for *_, left, right in sorted(merges)],
        unk_token=unknown, fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer: Tokenizer = made.Tokenizer(model)
    replace = made.normalizers.Replace(" ", _SPACE)
    leads = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = made.normalizers.Sequence(
        [made.normalizers.Prepend(_SPACE), replace] if leads else [replace]
    )
    parts = [made.decoders.Replace(_SPACE, " "), made.decoders.ByteFallback(), made.decoders.Fuse()]
    tokenizer.decoder = made.decoders.Sequence([*parts, made.decoders.Strip(" ", 1, 0)] if leads else parts)
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are matched whole before anything is split; control tokens are left out of decoded text."""
    made = extra("tokenizers", "a tokenizer")
    added = [
        made.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _begin_with(tokenizer: Tokenizer, token: str) -> None:
    made = extra("tokenizers", "a tokenizer")
    number = tokenizer.token_to_id(token)
    tokenizer.post_processor = made.processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, number)]
    )
