"""F09: a bit that turned in any block of the database's file that is used, in its headers, a file cut in half, a block of zeros. It is
found, said offline and at the start, put aside, and made anew from the journal; the cold tier is as it was."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from call_trees import body, tree
from serving import phasewise
from writing import NOW, SECOND, Bench, bench, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.integrity import check
from phasewise.collector.recovery import FILE, open_store
from phasewise.collector.salvage import salvage
from phasewise.collector.scan import scan_traces
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.collector.writer import Writer
from phasewise.rules.errors import MachineError

CALLS = {"slow": 12_000, "nightly": 36_000}  # of today
HEADERS_BYTES, BLOCK_BYTES = 3 * 4096, 262_144
BLOCKS = {"slow": 4, "nightly": 50}
COLUMNS = "* EXCLUDE (received_unix_ns, revision)"
Damage = Callable[[Path], None]


def take(b: Bench, calls: range, from_unix_ns: int) -> None:
    for first in range(calls.start, calls.stop, 500):
        numbers = range(first, min(calls.stop, first + 500))
        spans = [span for n in numbers for span in tree(n, from_unix_ns + (n - calls.start) * 10**8)]
        b.journal.append("spans", scan_traces(body(spans), b.clock.now).rows)
        b.journal.sync()
        while b.writer.step() or b.writer.behind:
            pass


def filled(folder: Path, calls: int) -> Path:
    """An hour that is sealed, and calls of today in many blocks, after an orderly end."""
    folder.mkdir()
    with bench(folder, attribute=attributor(rulebook())) as b:
        take(b, range(300), NOW - 6 * 3600 * SECOND)
        b.run(4 * 3600.0)
        b.run(700.0)
        assert sum(Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now)) >= 1
        b.clock.now = NOW + 7200 * SECOND
        take(b, range(300, 300 + calls), NOW)
        b.store.checkpoint()
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("damaged") / "data", CALLS["slow"])


@pytest.fixture(scope="module")
def used(stopped: Path) -> list[int]:
    return used_blocks(stopped)


def used_blocks(stopped: Path) -> list[int]:
    """Numbers of the blocks that rows or what leads to them stand in."""
    with Store(stopped / FILE) as store:
        tables = store.query("SELECT table_name AS t FROM duckdb_tables() WHERE schema_name = 'main'")["t"]
        found: set[int] = set()
        for table in tables:
            told = store.query(f"SELECT block_id, additional_block_ids FROM pragma_storage_info('main.{table}')")
            found |= set(told["block_id"].drop_nulls()) | set(told["additional_block_ids"].explode().drop_nulls())
        found |= set(store.query("SELECT block_id FROM pragma_metadata_info('phasewise')")["block_id"])
        return sorted(block for block in found if block >= 0)


def rows(store: Store) -> pl.DataFrame:
    return store.query(f"SELECT {COLUMNS} FROM requests ORDER BY request_key").select(
        "request_key", "instance", "model", "e2e_s", "entry_e2e_s", "queue_s", "prefill_s", "decode_s", "input_tokens"
    )


def hashes(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("cold/**/*.parquet")}


def place_of(block: int) -> int:
    return HEADERS_BYTES + block * BLOCK_BYTES


def flip(at: int, bit: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))

    return damage


def half(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def zeros(block: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(place_of(block))
            file.write(bytes(BLOCK_BYTES))

    return damage


def assert_found_and_made_anew(stopped: Path, data: Path, damage: Damage, told: str, must: bool = True) -> bool:
    """Whether it was found; must: else what it hit was used by nothing, and all that is read is as it was."""
    shutil.copytree(stopped, data)
    with Store(stopped / FILE) as store:
        before = rows(store)
    cold = hashes(stopped)
    damage(data / FILE)
    offline = check(data)
    clock = lambda: NOW + 20_000 * SECOND  # noqa: E731
    try:
        store, _ = open_store(data, clock, "fail")
        with store:
            assert not must and offline["ok"], f"{told}: not found ({offline['faults']})"
            assert rows(store).equals(before), told
        return False
    except DamagedStore:
        assert not offline["ok"] and str(data / FILE) in str(offline["faults"]), told
    assert not (data / "quarantine").exists()
    store, said = open_store(data, clock)
    with store:
        assert "a new one holds" in said, told
        assert (next((data / "quarantine").iterdir()) / FILE).exists()
        writer = Writer(store, data, rulebook(), attributor(rulebook()), clock=clock)
        writer.report_loss(said)
        assert store.query("SELECT count(*) AS n FROM requests")["n"].item() > 0  # those of the cold tier, at once
        while writer.step() or writer.behind:
            pass
        health: Any = writer.health()
        assert said in health["losses"], told
        assert rows(store).equals(before), told
    assert list(hashes(data).values()) == list(cold.values())
    return True


def damage_blocks(stopped: Path, folder: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    for block in draw.sample(used_blocks(stopped), count):
        at = place_of(block) + draw.randrange(BLOCK_BYTES)
        data = folder / f"block-{block}"
        assert_found_and_made_anew(
            stopped, data, flip(at, draw.randrange(8)), f"byte {at} of block {block}, seed {seed}"
        )
        shutil.rmtree(data)


@pytest.mark.slow
def test_a_bit_in_a_few_blocks_is_found(stopped: Path, tmp_path: Path) -> None:
    damage_blocks(stopped, tmp_path, BLOCKS["slow"], random.randrange(2**32))


@pytest.mark.nightly
def test_a_bit_in_each_of_fifty_blocks_is_found(tmp_path: Path) -> None:
    stopped = filled(tmp_path / "data", CALLS["nightly"])
    damage_blocks(stopped, tmp_path, BLOCKS["nightly"], random.randrange(2**32))


@pytest.mark.slow
def test_a_bit_in_a_header_is_found_or_hits_what_is_not_in_use(stopped: Path, tmp_path: Path) -> None:
    """Of three headers the first says what the file is; of the others the newer counts."""
    found = [
        assert_found_and_made_anew(stopped, tmp_path / f"header-{at}", flip(at, 3), f"byte {at}", must=at < 4096)
        for at in (9, 20, 4096 + 20, 8192 + 20)
    ]
    assert found[:2] == [True, True]


@pytest.mark.slow
def test_half_a_file_and_a_block_of_zeros_are_found(stopped: Path, used: list[int], tmp_path: Path) -> None:
    assert_found_and_made_anew(stopped, tmp_path / "half", half, "half")
    block = used[len(used) // 2]
    assert_found_and_made_anew(stopped, tmp_path / "zeros", zeros(block), f"block {block}")


@pytest.mark.slow
def test_what_can_be_read_of_a_damaged_file_is_exported_and_taken_back(
    stopped: Path, used: list[int], tmp_path: Path
) -> None:
    """Of every block in turn, until one cost a row: what is written is what was stored, or unknown; what is not is counted."""
    with Store(stopped / FILE) as store:
        before = store.query(f'SELECT {COLUMNS} FROM main."requests" ORDER BY request_key')
    whole = 0
    for block in used:
        file = tmp_path / f"{block}.duckdb"
        shutil.copyfile(stopped / FILE, file)
        flip(place_of(block) + 9000, 4)(file)
        damaged = file.read_bytes()
        out = tmp_path / f"out-{block}"
        try:
            told: Any = salvage(file, out)
        except MachineError as error:
            assert "none of them can" in str(error)
            continue
        assert file.read_bytes() == damaged
        assert sorted(p.name for p in out.iterdir() if p.suffix != ".parquet") == ["manifest.json"]
        requests = told["tables"]["requests"]
        assert requests["rows"] + requests["lost"] == before.height, told
        if requests["rows"]:
            found = pl.read_parquet(out / "requests.parquet").sort("request_key")
            kept = before.join(found.select("request_key"), on="request_key", how="semi")
            for column in kept.columns:
                same = kept[column].eq_missing(found[column])
                unknown = found[column].is_null() if column in requests["unknown"] else ~same & same
                assert (same | unknown).all(), column
            whole += not requests["lost"]
        file.unlink()
    assert whole >= len(used) // 2  # most blocks hold values of a column
    last = tmp_path / f"out-{used[-1]}"
    folder = next(p for p in [last, *sorted(tmp_path.glob("out-*"))] if (p / "requests.parquet").exists())
    done = phasewise("ingest", "--data", tmp_path / "new", folder)
    assert done.returncode == 0, done.stderr
    with Store(tmp_path / "new" / FILE) as store:
        rows_again = store.query("SELECT count(*) AS n FROM requests")["n"].item()
    assert rows_again == pl.read_parquet(folder / "requests.parquet").height


@pytest.mark.slow
def test_a_file_that_leads_nowhere_is_said(stopped: Path, tmp_path: Path) -> None:
    file = tmp_path / FILE
    shutil.copyfile(stopped / FILE, file)
    flip(20, 3)(file)  # of what the file says it is
    done = phasewise("db", "salvage", file, "--out", tmp_path / "out")
    assert done.returncode == 4 and "none of them can" in done.stderr
    missing = phasewise("db", "salvage", tmp_path / "none", "--out", tmp_path / "out")
    assert missing.returncode == 2 and "is no file" in missing.stderr


@pytest.mark.slow
def test_the_command_says_the_same_with_exit_1(stopped: Path, used: list[int], tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(stopped, data)
    assert phasewise("db", "check", "--data", data).returncode == 0
    flip(place_of(used[len(used) // 3]) + 5000, 0)(data / FILE)
    done = phasewise("db", "check", "--data", data)
    assert done.returncode == 1
    assert f"FAIL  {data / FILE}" in done.stderr
