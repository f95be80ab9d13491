"""How long a step of an instance takes by what it is made of: a non-negative fit over its own steps (architecture section 3).

    duration = constant + prefilling + f(tokens) + sequences + g(context) + pairs [+ routed weights]

f and g are convex and piecewise linear, because a step is bound by the larger of several things: the linear layers by weight
bytes until there are enough tokens, everything by the host until the device takes longer. The fit minimises relative errors,
leaves outliers out, and leans a little towards the data sheet where the steps of an instance cannot tell two terms apart (a
batch of equal sequences: is it their number, or their context?). Small sums without BLAS, so that threads change no bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.step_bounds import Bounds
from phasewise.analyzer.step_table import Ints

TOKEN_KNOTS = (64.0, 128.0, 256.0, 512.0, 1024.0)
CONTEXT_KNOTS = (0.33, 0.67)  # quantiles of the context of the steps that decode
LEAN = 5e-4  # weight of the data sheet against the steps, as a share of each term's own square
FIT_STEPS = 20_000  # most steps a fit looks at; of more, every k-th
ROUNDS = 4
OUTLIER_SPREADS = 4.0
LEAST_SPREAD = 0.005
# What the data sheet lets expect, achieved over stated: roofline.md 4.1.
EXPECTED_MEMORY, EXPECTED_COMPUTE = 0.7, 0.7
# How unwilling a term is: those that stand for little device work come last where several explain the same. Few tokens cost
# little, their FLOPs hide behind the bytes of the weights.
_UNWILLING = {"constant": 0.0, "prefilling": 3.0, "sequences": 20.0, "tokens>0": 5.0, "context>0": 1.0, "context>": 3.0}


@dataclass(frozen=True, slots=True)
class Composition:
    """n steps, or what would be left of them. tokens: prompt and decode tokens; context: attended by the sequences that decode;
    pairs: (query, key) pairs of the prompts' chunks; prefilling: 1 where there are any prompt tokens."""

    tokens: Floats
    sequences: Floats
    context: Floats
    pairs: Floats
    prefilling: Floats

    def at(self, which: Ints | Bools | slice) -> Composition:
        return Composition(*(getattr(self, name)[which] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class StepModel:
    """A fitted instance. token_terms, context_terms: (knot, seconds per token beyond it); spread_ratio: of what the fit leaves,
    relative, robust; steps: how many it rests on; most_tokens: largest step among them; context_range: from the 5th to the 95th
    percentile of the context of those that decode; context_error_s: standard error of what a token of context costs, infinite
    where the steps do not tell it from their other terms."""

    constant_s: float
    prefilling_s: float
    sequence_s: float
    pair_s: float
    routed: float  # of the data sheet's time for the weights, where their bytes depend on the tokens
    token_terms: tuple[tuple[float, float], ...]
    context_terms: tuple[tuple[float, float], ...]
    spread_ratio: float
    steps: int
    most_tokens: float
    context_range: float
    context_error_s: float
    bounds: Bounds | None

    def tokens_s(self, tokens: Floats) -> Floats:
        return _bent(self.token_terms, tokens)

    def context_time_s(self, context: Floats) -> Floats:
        return _bent(self.context_terms, context)

    def token_slope_s(self, tokens: Floats) -> Floats:
        return _slope(self.token_terms, tokens)

    def context_slope_s(self, context: Floats) -> Floats:
        return _slope(self.context_terms, context)

    def routed_s(self, tokens: Floats) -> Floats:
        """Seconds for weights that depend on the tokens (mixture of experts); 0 for a dense model."""
        if self.bounds is None or self.routed <= 0:
            return np.zeros(len(tokens))
        return self.routed * self.bounds.weights_s(tokens)

    def seconds(self, made_of: Composition) -> Floats:
        """Predicted duration; a step without tokens takes none."""
        total = (
            self.constant_s
            + self.prefilling_s * made_of.prefilling
            + self.tokens_s(made_of.tokens)
            + self.sequence_s * made_of.sequences
            + self.context_time_s(made_of.context)
            + self.pair_s * made_of.pairs
            + self.routed_s(made_of.tokens)
        )
        return np.where(made_of.tokens > 0, total, 0.0)


def _bent(terms: tuple[tuple[float, float], ...], x: Floats) -> Floats:
    total = np.zeros(len(x))
    for knot, slope in terms:
        if slope:
            total += slope * np.maximum(x - knot, 0.0)
    return total


def _slope(terms: tuple[tuple[float, float], ...], x: Floats) -> Floats:
    """Seconds a further unit would cost."""
    total = np.zeros(len(x))
    for knot, slope in terms:
        if slope:
            total += np.where(x >= knot, slope, 0.0)
    return total


def fit_steps(made_of: Composition, duration_s: Floats, bounds: Bounds | None) -> StepModel:
    """Fits steps with tokens and a duration; at least one is needed."""
    usable = np.flatnonzero((made_of.tokens > 0) & (duration_s > 0)).astype(np.int64)
    assert len(usable)
    chosen = usable[:: max(1, -(-len(usable) // FIT_STEPS))]
    part, took = made_of.at(chosen), duration_s[chosen]
    decoding = part.context[part.sequences > 0]
    knots = tuple(float(np.quantile(decoding, q)) for q in CONTEXT_KNOTS) if len(decoding) else ()
    knots = tuple(knot for knot in dict.fromkeys(knots) if knot > 0)
    names, design = _design(part, knots, bounds)
    expected = _expected(names, bounds)
    weighted = design / took[:, None]
    kept = np.ones(len(took), dtype=np.bool_)
    beta, spread = np.zeros(len(names)), LEAST_SPREAD
    for _ in range(ROUNDS):
        beta = _solve(weighted[kept], names, expected)
        off = 1.0 - np.einsum("ij,j->i", weighted, beta)
        spread = max(LEAST_SPREAD, 1.4826 * float(np.median(np.abs(off[kept]))))
        again = np.abs(off) <= max(OUTLIER_SPREADS * spread, 0.05)
        if not again.any() or (again == kept).all():
            break
        kept = again
    value = dict(zip(names, beta.tolist(), strict=True))
    return StepModel(
        constant_s=value["constant"],
        prefilling_s=value["prefilling"],
        sequence_s=value["sequences"],
        pair_s=value["pairs"],
        routed=value.get("routed", 0.0),
        token_terms=tuple((knot, value[f"tokens>{knot:g}"]) for knot in (0.0, *TOKEN_KNOTS)),
        context_terms=tuple((knot, value[f"context>{knot:g}"]) for knot in (0.0, *knots)),
        spread_ratio=spread,
        steps=int(kept.sum()),
        most_tokens=float(part.tokens[kept].max()),
        context_range=float(np.subtract(*np.quantile(decoding, (0.95, 0.05)))) if len(decoding) else 0.0,
        context_error_s=_context_error_s(weighted[kept], names, spread),
        bounds=bounds,
    )


def _context_error_s(weighted: Floats, names: list[str], spread: float) -> float:
    """Standard error of one slope over the context: from what is left of it when all other terms are accounted for."""
    others = [k for k, name in enumerate(names) if not name.startswith("context>")]
    own = names.index("context>0")
    gram = np.einsum("ij,ik->jk", weighted, weighted)
    square = float(gram[own, own])
    others = [k for k in others if gram[k, k] > 0]
    if square <= 0 or len(weighted) <= len(others):
        return float("inf")
    scale = np.sqrt(np.diag(gram)[others])
    among = gram[np.ix_(others, others)] / scale[:, None] / scale[None, :] + 1e-9 * np.eye(len(others))
    with_own = gram[others, own] / scale
    left = square - float((with_own * np.linalg.solve(among, with_own)).sum())
    return spread / math.sqrt(left) if left > 1e-7 * square else float("inf")


def _design(part: Composition, knots: tuple[float, ...], bounds: Bounds | None) -> tuple[list[str], Floats]:
    """Names and columns of the terms, [n, terms]."""
    column = {"constant": np.ones(len(part.tokens)), "prefilling": part.prefilling, "sequences": part.sequences}
    column |= {f"tokens>{knot:g}": np.maximum(part.tokens - knot, 0.0) for knot in (0.0, *TOKEN_KNOTS)}
    column |= {f"context>{knot:g}": np.maximum(part.context - knot, 0.0) for knot in (0.0, *knots)}
    column["pairs"] = part.pairs
    if bounds is not None and bounds.routed:
        column["routed"] = bounds.weights_s(part.tokens)
    return list(column), np.stack(list(column.values()), axis=1)


def _expected(names: list[str], bounds: Bounds | None) -> Floats:
    """What the data sheet lets expect of each term; 0 where it says nothing."""
    found = dict.fromkeys(names, 0.0)
    if bounds is not None:
        found["context>0"] = bounds.context_s / EXPECTED_MEMORY
        found["pairs"] = bounds.pair_s / EXPECTED_COMPUTE
        found["tokens>0"] = bounds.row_s / EXPECTED_MEMORY + bounds.link_token_s
        knee = min((0.0, *TOKEN_KNOTS), key=lambda knot: abs(knot - bounds.knee_tokens))
        found[f"tokens>{knee:g}"] += bounds.token_s / EXPECTED_COMPUTE
        if "routed" in found:
            found["routed"] = 1.0 / EXPECTED_MEMORY
    return np.array([found[name] for name in names])


def _solve(weighted: Floats, names: list[str], expected: Floats) -> Floats:
    """Non-negative coefficients of the terms for columns that should add up to 1 in every row."""
    gram = np.einsum("ij,ik->jk", weighted, weighted) / len(weighted)
    right = weighted.sum(axis=0) / len(weighted)
    own = np.diag(gram).copy()
    alive = own > 0
    unwilling = np.array([_unwilling(name) for name in names])
    lean = LEAN * unwilling * own
    gram = gram + np.diag(lean)
    right = right + lean * expected
    # Terms on one scale, so that one tolerance serves all.
    scale = np.where(alive, np.sqrt(np.where(alive, own, 1.0)), 1.0)
    solved = nonnegative((gram / scale[:, None] / scale[None, :])[np.ix_(alive, alive)], (right / scale)[alive])
    beta = np.zeros(len(names))
    beta[alive] = solved / scale[alive]
    # A term no step has says nothing; what the data sheet expects of it stands.
    return np.where(alive, beta, expected)


def _unwilling(name: str) -> float:
    return _UNWILLING.get(name, _UNWILLING["context>"] if name.startswith("context>") else 1.0)


def nonnegative(gram: Floats, right: Floats) -> Floats:
    """x >= 0 that minimises x'Gx/2 - right'x for a positive definite G of a few rows (Lawson and Hanson 1974)."""
    n = len(right)
    x = np.zeros(n)
    passive = np.zeros(n, dtype=np.bool_)
    tolerance = 1e-12 * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(4 * n):
        gradient = right - (gram * x).sum(axis=1)
        gradient[passive] = -np.inf
        best = int(gradient.argmax()) if n else 0
        if not n or gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            z = np.zeros(n)
            z[passive] = np.linalg.solve(gram[np.ix_(passive, passive)], right[passive])
            if (z[passive] > 0).all():
                x = z
                break
            falling = passive & (z <= 0)
            share = float((x[falling] / np.maximum(x[falling] - z[falling], 1e-300)).min())
            x = x + share * (z - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
            if not passive.any():
                break
    return x
