"""`phasewise export`: what is stored, or a part of it, into a folder of Parquet files that `phasewise ingest` takes back."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.dashboard.commands.connection import open_data, server_of
from phasewise.dashboard.commands.progress import progress
from phasewise.rules.errors import InputError, MachineError

if TYPE_CHECKING:
    import pyarrow as pa

NO_DATA = 3
Page = Callable[[str, str], "tuple[pa.Table, str]"]  # table and cursor to rows and the next cursor


def run(options: Namespace) -> int:
    """Exit code 3 where nothing of it is stored."""
    from phasewise.analyzer.window import parse_filter
    from phasewise.dashboard import exporting

    now = time.time_ns()
    filters = [parse_filter(text) for text in options.filter]
    chosen = exporting.selection_of(options.start, options.end, filters, now)
    _require_empty(options.out)
    server = server_of(options)
    if server is not None:
        asked = [("f", text) for text in options.filter]
        asked += [("from", str(chosen.from_unix_ns))] if options.start else []
        asked += [("to", str(chosen.to_unix_ns))] if options.end else []

        def page(table: str, cursor: str) -> tuple[pa.Table, str]:
            body, headers = server.fetch(f"/api/v1/export/{table}", [*asked, ("cursor", cursor)])
            return exporting.of_bytes(body), headers.get("x-next-cursor", headers.get("X-Next-Cursor", ""))

        written = _write(options.out, page, chosen)
    else:
        with open_data(options.data) as local:

            def page_here(table: str, cursor: str) -> tuple[pa.Table, str]:
                return exporting.page_of(local.reader, options.data, table, chosen, cursor)

            written = _write(options.out, page_here, chosen)
    if options.json:
        print(json.dumps(written, indent=2))
    else:
        counted = ", ".join(f"{entry['rows']:,} {entry['table']}" for entry in written["files"])
        print(f"wrote {counted or 'nothing'} to {options.out}")
    if not written["files"]:
        print("phasewise: nothing of that is stored", file=sys.stderr)
        return NO_DATA
    return 0


def _write(out: Path, page: Page, chosen: Any) -> dict[str, Any]:
    from phasewise.collector.exchange_folder import FolderWriter, Traces
    from phasewise.dashboard.exporting import NAMES

    traces = Traces(chosen)
    try:
        with FolderWriter(out) as folder, progress("exporting") as advance:
            for table in NAMES:
                cursor = ""
                while True:
                    rows, cursor = page(table, cursor)
                    folder.add(table, traces.selected(table, rows))
                    advance(rows.num_rows)
                    if not cursor:
                        break
            return folder.finish()
    except OSError as error:
        raise MachineError(
            f"{out}: {(error.strerror or str(error)).lower()} (choose another folder with --out)"
        ) from None


def _require_empty(out: Path) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError("--out", str(out), "is not an empty folder", "name a new one")
    except OSError as error:
        raise MachineError(
            f"{out}: {(error.strerror or str(error)).lower()} (choose another folder with --out)"
        ) from None
