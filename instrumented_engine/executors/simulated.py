"""An executor that computes nothing but time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from phasewise.instrumented_engine.executors.time_law import TimeLaw
from phasewise.instrumented_engine.plan import StepOutcome, StepPlan
from phasewise.instrumented_engine.recording import Floats, Ints, composition

BLOCK_STEPS = 1024  # noise is drawn for this many steps at once


class SimulatedExecutor:
    """Executor: a step takes what the law says, times noise that belongs to (seed, step number).

    Nothing is remembered from step to step, so a rerun meets the same noise at the same step number whatever it ran before.
    """

    def __init__(self, law: TimeLaw, seed: int) -> None:
        self.law = law
        self.seed = seed
        # Of a log-normal with mean 1 and this coefficient of variation.
        self._sigma = math.sqrt(math.log1p(law.deployment.noise_ratio**2))
        self._block = -1
        self._noise: list[float] = []

    def execute(self, plan: StepPlan) -> StepOutcome:
        block, index = divmod(plan.number, BLOCK_STEPS)
        if block != self._block:
            self._block, self._noise = block, self._draw(block).tolist()
        seconds = self.law.seconds(composition(plan)) * self._noise[index]
        return StepOutcome(duration_ns=max(1, round(seconds * 1e9)))

    def noise(self, steps: Ints) -> Floats:
        """Factors of these step numbers: log-normal, mean 1, coefficient of variation `noise_ratio`."""
        blocks, indices = np.divmod(np.asarray(steps, dtype=np.int64), BLOCK_STEPS)
        factors = np.empty(len(blocks), dtype=np.float64)
        for block in np.unique(blocks):
            here = blocks == block
            factors[here] = self._draw(int(block))[indices[here]]
        return factors

    def _draw(self, block: int) -> npt.NDArray[np.float64]:
        # A counter-based generator: the key is the seed, the counter the block, so no block depends on another.
        generator = np.random.Generator(np.random.Philox(key=self.seed % 2**64, counter=[0, 0, 0, block]))
        return np.exp(generator.standard_normal(BLOCK_STEPS) * self._sigma - self._sigma**2 / 2)
