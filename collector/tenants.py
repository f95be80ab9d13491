"""The tenant of a key, on the spans and files that came with it: it wins over whatever the sender says of itself."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc

from phasewise.collector.attributes import to_sorted_json

# A resource attribute, so that it travels with the spans through journal, store and archive without a column of its own.
KEY_TENANT = "phasewise.key.tenant"


def with_tenant(rows: pa.Table, tenant: str) -> pa.Table:
    """Rows of spans with the tenant in their resources; an empty one takes away what a sender may have put there itself."""
    if not rows.num_rows:
        return rows
    index = rows.schema.get_field_index("resource")
    encoded = pc.dictionary_encode(rows["resource"].combine_chunks())
    known = pa.array([_told(text, tenant) for text in encoded.dictionary.to_pylist()], pa.string())
    return rows.set_column(index, rows.schema.field(index), known.take(encoded.indices))


def _told(resource: str | None, tenant: str) -> str:
    facts = json.loads(resource or "{}")
    facts.pop(KEY_TENANT, None)
    return to_sorted_json(facts | {KEY_TENANT: tenant} if tenant else facts)
