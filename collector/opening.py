"""How the file of the store is opened: the settings of the database, the file in it, and what SQL may reach from then on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phasewise.collector.spill import remove_files_of_others, room
from phasewise.collector.transaction import Cursor

STORAGE_VERSION = "v1.5.0"  # so that one release back can still read a file made by this one
CHECKPOINT_THRESHOLD = "256MB"  # by itself, in a commit; the writer makes it sooner, between two passes
# Rows that each table takes before it packs them: those of a wide one lie unpacked in memory until then, and a checkpoint packs them
# again. Fifteen times as many are DuckDB's choice, for tables that are loaded at once.
ROW_GROUP_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Opening:
    """Of the file at `path`. spill_bytes: what temporary files may take; None takes the smaller of 4 GiB and 10 % of what is free."""

    path: Path
    threads: int
    memory_limit: str
    spill_bytes: int | None
    cold_directory: Path

    def settings(self) -> dict[str, str | bool | int | float | list[str]]:
        """Of the database, before the file is in it. Raises OSError where the folder cannot be made or asked for its room."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        spill_bytes = room(self.path.parent) if self.spill_bytes is None else self.spill_bytes
        return {
            "threads": self.threads,
            "memory_limit": self.memory_limit,
            "temp_directory": str(self._temporary),
            "max_temp_directory_size": f"{max(1, spill_bytes)}B",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }

    def attach(self, cursor: Cursor) -> None:
        # A file that is refused is closed as it is: else its log would be moved into it on the way out.
        cursor.execute("PRAGMA disable_checkpoint_on_shutdown")
        cursor.execute(attach_statement(self.path, "phasewise", f", ROW_GROUP_SIZE {ROW_GROUP_ROWS}"))

    def close_off(self, cursor: Cursor) -> None:
        """The file is open: but for the cold tier nothing else on this machine is needed, so nothing else can be reached from SQL."""
        remove_files_of_others(self._temporary)  # of a process that was killed: the file is ours now
        cursor.execute("SET allowed_directories = ?", [[str(self.cold_directory)]])
        cursor.execute("SET enable_external_access = false")
        cursor.execute(f"SET checkpoint_threshold = '{CHECKPOINT_THRESHOLD}'")
        cursor.execute("SET lock_configuration = true")

    @property
    def _temporary(self) -> Path:
        return self.path.parent / "temporary"


def attach_statement(path: Path, name: str, options: str = "") -> str:
    escaped = str(path).replace("'", "''")
    return f"ATTACH '{escaped}' AS {name} (STORAGE_VERSION '{STORAGE_VERSION}'{options})"


def copy_tables(cursor: Cursor) -> None:
    """Every hot table of the store into the file that is attached as `copied`. Deleted rows leave no byte in it."""
    found = cursor.execute(
        "SELECT table_name FROM duckdb_tables() WHERE database_name = 'phasewise' AND schema_name = 'main'"
    ).fetchall()
    for (table,) in sorted(found):
        cursor.execute(f'CREATE TABLE copied.main."{table}" AS FROM phasewise.main."{table}"').fetchall()
