"""Every step's duration by cause, as a sequence sees it that only decodes in it, and the model behind it.

A sequence that decodes loses to others' prompts what the step would be shorter without them; the rest is split by resource. A
duration far above what the same composition takes otherwise is the engine's cold start where the step is the first of its kind
after the engine began, else the host's: no work of the model made it longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.composition import Chunks
from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.machine import Machine
from phasewise.analyzer.step_bounds import Bounds, bounds_of
from phasewise.analyzer.step_fit import Composition, StepModel, fit_steps
from phasewise.analyzer.step_parts import PARTS, Prompt, split
from phasewise.analyzer.step_table import Ints, StepTable, means_near

Which = Bools | slice
BLOCK = 32_768  # chunks looked at together: what is computed of them stays near the processor
HOUR_STEPS = 200  # fewer in an hour: fitted with all others in sight
OUTLIER_RATIO, OUTLIER_SPREADS = 0.5, 6.0  # beyond the prediction by both: no noise of a step
COLD_RATIO, COLD_SPREADS = 0.15, 4.0  # the same for steps that may be an engine's first
COLD_RUN, COLD_STEPS = 8, 1024  # the start is over when most of so many steps in a row are as later; at the latest then
LATER_RATIO = 1.5  # over the quicker ones of the later half of its kind: not fitted
FIRST_OF_KIND = 3  # steps of one kind (powers of two of sequences and prompt tokens) after the start
NEAR_STEPS, NEAR_COUNT = 64, 4  # pure decode steps around a mixed one that tell how far the fit is off there
CAUSES = (
    "decode.compute", "decode.weights", "decode.kv", "prefill.attention_io", "host", "communication.node", "interference",
    "cold_start",
)  # fmt: skip
_OF_PART = {
    "compute": "decode.compute", "weights": "decode.weights", "kv": "decode.kv", "attention_io": "prefill.attention_io",
    "host": "host", "communication": "communication.node",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTimes:
    """by_cause: seconds of each step by CAUSES, adding up to its duration. regular: duration without excess; excess: seconds
    above the prediction, cold or not; fixed: seconds a larger batch would not add to; whole: composition of each step;
    models: of each clock hour, and which hour a step is in."""

    by_cause: Floats  # [causes, n]
    regular: Floats
    excess: Floats
    cold: Bools
    fixed: Floats
    whole: Composition
    models: tuple[StepModel, ...]
    model_of: Ints
    built: Machine


def step_times(table: StepTable, chunks: Chunks, built: Machine) -> StepTimes:
    """Fits the instance's steps and splits each of them."""
    whole = _composition(table, chunks)
    models, model_of = _models(table, whole, bounds_of(built))
    predicted = _by_model(models, model_of, lambda model, which: model.seconds(whole.at(which)))
    spread = np.array([model.spread_ratio for model in models])[model_of]
    excess, cold = _excess(table, predicted, spread)
    regular = table.duration - excess
    bare = Composition(
        tokens=whole.sequences,
        sequences=whole.sequences,
        context=whole.context,
        pairs=np.zeros(len(table)),
        prefilling=np.zeros(len(table)),
    )
    without = _by_model(models, model_of, lambda model, which: model.seconds(bare.at(which)))
    others = _others_s(table, predicted, without, regular, spread)
    shares = np.zeros((len(PARTS), len(table)))
    for model, here in _with_rows(models, model_of):
        shares[:, here] = split(model, built, bare.at(here)).shares()
    by_cause = np.zeros((len(CAUSES), len(table)))
    for part, seconds in zip(PARTS, shares * (regular - others), strict=True):
        by_cause[CAUSES.index(_OF_PART[part])] += seconds
    by_cause[CAUSES.index("interference")] += others
    by_cause[CAUSES.index("cold_start")] += np.where(cold, excess, 0.0)
    by_cause[CAUSES.index("host")] += np.where(cold, 0.0, excess)
    return StepTimes(
        by_cause,
        regular,
        excess,
        cold,
        _fixed_s(models, model_of, whole, predicted, regular),
        whole,
        models,
        model_of,
        built,
    )


def own_prefill(table: StepTable, times: StepTimes, chunks: Chunks) -> tuple[Floats, Floats]:
    """The step of each chunk as its own request sees it: seconds that others' prompt tokens take, and the rest by PARTS.

    Both leave out the excess of the step. Others' tokens take what the step would be shorter without them.
    """
    others, rest = np.zeros(len(chunks.step)), np.zeros((len(PARTS), len(chunks.step)))
    for low in range(0, len(chunks.step), BLOCK):
        block = slice(low, low + BLOCK)
        _own_prefill(table, times, chunks.at(block), others[block], rest[:, block])
    return others, rest


def _own_prefill(table: StepTable, times: StepTimes, chunks: Chunks, others: Floats, rest: Floats) -> None:
    """The same into `others` and `rest`."""
    step = chunks.step
    whole = times.whole.at(step)
    own = Composition(
        tokens=chunks.tokens + whole.sequences,
        sequences=whole.sequences,
        context=whole.context,
        pairs=chunks.pairs,
        prefilling=np.ones(len(step)),
    )
    alone = chunks.tokens >= table.prefill_tokens[step] * (1 - 1e-9)
    for model, here in _with_rows(times.models, times.model_of[step]):
        with_all, without = model.seconds(whole.at(here)), model.seconds(own.at(here))
        share = np.divide(with_all - without, with_all, out=np.zeros_like(with_all), where=with_all > 0)
        regular = times.regular[step[here]]
        others[here] = np.where(alone[here], 0.0, np.clip(share, 0.0, 1.0)) * regular
        prompt = Prompt(past=chunks.past[here], pairs=own.pairs[here])
        rest[:, here] = split(model, times.built, own.at(here), prompt).shares() * (regular - others[here])


def prompt_costs(table: StepTable, times: StepTimes, chunks: Chunks) -> tuple[Floats, Floats]:
    """What each chunk adds to its step, and what the prompt tokens of nobody in sight add to each step: seconds that the fit says the
    step would be shorter without them, tokens where it says that of none in the step. To be held against each other only.

    chunks: of all requests, those that `times` was found from.
    """
    known = np.bincount(chunks.step, weights=chunks.tokens, minlength=len(table))
    hidden = np.clip(table.prefill_tokens - known, 0.0, None)
    hidden = np.where(hidden > 0.5, hidden, 0.0)
    own = np.zeros(len(chunks.step))
    for low in range(0, len(chunks.step), BLOCK):
        block = chunks.at(slice(low, low + BLOCK))
        own[low : low + BLOCK] = _added_s(table, times, block.step, block.tokens, block.pairs)
    rest = _added_s(table, times, np.arange(len(table)), hidden, hidden * (hidden + 1) / 2)
    told = np.bincount(chunks.step, weights=own, minlength=len(table)) + rest > 0
    return np.where(told[chunks.step], own, chunks.tokens), np.where(told, rest, hidden)


def _added_s(table: StepTable, times: StepTimes, step: Ints, tokens: Floats, pairs: Floats) -> Floats:
    """Seconds by which each of some steps would be shorter without so many of its prompt tokens."""
    whole = times.whole.at(step)
    alone = tokens >= table.prefill_tokens[step] * (1 - 1e-9)
    without = Composition(
        tokens=np.clip(whole.tokens - tokens, 0.0, None),
        sequences=whole.sequences,
        context=whole.context,
        pairs=np.clip(whole.pairs - pairs, 0.0, None),
        prefilling=np.where(alone, 0.0, whole.prefilling),
    )
    found = np.zeros(len(step))
    for model, here in _with_rows(times.models, times.model_of[step]):
        found[here] = np.clip(model.seconds(whole.at(here)) - model.seconds(without.at(here)), 0.0, None)
    return np.where(tokens > 0, found, 0.0)


def _composition(table: StepTable, chunks: Chunks) -> Composition:
    """All that a step computed; prompt tokens of requests that are not in sight (still running) count as prompts' beginnings."""
    known = np.bincount(chunks.step, weights=chunks.tokens, minlength=len(table))
    pairs = np.bincount(chunks.step, weights=chunks.pairs, minlength=len(table))
    hidden = np.clip(table.prefill_tokens - known, 0.0, None)
    hidden = np.where(hidden > 0.5, hidden, 0.0)
    return Composition(
        tokens=table.prefill_tokens + table.sequences,
        sequences=table.sequences,
        context=np.where(table.sequences > 0, table.context_tokens, 0.0),
        pairs=pairs + hidden * (hidden + 1) / 2,
        prefilling=(table.prefill_tokens > 0).astype(np.float64),
    )


def _models(table: StepTable, whole: Composition, bounds: Bounds | None) -> tuple[tuple[StepModel, ...], Ints]:
    """Fits without the engine's start: first without what is far slower than later steps of its kind, then without what is slower
    than that fit says."""
    slow = _slower_than_later(table)
    models, model_of = _hourly(table, whole, ~slow, bounds)
    if not slow.any():
        return models, model_of
    predicted = _by_model(models, model_of, lambda model, which: model.seconds(whole.at(which)))
    spread = np.array([model.spread_ratio for model in models])[model_of]
    _, cold = _excess(table, predicted, spread)
    return _hourly(table, whole, ~cold, bounds)


def _hourly(
    table: StepTable, whole: Composition, usable: Bools, bounds: Bounds | None
) -> tuple[tuple[StepModel, ...], Ints]:
    """One model a clock hour with enough steps, so that what is calibrated does not depend on what else is in sight; one for
    all other hours together."""
    works = usable & (whole.tokens > 0) & (table.duration > 0)
    if not works.any():
        idle = StepModel(0.0, 0.0, 0.0, 0.0, 0.0, (), (), 1.0, 0, 0.0, 0.0, float("inf"), bounds)
        return (idle,), np.zeros(len(table), dtype=np.int64)
    models: list[StepModel] = []
    which = np.full(len(table), -1, dtype=np.int64)
    for hour in np.unique(table.hour):
        here = table.hour == hour
        if (here & works).sum() >= HOUR_STEPS:
            which[here] = len(models)
            models.append(fit_steps(whole.at(here & works), table.duration[here & works], bounds))
    if (which < 0).any():
        which[which < 0] = len(models)
        models.append(fit_steps(whole.at(works), table.duration[works], bounds))
    return tuple(models), which


def _slower_than_later(table: StepTable) -> Bools:
    """Steps after the engine's start that take far longer than the later half of the steps of their kind; none where the start is
    not in sight."""
    slow = np.zeros(len(table), dtype=np.bool_)
    if not len(table) or table.number[0] != 0:
        return slow
    kind, _ = _kinds(table)
    for one in np.unique(kind[:COLD_STEPS]):
        alike = np.flatnonzero(kind == one)
        later = table.duration[alike[len(alike) // 2 :]]
        slow[alike] = table.duration[alike] > LATER_RATIO * np.quantile(later, 0.25)
    slow[COLD_STEPS:] = False
    return slow


def _by_model(models: tuple[StepModel, ...], model_of: Ints, answer: Callable[[StepModel, Which], Floats]) -> Floats:
    """What each step's own model answers for it."""
    found = np.zeros(len(model_of))
    for model, here in _with_rows(models, model_of):
        found[here] = answer(model, here)
    return found


def _with_rows(models: tuple[StepModel, ...], model_of: Ints) -> Iterator[tuple[StepModel, Which]]:
    """Each model and where it is asked; one that answers for all is given no copies."""
    if len(models) == 1:
        yield models[0], slice(None)
        return
    for k, model in enumerate(models):
        yield model, model_of == k


def _excess(table: StepTable, predicted: Floats, spread: Floats) -> tuple[Floats, Bools]:
    """Seconds above the prediction that are no noise, and which of these steps are the engine's first of their kind."""
    over = np.divide(table.duration, predicted, out=np.ones(len(table)), where=predicted > 0) - 1.0
    noise = np.maximum(COLD_RATIO, COLD_SPREADS * spread)
    first = _first_steps(table, over > noise)
    limit = np.where(first, noise, np.maximum(OUTLIER_RATIO, OUTLIER_SPREADS * spread))
    beyond = over > limit
    return np.where(beyond, table.duration - predicted, 0.0), np.asarray(beyond & first, dtype=np.bool_)


def _first_steps(table: StepTable, slow: Bools) -> Bools:
    """Steps of the engine's start: from its first on while most steps ahead are slow, and the first few of each kind.

    Nothing where the start is not in sight: the first step we know of a kind is then not the engine's first.
    """
    first = np.zeros(len(table), dtype=np.bool_)
    if not len(table) or table.number[0] != 0:
        return first
    early = slow[:COLD_STEPS]
    ahead = np.convolve(early, np.ones(COLD_RUN), mode="full")[COLD_RUN - 1 :]  # slow ones among the next few
    for over in (ahead <= COLD_RUN / 2, ~early):  # a short start has fewer steps than the run that ends it
        ends = np.flatnonzero(over)
        first[: int(ends[0]) if len(ends) else len(early)] = True
    _, rank = _kinds(table)
    return np.asarray(first | (rank < FIRST_OF_KIND), dtype=np.bool_)


def _kinds(table: StepTable) -> tuple[Ints, Ints]:
    """Kind of each step, by powers of two of its sequences and prompt tokens, and how many of the kind came before it."""
    both = _power(table.sequences) * 64 + _power(table.prefill_tokens)
    names, kind = np.unique(both, return_inverse=True)
    order = np.argsort(kind, kind="stable")
    begins = np.searchsorted(kind[order], np.arange(len(names)))
    rank = np.empty(len(table), dtype=np.int64)
    rank[order] = np.arange(len(table)) - begins[kind[order]]
    return kind.astype(np.int64), rank


def _power(values: Floats) -> Ints:
    return np.ceil(np.log2(np.maximum(values, 0.5))).astype(np.int64)


def _others_s(table: StepTable, predicted: Floats, without: Floats, regular: Floats, spread: Floats) -> Floats:
    """Seconds of each step that its prompt tokens add, for sequences that only decode in it.

    What was measured beyond the pure decode steps around, scaled to this step's sequences and context, and what the fit says,
    weighed by how far the noise of one step lets the first be trusted. A step without decoding is its prompts' alone.
    """
    mixed = table.prefill_tokens > 0
    pure = ~mixed & (table.sequences > 0) & (predicted > 0)
    ratio = np.divide(regular, predicted, out=np.ones(len(table)), where=predicted > 0)
    near = np.nan_to_num(means_near(pure, ratio, NEAR_STEPS, NEAR_COUNT), nan=1.0)
    fitted = regular * np.divide(predicted - without, predicted, out=np.zeros(len(table)), where=predicted > 0)
    seen = regular - near * without
    trust = np.divide(fitted**2, fitted**2 + (spread * regular) ** 2, out=np.zeros(len(table)), where=fitted > 0)
    found = np.clip(trust * seen + (1.0 - trust) * fitted, 0.0, regular)
    found = np.where(table.sequences > 0, found, regular)
    return np.where(mixed, found, 0.0)


def _fixed_s(
    models: tuple[StepModel, ...], model_of: Ints, whole: Composition, predicted: Floats, regular: Floats
) -> Floats:
    """Seconds of each step that would stay the same with more of everything in it: duration less marginal times amounts."""

    def growing(model: StepModel, which: Which) -> Floats:
        made_of = whole.at(which)
        return np.asarray(
            made_of.tokens * model.token_slope_s(made_of.tokens)
            + made_of.sequences * model.sequence_s
            + made_of.context * model.context_slope_s(made_of.context)
            + made_of.pairs * model.pair_s
        )

    grows = _by_model(models, model_of, growing)
    share = np.divide(grows, predicted, out=np.ones(len(predicted)), where=predicted > 0)
    return np.asarray(np.clip(1.0 - share, 0.0, 1.0) * regular)
