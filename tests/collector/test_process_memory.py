"""How a busy process keeps its memory: it holds for what is imported after it, and the environment may say otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
from phasewise.collector.process_memory import keep_memory
keep_memory()
import polars, pyarrow
print(polars.thread_pool_size(), pyarrow.default_memory_pool().backend_name)
"""


@pytest.mark.parametrize(
    ("told", "expected"),
    [({}, "1 system"), ({"POLARS_MAX_THREADS": "3", "ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}, "3 mimalloc")],
)
def test_it_holds_for_what_is_imported_later_unless_the_environment_says_otherwise(
    told: dict[str, str], expected: str
) -> None:
    own = ("POLARS_MAX_THREADS", "ARROW_DEFAULT_MEMORY_POOL", "_RJEM_MALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in own} | told
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == expected.split()
