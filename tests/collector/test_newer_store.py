"""F41: a store of a newer release, by its schema or by its storage, is refused with a remedy, and not a byte of it is written."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from serving import phasewise

from phasewise.collector.store import Store
from phasewise.rules.errors import MachineError

NEWER = """
import os, signal, sys
from pathlib import Path
from phasewise.collector.store import Store

store = Store(Path(sys.argv[1]))
store.checkpoint()
with store.write() as transaction:
    transaction.execute("INSERT INTO counters BY NAME SELECT 'spans' AS name, '' AS label, 7 AS value")
    transaction.execute("INSERT INTO schema_version VALUES (99, 0)")
if sys.argv[2] == "closed":
    store.close()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
_STORAGE_VERSION_AT = 12  # of the file's first header: a number of 8 bytes, behind a checksum and "DUCK"


def contents(folder: Path) -> dict[str, tuple[str, int, int, int]]:
    """Every file below a folder: hash, time of the last change, size, mode."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (digest, stat.st_mtime_ns, stat.st_size, stat.st_mode)
    return found


def checksum(content: bytes) -> bytes:
    """DuckDB's, of bytes that are a multiple of eight."""
    found = 5381
    for (word,) in struct.iter_unpack("<Q", content):
        found ^= word * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    return struct.pack("<Q", found)


def made(data: Path, left: str) -> Path:
    """A store whose schema is newer, as an orderly end or kill -9 left it: with what is newer in its log alone."""
    path = data / "phasewise.duckdb"
    done = subprocess.run(
        [sys.executable, "-c", NEWER, path, left], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == (0 if left == "closed" else -signal.SIGKILL)
    assert (path.with_name("phasewise.duckdb.wal").exists()) == (left == "killed")
    return path


@pytest.mark.parametrize("left", ["closed", "killed"])
def test_a_newer_schema_is_refused_and_nothing_is_written(tmp_path: Path, left: str) -> None:
    data = tmp_path / "data"
    path = made(data, left)
    before = contents(data)
    with pytest.raises(MachineError, match=r"newer release \(schema 99.*upgrade"):
        Store(path)
    assert contents(data) == before


def test_a_newer_storage_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "data" / "phasewise.duckdb"
    Store(path).close()
    data = bytearray(path.read_bytes())
    assert data[8:12] == b"DUCK"
    assert checksum(bytes(data[8:4096])) == data[:8], "DuckDB sums its headers otherwise now"
    data[_STORAGE_VERSION_AT] = 250
    data[:8] = checksum(bytes(data[8:4096]))
    path.write_bytes(bytes(data))
    before = contents(path.parent)
    with pytest.raises(MachineError, match=r"another release \(storage 250.*upgrade phasewise"):
        Store(path)
    assert contents(path.parent) == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["analyze", "db check", "serve"])
def test_every_verb_refuses_it_with_exit_4(tmp_path: Path, verb: str) -> None:
    data = tmp_path / "data"
    path = made(data, "killed")
    before = {name: told for name, told in contents(data).items() if name.startswith(path.name)}
    ports = ("--port", "0", "--otlp-grpc-port", "0", "--otlp-http-port", "0") if verb == "serve" else ()
    done = phasewise(*verb.split(), "--data", data, *ports)
    assert done.returncode == 4
    assert "newer release" in done.stderr and "upgrade phasewise" in done.stderr
    assert {name: told for name, told in contents(data).items() if name.startswith(path.name)} == before
