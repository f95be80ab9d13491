"""What a step's kernels take by the curves of their accelerator, and what each resource would save of it.

Reading and computing overlap inside a kernel, so a step is shorter by less than the time of the one that is taken away, and the seconds
in which both are at work are saved by neither alone. Those are divided half and half (the Shapley value of the two), so that the parts
add up and still stand in the order of what they would save. The curves are those of published measurements by operator
(`rules/kernels`); their median error is about a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.kept_figures import Ints, KeptFigures
from phasewise.analyzer.machine import Machine
from phasewise.rules.counting import Precision
from phasewise.rules.kernels.operators import EVERYTHING
from phasewise.rules.kernels.replica import Replica, replica_of
from phasewise.rules.schema import Gpu, Model

_EIGHT_BIT = ("fp8", "int8")
NODE_DEVICES = (1, 2, 4, 8)  # of which the curves of collectives know


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of n steps by resource; floors: starting kernels, which no byte and no FLOP makes shorter."""

    weights: Floats
    kv: Floats
    compute: Floats
    links: Floats
    floors: Floats

    @property
    def total(self) -> Floats:
        return self.weights + self.kv + self.compute + self.links + self.floors


class KernelTimes:
    """Of one machine. What depends on the number of tokens alone is kept by that number: it is asked again and again, and a step is
    made of a dozen kernels."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._layers = KeptFigures(self._layer_seconds, len(_GONE))
        self._logits = KeptFigures(self._logit_seconds, len(_GONE))

    def decoding(self, sequences: Floats, context: Floats) -> Parts:
        """Steps in which so many sequences decode, that attend to `context` tokens together. sequences: whole ones are told apart."""
        attention = np.stack([self._replica.decode_seconds(sequences, context, kept) for kept in _GONE])
        return _parts(self._linear(sequences, sequences) + attention)

    def linear(self, tokens: Floats, sequences: Floats) -> Parts:
        """All but attention, of steps of so many tokens that give so many sequences a token."""
        return _parts(self._linear(tokens, np.maximum(sequences, 1.0)))

    def _linear(self, tokens: Floats, logits: Floats) -> Floats:
        return self._layers.of(_whole(tokens)) + self._logits.of(_whole(logits))

    def _layer_seconds(self, tokens: Ints) -> Floats:
        return np.stack([self._replica.token_seconds(tokens.astype(np.float64), kept) for kept in _GONE])

    def _logit_seconds(self, logits: Ints) -> Floats:
        return np.stack([self._replica.logit_seconds(logits.astype(np.float64), kept) for kept in _GONE])


# Everything as it is, then without each resource.
_RESOURCES = ("weight_bytes", "kv_bytes", "compute", "communication", "host")
_GONE = (EVERYTHING, *(replace(EVERYTHING, **{name: 0.0}) for name in _RESOURCES))


def _whole(amount: Floats) -> Ints:
    return np.rint(amount).astype(np.int64)


def _parts(seconds: Floats) -> Parts:
    """seconds: [of _GONE, n]."""
    whole = seconds[0]
    weights, kv, compute, links, floors = np.maximum(whole - seconds[1:], 0.0)
    both = np.maximum(whole - weights - kv - compute - links - floors, 0.0)
    reading = weights + kv
    of_weights = np.divide(weights, reading, out=np.ones_like(reading), where=reading > 0)
    return Parts(
        weights=weights + both / 2 * of_weights,
        kv=kv + both / 2 * (1.0 - of_weights),
        compute=compute + both / 2,
        links=links,
        floors=floors,
    )


def kernel_times(built: Machine) -> KernelTimes | None:
    """None where model or accelerator are unknown, or nothing was measured of accelerators of that kind or so many of them."""
    if built.model is None or built.gpu is None or built.gpu.kind != "gpu" or built.dtype not in built.gpu.peak_flops:
        return None
    if built.devices not in NODE_DEVICES or built.model.heads % built.devices:
        return None
    if built.devices > 1 and built.gpu.link_bandwidth_bytes_per_s is None:
        return None
    activations = 8.0 if built.dtype in _EIGHT_BIT else built.precision.activation_bits
    precision = replace(built.precision, activation_bits=activations)
    return _kept_times(_Placed(built.gpu, built.model, precision, built.devices, built.dtype))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A machine as it should be (`rules.kernels.placement.Placement`)."""

    gpu: Gpu
    model: Model
    precision: Precision
    tensor_parallel_count: int
    compute_dtype: str
    compute_slow_ratio: float = 1.0
    memory_slow_ratio: float = 1.0
    communication_slow_ratio: float = 1.0

    def __hash__(self) -> int:
        """By names: to hash every figure of an accelerator costs more than a look-up saves. Equality is by all of them."""
        return hash((self.gpu.id, self.model.id, self.precision, self.tensor_parallel_count, self.compute_dtype))


@lru_cache(maxsize=64)
def _kept_times(placed: _Placed) -> KernelTimes:
    return KernelTimes(replica_of(placed))
