"""The libraries of the store process: as few threads as its small frames are worth, unless its operator says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASKED = """
import sys
from phasewise.dashboard.commands.store_process import set_up_libraries
assert not {"polars", "pyarrow", "duckdb"} & set(sys.modules)
set_up_libraries()
import polars
print(polars.thread_pool_size())
"""


@pytest.mark.parametrize(("told", "threads"), [({}, "1"), ({"POLARS_MAX_THREADS": "3"}, "3")])
def test_polars_has_one_thread_where_nobody_says_otherwise(told: dict[str, str], threads: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "POLARS_MAX_THREADS"} | told
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.strip() == threads
