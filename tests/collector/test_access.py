"""Keys at rest and at the door: only hashes are kept, wrong ones are refused alike, and what cannot be trusted lets nobody in."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from phasewise.collector.access import BURST_BYTES, RATE_BYTES_PER_S, WRONG_KEYS, Caller, Door, Refused, last_used
from phasewise.collector.access_keys import (
    LOCAL_SCOPES,
    SCOPES,
    KeyFile,
    lifetime,
    local_keys,
    new_key,
    secret_hash,
    split_token,
)
from phasewise.collector.audit import audit
from phasewise.rules.errors import InputError, MachineError

DAY_NS = 86_400 * 10**9
START_NS = 1_796_000_000 * 10**9


@dataclass
class Clock:
    """Both clocks of a door, moved by hand."""

    now_s: float = 0.0

    def unix_ns(self) -> int:
        return START_NS + int(self.now_s * 1e9)

    def monotonic(self) -> float:
        return self.now_s


def a_key(data: Path, *scopes: str, **more: object) -> str:
    data.mkdir(exist_ok=True)
    key, token = new_key(scopes or ("ingest", "read"), now_unix_ns=START_NS, **more)  # type: ignore[arg-type]
    KeyFile(data).add(key)
    return token


def a_door(data: Path, clock: Clock, **more: object) -> Door:
    return Door(data, "test", clock=clock.unix_ns, monotonic=clock.monotonic, **more)  # type: ignore[arg-type]


def reason(found: Caller | Refused) -> str:
    return found.reason if isinstance(found, Refused) else "in"


def ask(door: Door, token: str | None, *scopes: str, address: str = "10.0.0.1") -> str:
    return reason(door.admit(f"Bearer {token}" if token else None, address, *(scopes or ("read",))))


def test_only_id_and_hash_are_on_the_disk(tmp_path: Path) -> None:
    token = a_key(tmp_path)
    key_id, secret = split_token(token) or ("", "")
    assert token == f"phw_{key_id}_{secret}" and len(secret) == 43
    told = (tmp_path / "keys.json").read_text()
    assert secret not in told and secret_hash(secret) in told and key_id in told
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_reach_is_refused_and_lets_nobody_in(tmp_path: Path, mode: int) -> None:
    token = a_key(tmp_path)
    (tmp_path / "keys.json").chmod(mode)
    with pytest.raises(MachineError, match="chmod 600"):
        KeyFile(tmp_path).read()
    door = a_door(tmp_path, Clock())
    assert (door.required, ask(door, token), ask(door, None)) == (True, "wrong", "missing")
    assert "chmod 600" in door.trouble


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "keys: is not a list"),
        ('{"keys": [{}]}', r"keys\[0\]: is not a key"),
        ('{"keys": [{"key_id": "a", "secret_sha256": "b", "scopes": ["root"]}]}', r"keys\[0\].scopes"),
        ('{"keys": [{"key_id": 1, "secret_sha256": "b", "scopes": []}]}', r"keys\[0\].key_id"),
        ('{"keys": [{"key_id": "a", "secret_sha256": "b", "scopes": [], "expires_unix_ns": "x"}]}', "expires_unix_ns"),
    ],
)
def test_a_damaged_file_is_named_with_its_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InputError, match=said):
        KeyFile(tmp_path).read()


def test_without_keys_everybody_comes_in_and_with_the_first_one_nobody_else(tmp_path: Path) -> None:
    clock = Clock()
    door = a_door(tmp_path, clock)
    assert ask(door, None) == "in" and not door.required
    token = a_key(tmp_path)
    assert ask(door, None) == "in", "looked at once a second, not with every request"
    clock.now_s += 1.1
    assert (ask(door, None), ask(door, token)) == ("missing", "in")


def test_a_file_that_goes_away_does_not_open_the_door(tmp_path: Path) -> None:
    clock = Clock()
    token = a_key(tmp_path)
    door = a_door(tmp_path, clock)
    (tmp_path / "keys.json").unlink()
    clock.now_s += 1.1
    assert (ask(door, None), ask(door, token)) == ("missing", "wrong")
    assert "is gone" in door.trouble


def test_a_revoked_key_is_out_within_a_second_and_at_once_on_reload(tmp_path: Path) -> None:
    clock = Clock()
    one, other = a_key(tmp_path), a_key(tmp_path)
    door = a_door(tmp_path, clock)
    KeyFile(tmp_path).revoke(one, clock.unix_ns())
    assert ask(door, one) == "in"
    door.reload()
    assert (ask(door, one), ask(door, other)) == ("wrong", "in")
    KeyFile(tmp_path).revoke((split_token(other) or ("", ""))[0], clock.unix_ns())
    clock.now_s += 1.1
    assert ask(door, other) == "wrong"


def test_a_key_ends_with_its_time(tmp_path: Path) -> None:
    clock = Clock()
    token = a_key(tmp_path, lifetime_ns=lifetime("30m"))
    door = a_door(tmp_path, clock)
    assert ask(door, token) == "in"
    clock.now_s += 1801
    assert ask(door, token) == "wrong"


def test_rotation_lets_both_in_for_the_overlap_and_then_the_new_one(tmp_path: Path) -> None:
    clock = Clock()
    old = a_key(tmp_path, "ingest", name="gateway", tenant="acme", lifetime_ns=90 * DAY_NS)
    key, new = KeyFile(tmp_path).rotate((split_token(old) or ("", ""))[0], START_NS, lifetime("12h"))
    assert (key.scopes, key.name, key.tenant, key.expires_unix_ns) == (
        ("ingest",),
        "gateway",
        "acme",
        START_NS + 90 * DAY_NS,
    )
    door = a_door(tmp_path, clock)
    assert (ask(door, old, "ingest"), ask(door, new, "ingest")) == ("in", "in")
    clock.now_s += 12 * 3600 + 1
    assert (ask(door, old, "ingest"), ask(door, new, "ingest")) == ("wrong", "in")
    with pytest.raises(InputError, match="is expired"):
        KeyFile(tmp_path).rotate(old, clock.unix_ns(), DAY_NS)


@pytest.mark.parametrize("own", SCOPES)
@pytest.mark.parametrize("asked", SCOPES)
def test_a_scope_lets_one_do_what_it_says(tmp_path: Path, own: str, asked: str) -> None:
    door = a_door(tmp_path, Clock())
    token = a_key(tmp_path, own)
    door.reload()
    allowed = own == asked or (own == "admin" and asked in ("ingest", "read"))
    assert ask(door, token, asked) == ("in" if allowed else "forbidden")


@pytest.mark.parametrize(
    "header",
    ["Bearer {}", "bearer {}", "  BEARER   {}  ", "Bearer%20{}"],
)
def test_how_senders_write_the_header(tmp_path: Path, header: str) -> None:
    token = a_key(tmp_path)
    door = a_door(tmp_path, Clock())
    assert reason(door.admit(header.format(token), "10.0.0.1", "ingest")) == "in"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic {}", "{}", "Bearer x{}", "Bearer {}x", "Bearer phw_a_b", "Bearer \x00"]
)
def test_anything_else_is_no_key(tmp_path: Path, header: str) -> None:
    token = a_key(tmp_path)
    door = a_door(tmp_path, Clock())
    assert reason(door.admit(header.format(token), "10.0.0.1", "ingest")) in ("missing", "wrong")


def test_a_thousand_wrong_keys_are_told_to_stop_and_right_ones_still_come_in(tmp_path: Path) -> None:
    clock = Clock()
    token = a_key(tmp_path)
    door = a_door(tmp_path, clock)
    wrong = token[:-1] + ("a" if token[-1] != "a" else "b")
    assert [ask(door, wrong) for _ in range(WRONG_KEYS)] == ["wrong"] * WRONG_KEYS
    found = door.admit(f"Bearer {wrong}", "10.0.0.1", "read")
    assert isinstance(found, Refused) and found.reason == "too_many_wrong" and found.retry_after_s > 0
    assert ask(door, token) == "in"
    assert ask(door, wrong, address="10.0.0.2") == "wrong"
    clock.now_s += 60
    assert ask(door, wrong) == "wrong"


def test_an_ipv6_network_counts_as_one_address(tmp_path: Path) -> None:
    a_key(tmp_path)
    door = a_door(tmp_path, Clock())
    for i in range(WRONG_KEYS):
        ask(door, "phw_none_x", address=f"2001:db8::{i:x}")
    assert ask(door, "phw_none_x", address="[2001:db8::ffff]") == "too_many_wrong"
    assert ask(door, "phw_none_x", address="2001:db8:0:1::1") == "wrong"


def test_an_unknown_id_takes_as_long_as_a_wrong_secret(tmp_path: Path) -> None:
    """Medians over interleaved rounds: a door that compared nothing for unknown ids would be faster by the cost of a hash."""
    token = a_key(tmp_path)
    door = a_door(tmp_path, Clock())
    key_id, secret = split_token(token) or ("", "")
    wrong = {
        "secret": f"phw_{key_id}_{secret[:-1]}{'a' if secret[-1] != 'a' else 'b'}",
        "id": f"phw_000000000000_{secret}",
    }
    times: dict[str, list[int]] = {name: [] for name in wrong}
    for _ in range(4000):
        for name, text in wrong.items():
            began = time.perf_counter_ns()
            assert door.identify(text) is None
            times[name].append(time.perf_counter_ns() - began)
    ratio = statistics.median(times["id"]) / statistics.median(times["secret"])
    assert 0.75 < ratio < 1.33


def test_the_rate_of_a_key_holds_up_what_comes_after_a_burst(tmp_path: Path) -> None:
    clock = Clock()
    caller = Caller(KeyFile(tmp_path).read()[0] if a_key(tmp_path) else None)
    door = a_door(tmp_path, clock)
    assert door.too_fast(caller) is None
    door.sent(caller, int(BURST_BYTES))
    assert door.too_fast(caller) is None, "a burst is let through"
    door.sent(caller, int(RATE_BYTES_PER_S))
    refused = door.too_fast(caller)
    assert isinstance(refused, Refused) and refused.retry_after_s == 2
    clock.now_s += 1.1
    assert door.too_fast(caller) is None
    assert door.too_fast(Caller()) is None


def test_last_use_is_an_hour_and_written_once_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    token = a_key(tmp_path)
    key_id = (split_token(token) or ("", ""))[0]
    door = a_door(tmp_path, clock)
    for _ in range(100):
        clock.now_s += 1.1
        ask(door, token)
    assert last_used(tmp_path) == {key_id: START_NS - START_NS % (3600 * 10**9)}
    written = (tmp_path / "keys-used.test.json").stat().st_mtime_ns
    clock.now_s += 1.1
    ask(door, token)
    assert (tmp_path / "keys-used.test.json").stat().st_mtime_ns == written


def test_the_key_of_a_run_lets_its_user_in_and_opens_no_more(tmp_path: Path) -> None:
    local, token = new_key(LOCAL_SCOPES, now_unix_ns=START_NS, key_id="local")
    door = a_door(tmp_path, Clock(), extra=local_keys(local.secret_sha256))
    assert not door.required
    a_key(tmp_path)
    door.reload()
    told = {scope: ask(door, token, scope) for scope in SCOPES}
    assert told == {"ingest": "in", "read": "in", "admin": "in", "content": "forbidden"}


@pytest.mark.parametrize("text", ["", "90", "d", "0d", "-1d", "1y", "1.5h", "9999999d"])
def test_a_time_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write 30m, 12h or 90d"):
        lifetime(text)


@pytest.mark.parametrize(("scopes", "name"), [((), ""), (("root",), ""), (("read",), "a\nb"), (("read",), "x" * 101)])
def test_a_key_that_makes_no_sense_is_refused(scopes: tuple[str, ...], name: str) -> None:
    with pytest.raises(InputError):
        new_key(scopes, now_unix_ns=START_NS, name=name)


def test_the_audit_log_is_one_line_an_action_whatever_stands_in_it(tmp_path: Path) -> None:
    for detail in ("plain", "two\nlines\r\n", "\x1b[31m\x00", "\u2028\u202e"):
        audit(tmp_path, "purge", START_NS, key_id="k", detail=detail)
    lines = (tmp_path / "audit.jsonl").read_bytes().splitlines()
    assert len(lines) == 4 and all(json.loads(line)["action"] == "purge" for line in lines)
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    assert all(32 <= byte < 127 for line in lines for byte in line)
