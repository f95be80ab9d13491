"""Text without a model: words that stand for tokens where only time is simulated. A Tokenizer as in `llama/tokenizer.py`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from phasewise.instrumented_engine.llama.tokenizer import Detokenizer, Message

_PIECE = re.compile(r"\s*\w{1,5}|\s*[^\w\s]|\s+")  # about four characters a token, as real vocabularies have it
_SYLLABLES = ("ba", "de", "fi", "go", "ha", "ju", "ka", "le", "mi", "no", "pa", "re", "si", "to", "ve", "zu")
_BOS, _TURN = 0, 1
_RESERVED = 2
_STRIDE = 2_654_435_761  # Knuth's multiplicative hash: neighbouring positions give unlike words


class WordTokenizer:
    """Equal text gives equal tokens, so that prefixes are shared as with a real vocabulary; ids are shown as invented words."""

    stop_ids: tuple[int, ...] = ()

    def __init__(self, vocab: int) -> None:
        self.vocab = max(vocab, _RESERVED + 1)

    def encode(self, text: str) -> list[int]:
        room = self.vocab - _RESERVED
        return [_BOS, *(_RESERVED + zlib.crc32(piece.encode()) % room for piece in _PIECE.findall(text))]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        tokens = [_BOS]
        for message in messages:
            tokens += [
                _TURN,
                *self.encode(str(message["role"]))[1:],
                *self.encode(str(message.get("content") or ""))[1:],
            ]
        return [*tokens, _TURN, *self.encode("assistant")[1:]]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(_word, tokens))

    def stream(self) -> Detokenizer:
        return _Words()

    def uttered(self, source: int, position: int) -> int:
        """The token a simulated model says at this position of its output."""
        return _RESERVED + (source + (position + 1) * _STRIDE) % (self.vocab - _RESERVED)


class _Words:
    def push(self, token: int) -> str:
        return _word(token)

    def finish(self) -> str:
        return ""


def _word(token: int) -> str:
    if token < _RESERVED:
        return ""
    word = _SYLLABLES[token % 16] + _SYLLABLES[token // 16 % 16]
    return f" {word}{_SYLLABLES[token // 256 % 16]}" if token >= 256 else f" {word}"
