"""Reading the `[measured]` table of an accelerator, as `phasewise calibrate` writes it."""

from __future__ import annotations

from types import MappingProxyType

from phasewise.rules.measured import Measured, Rate
from phasewise.rules.schema import DTYPES
from phasewise.rules.toml_table import TomlTable

STREAMS: tuple[str, ...] = ("copy", "triad")


def read_measured(root: TomlTable) -> Measured:
    """How the achieved figures of the file came about; each with its spread."""
    versions = root.table("versions")
    found = Measured(
        date=root.day("date"),
        device=root.text("device"),
        products=MappingProxyType(_rates(root.table("product"), DTYPES)),
        streams=MappingProxyType(_rates(root.table("stream"), STREAMS)),
        versions=MappingProxyType({name: versions.text(name) for name in versions.keys()}),  # noqa: SIM118 (not a dict)
        threads=root.count_or_none("threads"),
        notes=root.texts("notes"),
    )
    root.finish()
    return found


def _rates(table: TomlTable, known: tuple[str, ...]) -> dict[str, Rate]:
    found = {name: _rate(part) for name in known if (part := table.table_or_none(name)) is not None}
    table.finish()
    return found


def _rate(table: TomlTable) -> Rate:
    found = Rate(
        median=table.positive("median"),
        p10=table.positive("p10"),
        p90=table.positive("p90"),
        least=table.positive("least"),
        most=table.positive("most"),
        repeats=table.count("repeats"),
        shape=table.text("shape"),
    )
    table.finish()
    if not found.least <= found.p10 <= found.median <= found.p90 <= found.most:
        raise table.error("median", "least, p10, median, p90 and most are not in order")
    if found.repeats < 1:
        raise table.error("repeats", "must be at least 1")
    return found
