"""What tests of the served engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_engine import Received, grpc_receiver


@pytest.fixture
def receiver() -> Iterator[Received]:
    with grpc_receiver() as received:
        yield received
