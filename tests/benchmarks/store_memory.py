"""Import before polars and Arrow: this process then uses memory and threads as the process `store` does."""

from __future__ import annotations

from phasewise.collector.process_memory import keep_memory

keep_memory()
