"""Data-parallel ranks are ranks of one deployment."""

from __future__ import annotations

import numpy as np

from phasewise.analyzer.queueing import Samples, slot_limit
from phasewise.collector.context import Setting
from phasewise.rules.engine_settings import RANKS


def test_the_slots_of_ranks_add_up() -> None:
    """A scheduler's limit is one rank's; what runs is counted over all ranks of the deployment."""
    few = Samples(
        *(np.array(values) for values in ([0.0, 1.0], [60.0, 64.0], [5.0, 5.0], [0.1, 0.1], [0.0, 0.0], [0.0, 0.0]))
    )
    one = {"effective_max_num_seqs": Setting(32, "server_info")}
    assert slot_limit(one, few, None, None).value == 32
    assert slot_limit(one | {RANKS: Setting(2, "scrape")}, few, None, None).value == 64
    total = {"max_num_seqs": Setting(64, "server_info"), RANKS: Setting(2, "scrape")}
    assert slot_limit(total, few, None, None).value == 64, "SGLang's argument is that of the whole deployment"
