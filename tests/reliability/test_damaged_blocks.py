"""F09: a bit that turned in any block of the database's file that is used, in its headers, a file cut in half, a block of zeros. It is
found, said offline and at the start, put aside, and made anew from the journal; the cold tier is as it was.

DuckDB keeps a checksum of each of the three headers and of each block, over all its bytes, and compares it with what it reads. So one turned
bit is found wherever something is read; nothing reads free blocks, and blocks in which only deleted rows stand. Which those are changes with
every checkpoint, and whoever opens a store and closes it makes one: blocks are drawn from the very bytes that are damaged afterwards."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
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
SLOW_BLOCKS = 4  # nightly: each one
AT_LEAST_FOUND = 40  # of those that 36,300 calls take: how many these are depends on when rows were written
COLUMNS = "* EXCLUDE (received_unix_ns, revision)"
Damage = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Stopped:
    """A data folder that nobody opens any more: its copies are damaged. Rows that it holds; blocks in use, and whether they are needed."""

    folder: Path
    rows: pl.DataFrame
    used: dict[int, bool]

    @property
    def needed(self) -> list[int]:
        return [block for block, needed in self.used.items() if needed]


def take(b: Bench, calls: range, from_unix_ns: int) -> None:
    for first in range(calls.start, calls.stop, 500):
        numbers = range(first, min(calls.stop, first + 500))
        spans = [span for n in numbers for span in tree(n, from_unix_ns + (n - calls.start) * 10**8)]
        b.journal.append("spans", scan_traces(body(spans), b.clock.now).rows)
        b.journal.sync()
        while b.writer.step() or b.writer.behind:
            pass


def filled(folder: Path, calls: int) -> Stopped:
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
    opened = folder.with_name("opened")
    shutil.copytree(folder, opened)
    with Store(opened / FILE) as store:
        before = rows(store)
    shutil.rmtree(opened)
    return Stopped(folder, before, blocks_in_use(folder / FILE))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return filled(tmp_path_factory.mktemp("damaged") / "data", CALLS["slow"])


# Where values stand; needed: in a group of rows of which none was deleted. Of other groups a block may hold deleted rows alone.
BLOCKS = """
    WITH stored AS (FROM pragma_storage_info('main.{table}')),
    groups AS (
        SELECT row_group_id, sum(count) AS n, sum(sum(count)) OVER (ORDER BY row_group_id) - sum(count) AS first
        FROM stored WHERE column_path = '[0]' GROUP BY row_group_id
    ),
    whole AS (
        SELECT row_group_id, n = (SELECT count(*) FROM main."{table}" t WHERE t.rowid >= first AND t.rowid < first + n) AS needed
        FROM groups
    )
    SELECT block, bool_or(needed) AS needed FROM (
        SELECT unnest(list_append(coalesce(additional_block_ids, []), block_id)) AS block, needed FROM stored JOIN whole USING (row_group_id)
    ) WHERE block >= 0 GROUP BY block"""


def blocks_in_use(file: Path) -> dict[int, bool]:
    """Numbers of the blocks that rows or what leads to them stand in, and whether something is sure to need it. The file is not changed by
    being asked."""
    asked = file.read_bytes()
    found: dict[int, bool] = {}
    with Store(file, as_it_is=True) as store:
        for table in store.query("SELECT table_name AS t FROM duckdb_tables() WHERE schema_name = 'main'")["t"]:
            for block, needed in store.query(BLOCKS.format(table=table)).rows():
                found[block] = found.get(block, False) or needed
        leading = "SELECT block_id FROM pragma_metadata_info('phasewise') WHERE free_blocks < total_blocks"
        found |= dict.fromkeys(store.query(leading)["block_id"], True)
    assert file.read_bytes() == asked
    return dict(sorted(found.items()))


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


def assert_found_and_made_anew(stopped: Stopped, data: Path, damage: Damage, told: str, must: bool = True) -> bool:
    """Whether it was found; must: else what it hit was used by nothing, and all that is read is as it was."""
    shutil.copytree(stopped.folder, data)
    cold = hashes(stopped.folder)
    damage(data / FILE)
    damaged = (data / FILE).read_bytes()
    offline = check(data)
    clock = lambda: NOW + 20_000 * SECOND  # noqa: E731
    try:
        store, _ = open_store(data, clock, "fail")
        with store:
            assert not must and offline["ok"], f"{told}: not found ({offline['faults']})"
            assert rows(store).equals(stopped.rows), told
        return False
    except DamagedStore:
        assert not offline["ok"] and str(data / FILE) in str(offline["faults"]), told
    assert not (data / "quarantine").exists()
    assert (data / FILE).read_bytes() == damaged, f"{told}: who only looked wrote into it"
    store, said = open_store(data, clock)
    with store:
        assert "a new one holds" in said, told
        assert (next((data / "quarantine").iterdir()) / FILE).read_bytes() == damaged, told
        writer = Writer(store, data, rulebook(), attributor(rulebook()), clock=clock)
        writer.report_loss(said)
        assert store.query("SELECT count(*) AS n FROM requests")["n"].item() > 0  # those of the cold tier, at once
        while writer.step() or writer.behind:
            pass
        health: Any = writer.health()
        assert said in health["losses"], told
        assert rows(store).equals(stopped.rows), told
    assert list(hashes(data).values()) == list(cold.values())
    return True


def damage_blocks(stopped: Stopped, folder: Path, count: int, seed: int) -> int:
    """In how many of so many blocks the bit was found: in each that is needed."""
    print(f"seed {seed}: {count} of {len(stopped.used)} blocks in use, {len(stopped.needed)} of them needed")
    draw = random.Random(seed)
    found = 0
    for block in draw.sample(list(stopped.used), count):
        at = place_of(block) + draw.randrange(BLOCK_BYTES)
        data = folder / f"block-{block}"
        damage, told = flip(at, draw.randrange(8)), f"byte {at} of block {block}, seed {seed}"
        found += assert_found_and_made_anew(stopped, data, damage, told, must=stopped.used[block])
        shutil.rmtree(data)
    return found


@pytest.mark.slow
def test_a_bit_in_a_few_blocks_is_found(stopped: Stopped, tmp_path: Path) -> None:
    assert damage_blocks(stopped, tmp_path, SLOW_BLOCKS, random.randrange(2**32))


@pytest.mark.nightly
def test_a_bit_in_each_block_is_found(tmp_path: Path) -> None:
    stopped = filled(tmp_path / "data", CALLS["nightly"])
    found = damage_blocks(stopped, tmp_path, len(stopped.used), random.randrange(2**32))
    print(f"{found} found of a bit in each of {len(stopped.used)} blocks")
    assert found >= AT_LEAST_FOUND


@pytest.mark.slow
def test_a_bit_in_any_header_is_found(stopped: Stopped, tmp_path: Path) -> None:
    """The first says what the file is; of the others the newer counts, and the older is looked at all the same."""
    for at in (9, 20, 4096 + 20, 8192 + 20):
        assert_found_and_made_anew(stopped, tmp_path / f"header-{at}", flip(at, 3), f"byte {at}")


@pytest.mark.slow
def test_half_a_file_and_a_block_of_zeros_are_found(stopped: Stopped, tmp_path: Path) -> None:
    assert_found_and_made_anew(stopped, tmp_path / "half", half, "half")
    block = stopped.needed[len(stopped.needed) // 2]
    assert_found_and_made_anew(stopped, tmp_path / "zeros", zeros(block), f"block {block}")


@pytest.mark.slow
def test_what_can_be_read_of_a_damaged_file_is_exported_and_taken_back(stopped: Stopped, tmp_path: Path) -> None:
    """Of every block in turn, until one cost a row: what is written is what was stored, or unknown; what is not is counted."""
    used = list(stopped.used)
    with Store(stopped.folder / FILE, as_it_is=True) as store:
        before = store.query(f'SELECT {COLUMNS} FROM main."requests" ORDER BY request_key')
    whole = 0
    for block in used:
        file = tmp_path / f"{block}.duckdb"
        shutil.copyfile(stopped.folder / FILE, file)
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
def test_a_file_that_leads_nowhere_is_said(stopped: Stopped, tmp_path: Path) -> None:
    file = tmp_path / FILE
    shutil.copyfile(stopped.folder / FILE, file)
    flip(20, 3)(file)  # of what the file says it is
    done = phasewise("db", "salvage", file, "--out", tmp_path / "out")
    assert done.returncode == 4 and "none of them can" in done.stderr
    missing = phasewise("db", "salvage", tmp_path / "none", "--out", tmp_path / "out")
    assert missing.returncode == 2 and "is no file" in missing.stderr


@pytest.mark.slow
def test_the_command_says_the_same_with_exit_1(stopped: Stopped, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(stopped.folder, data)
    assert phasewise("db", "check", "--data", data).returncode == 0
    used = blocks_in_use(data / FILE)  # a check that finds nothing opens the store, as a start does
    flip(place_of(next(block for block in used if used[block])) + 5000, 0)(data / FILE)
    done = phasewise("db", "check", "--data", data)
    assert done.returncode == 1
    assert f"FAIL  {data / FILE}" in done.stderr
