"""Text to token ids and back: a model's own tokenizer, or plain bytes for random weights. No torch.

Token ids come back one at a time and a character may need several of them: `Detokenizer` gives out text only when it is final.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from phasewise.instrumented_engine.engine_extra import extra
from phasewise.instrumented_engine.llama.chat_template import CHATML, render
from phasewise.rules.errors import InputError

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]  # role and content, as the OpenAI API has them
_REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3  # bytes of a character that is not complete yet, each of which may show as one replacement
# Ends of a turn that models know besides the one their configuration names.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


class Detokenizer(Protocol):
    """Of one stream."""

    def push(self, token: int) -> str:
        """Text that is final with this token; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back, at the end of the stream."""
        ...


class Tokenizer(Protocol):
    """stop_ids: tokens that end a generation."""

    @property
    def vocab(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """With the token a prompt begins with, where the model has one."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Up to where the assistant's answer begins. Raises InputError for messages the template refuses."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stream(self) -> Detokenizer: ...


class TextTokenizer:
    """Tokenizer of a real model."""

    def __init__(self, inner: tokenizers.Tokenizer, settings: Mapping[str, Any], stop_ids: Sequence[int]) -> None:
        """settings: tokenizer_config.json."""
        self._inner = inner
        self._special = {role: _text_of(settings.get(role)) for role in ("bos_token", "eos_token")}
        self._template = _template_of(settings.get("chat_template")) or CHATML
        others = (inner.token_to_id(token) for token in _END_TOKENS)
        self.stop_ids: tuple[int, ...] = tuple(sorted({*stop_ids, *(id_ for id_ in others if id_ is not None)}))

    @property
    def vocab(self) -> int:
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        text = render(self._template, messages, self._special)
        return list(self._inner.encode(text, add_special_tokens=False).ids)  # the template writes them itself

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> Detokenizer:
        return _WindowedDetokenizer(self)


class _WindowedDetokenizer:
    """Decodes a short window again with each token, so that spaces between words come out as they do for the whole text.

    The window begins with the tokens of the last complete piece, since some decoders treat the first token differently.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # tokens of the window that were given out completely
        self._given = ""  # text of the window that was given out

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        tail = len(text) - len(text.rstrip(_REPLACEMENT))
        final = text[: len(text) - min(tail, _LONGEST_TAIL)]
        new = final[len(self._given) :]
        self._given += new
        if not tail and new:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = self._tokenizer.decode(self._window)
        return new

    def finish(self) -> str:
        return self._tokenizer.decode(self._window)[len(self._given) :]


class ByteTokenizer:
    """One token a byte, for models with random weights: 256 bytes, then begin, end of turn, start of turn.

    Ids above stand for nothing; a random model utters them all the time, so each shows as one letter instead.
    """

    BOS, END, START = 256, 257, 258
    LEAST_VOCAB = 259

    def __init__(self, vocab: int = LEAST_VOCAB) -> None:
        """vocab: of the model. Raises InputError below LEAST_VOCAB."""
        if vocab < self.LEAST_VOCAB:
            raise InputError("model shape", "vocab", f"{vocab} is below {self.LEAST_VOCAB}, a byte tokenizer's own")
        self.vocab = vocab
        self.stop_ids = (self.END,)

    def encode(self, text: str) -> list[int]:
        return [self.BOS, *text.encode()]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        ids = [self.BOS]
        for message in messages:
            ids += [self.START, *f"{message['role']}\n{message.get('content') or ''}".encode(), self.END]
        return [*ids, self.START, *b"assistant\n"]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(_shown, tokens)).decode(errors="replace")

    def stream(self) -> Detokenizer:
        return _ByteDetokenizer()


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(_shown(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _shown(token: int) -> bytes:
    if token < 256:
        return bytes((token,))
    return b"" if token < ByteTokenizer.LEAST_VOCAB else bytes((97 + token % 26,))


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Of a folder with tokenizer.json. Raises InputError where it is missing or broken."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(path, "", "is missing", "give a folder with a fast tokenizer's file, or a GGUF file")
    try:
        inner = extra("tokenizers", "a tokenizer").Tokenizer.from_file(str(path))
    except Exception as problem:  # the package raises plain Exception for a broken file
        if isinstance(problem, OSError | ValueError) or type(problem) is Exception:
            raise InputError(path, "", f"cannot be read: {problem}") from problem
        raise
    settings = _document(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text()
    stops: list[int] = []
    for name in ("config.json", "generation_config.json"):
        ends = _document(folder / name).get("eos_token_id")
        stops += [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    return TextTokenizer(inner, settings, stops)


def _document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text())
    except ValueError as problem:
        raise InputError(path, "", f"is not JSON: {problem}") from problem
    if not isinstance(document, dict):
        raise InputError(path, "", "is not a JSON object")
    return document


def _text_of(token: object) -> str:
    """A special token is written as text, or as an object with its text under `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _template_of(template: object) -> str | None:
    """One template, or a list of named ones of which `default` is meant."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
