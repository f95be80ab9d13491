"""The tenant of a key, on the spans and files that came with it: it wins over whatever the sender says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from phasewise.collector.attributes import to_sorted_json

if TYPE_CHECKING:
    from phasewise.collector.importers import Imported

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


def import_with_tenant(imported: Imported, tenant: str) -> Imported:
    """What a file held, as what came with a key: its spans as live ones, and with a tenant also the requests in it. Tables of an export keep
    the tenants they name where the key has none: they are rows as they were stored."""
    spans = with_tenant(imported.spans, tenant) if imported.spans is not None else None
    requests, rows = imported.requests, imported.rows
    if tenant and requests is not None:
        requests = requests.with_columns(pl.lit(tenant).alias("tenant"))
    if tenant and rows is not None:
        if "resource" in rows.column_names:
            rows = with_tenant(rows, tenant)
        if "tenant" in rows.column_names:
            index = rows.schema.get_field_index("tenant")
            rows = rows.set_column(index, rows.schema.field(index), pa.array([tenant] * rows.num_rows, pa.string()))
    return replace(imported, spans=spans, requests=requests, rows=rows)


def _told(resource: str | None, tenant: str) -> str:
    facts = json.loads(resource or "{}")
    facts.pop(KEY_TENANT, None)
    return to_sorted_json(facts | {KEY_TENANT: tenant} if tenant else facts)
