"""Reading one `{ text, date, url }` table of a rule file."""

from __future__ import annotations

from phasewise.rules.schema import Source
from phasewise.rules.toml_table import TomlTable


def read_source(table: TomlTable) -> Source:
    source = Source(text=table.text("text"), date=table.day("date"), url=table.text_or_none("url"))
    table.finish()
    return source
