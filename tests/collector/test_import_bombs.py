"""Files that are smaller than what they hold, or are no telemetry at all: refused in one sentence, with nothing written."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phasewise.collector.importers import import_bytes, import_file, kind_of
from phasewise.rules.errors import InputError

MIB = 1 << 20


def bomb(size: int) -> bytes:
    """A gzip of so many blanks."""
    return gzip.compress(b" " * size)


def archive() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made:
        for name in ("../../escaped.json", "/tmp/absolute.json", "C:\\drive.json", "ok.json"):
            made.writestr(name, '{"resourceSpans": []}')
        made.writestr("zeros", bytes(8 * MIB))
    return held.getvalue()


def tarball() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as made:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(info)
    return held.getvalue()


def parquet() -> bytes:
    held = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), held)
    return held.getvalue()


def test_what_grows_beyond_the_limit_is_refused_before_it_has_grown(tmp_path: Path) -> None:
    data = bomb(64 * MIB)
    assert len(data) < MIB
    with pytest.raises(InputError, match="holds more than 8 MiB"):
        import_bytes(data, "bomb.json.gz", limit_bytes=8 * MIB)
    nested = gzip.compress(data)
    with pytest.raises(InputError):
        import_bytes(nested, "twice.gz", limit_bytes=8 * MIB)


def test_the_kind_of_a_bomb_is_told_without_unpacking_it(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(bomb(64 * MIB))
    assert kind_of(path) == "spans"  # only its first MiB was looked at: nothing in it is JSON


@pytest.mark.parametrize(
    "data",
    [
        archive(),
        tarball(),
        parquet(),
        gzip.compress(archive()),
        zlib.compress(b"x" * 100),
        b"\x1f\x8b\x08\x00cut",
        bytes(1000),
    ],
    ids=["zip", "tar", "parquet", "zip in gzip", "zlib", "cut gzip", "zeros"],
)
def test_what_is_no_telemetry_is_refused_and_nothing_unpacked(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"file"):
        import_file(path)
    assert list(tmp_path.iterdir()) == [path]
    assert not Path("/tmp/absolute.json").exists() and not (tmp_path.parent / "escaped.json").exists()


@pytest.mark.parametrize("name", ["../../x.json", "/etc/passwd", "C:\\x.json", "a\x00b", "x" * 5000])
def test_the_name_of_an_upload_is_only_a_name(name: str) -> None:
    with pytest.raises(InputError) as raised:
        import_bytes(b"{", name)
    assert raised.value.source == name
