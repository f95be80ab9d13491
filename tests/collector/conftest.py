"""What tests of the receiver share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from receive_process import Receiving, receiving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    with receiving(tmp_path_factory.mktemp("receive")) as process:
        yield process
        assert process.process.poll() is None, "the process did not survive"
        found = process.counters()
        for kind in ("spans", "metrics"):
            items = found[kind]
            lost = sum(items["rejected"].values()) + sum(items["refused"].values())
            assert items["received"] == items["stored"] + lost + items["in_flight"]
            assert items["in_flight"] == 0
            assert items["stored"] == len(process.stored(kind))
