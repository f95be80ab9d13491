"""The tenant of the key that a file was sent with, on what the file held."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pyarrow as pa

from phasewise.collector.importers import Imported
from phasewise.collector.tenants import with_tenant


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
