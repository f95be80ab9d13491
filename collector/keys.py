"""Stable keys: the same ids give the same key in every process and release, whatever came first."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

_U64 = npt.NDArray[np.uint64]
_M1 = np.uint64(0xFF51AFD7ED558CCD)  # the finaliser of MurmurHash3
_M2 = np.uint64(0xC4CEB9FE1A85EC53)
_SEED_HIGH = np.uint64(0x9E3779B97F4A7C15)
_SEED_LOW = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(33)


def span_keys(trace_ids: pl.Series, span_ids: pl.Series) -> pl.Series:
    """128-bit keys (32 hex digits) of (trace id, span id) pairs; ids are hex text of 32 and 16 digits."""
    high, low, span = _halves(trace_ids, span_ids)
    pairs = np.empty((len(span), 2), dtype=">u8")
    pairs[:, 0] = _mixed(_mixed(high ^ _SEED_HIGH) + _mixed(low) + _mixed(span ^ _SEED_LOW))
    pairs[:, 1] = _mixed(_mixed(high + _SEED_LOW) ^ _mixed(low ^ _SEED_HIGH) ^ (_mixed(span) + _SEED_HIGH))
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(span), [None, pa.py_buffer(pairs.tobytes())])
    return pl.Series("key", pl.from_arrow(fixed.cast(pa.binary())), dtype=pl.Binary).bin.encode("hex")


def span_hashes(trace_ids: pl.Series, span_ids: pl.Series) -> pl.Series:
    """64-bit hashes of (trace id, span id) pairs, for the ledger of spans seen."""
    high, low, span = _halves(trace_ids, span_ids)
    return pl.Series(
        "span", _mixed(_mixed(high ^ _SEED_HIGH) + _mixed(low) + _mixed(span ^ _SEED_LOW)), dtype=pl.UInt64
    )


def trace_hashes(trace_ids: pl.Series) -> pl.Series:
    """64-bit hashes of trace ids."""
    return pl.Series("trace", _mixed(_number(trace_ids, 0) ^ _mixed(_number(trace_ids, 16))), dtype=pl.UInt64)


def text_key(*parts: str) -> str:
    """128-bit key (32 hex digits) of some texts, for rows that have no span."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _halves(trace_ids: pl.Series, span_ids: pl.Series) -> tuple[_U64, _U64, _U64]:
    return _number(trace_ids, 0), _number(trace_ids, 16), _number(span_ids, 0)


def _number(texts: pl.Series, start: int) -> _U64:
    """Sixteen hex digits from `start` on as numbers; text that is no hex counts by its own hash."""
    digits = texts.str.slice(start, 16)
    numbers = digits.str.to_integer(base=16, dtype=pl.UInt64, strict=False)
    if numbers.null_count():
        own = [int.from_bytes(hashlib.blake2b((t or "").encode(), digest_size=8).digest(), "big") for t in texts]
        numbers = numbers.fill_null(pl.Series(own, dtype=pl.UInt64))
    return numbers.to_numpy()


def _mixed(values: _U64) -> _U64:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _SHIFT)) * _M1
        values = (values ^ (values >> _SHIFT)) * _M2
        return values ^ (values >> _SHIFT)
