"""The compiled trace scanner for tests; its code is kept where conftest.py says, so that only the first run compiles."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from phasewise.collector.scanners import Scan, cache_folder, load


@cache
def compiled_scan() -> Scan:
    return load(cache_folder(Path(os.environ["NUMBA_CACHE_DIR"])))
