"""Secrets in what is shown: `***` stands for them in configuration, logs and errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_NAMES = re.compile(r"(?i)(password|passwd|secret|token|api[-_]?key$|authorization|credential)")
_OUR_KEY = re.compile(r"phw_([a-z0-9]{4,32})_[A-Za-z0-9_-]{20,}")
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/?#:@]*):([^\s/?#@]+)@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def hidden(text: str) -> str:
    """Text without our keys' secrets, passwords in URLs, and tokens of Authorization headers; the rest as it is."""
    text = _OUR_KEY.sub(rf"phw_\1_{HIDDEN}", text)
    text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


class HidingFormatter(logging.Formatter):
    """Of every log line, traces included: whatever is logged, a secret in it is not."""

    def format(self, record: logging.LogRecord) -> str:
        return hidden(super().format(record))


def log_to_stderr(line: str) -> None:
    """Sets the log of a process up. line: the form of a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(HidingFormatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def without_secrets(value: Any, name: str = "") -> Any:
    """A configuration value as it may be shown: judged by the names of its keys, and by what stands in its texts."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if name and _NAMES.search(name):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return hidden(value) if isinstance(value, str) else value
