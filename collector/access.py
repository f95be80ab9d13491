"""Who may come in: the check of every request's key, the same for gRPC, HTTP, the API and the pages.

Keys are looked up in memory and read again when their file changes, or at once when told (`reload`, on SIGHUP). A file that can no
longer be read or trusted lets nobody in until it can. A right key always comes in: its 32 random bytes cannot be guessed, so
wrong ones from the same address (a proxy, a cluster's gateway) must not lock it out; they are only made cheap to refuse.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from phasewise.collector.access_keys import PREFIX, AccessKey, KeyFile, split_token
from phasewise.collector.receipts import write_json
from phasewise.rules.errors import PhasewiseError

Reason = Literal["missing", "wrong", "forbidden", "too_many_wrong", "too_fast"]
_LOOK_EVERY_S = 1.0
_USED_EVERY_S = 60.0
_USED_STEP_NS = 3600 * 10**9  # an hour: enough to find the keys that nobody uses
_ADDRESSES = 4096
WRONG_KEYS = 1000
WRONG_KEYS_WITHIN_S = 600.0
RATE_BYTES_PER_S = 15e6
BURST_BYTES = 20e6
_NO_HASH = hashlib.sha256(b"").hexdigest()  # no secret has it: a secret has 43 characters
log = logging.getLogger("phasewise.access")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who was let in. key: None where no keys are in use, and everything is allowed."""

    key: AccessKey | None = None

    def allows(self, scope: str) -> bool:
        return self.key is None or self.key.allows(scope)

    @property
    def tenant(self) -> str:
        return self.key.tenant if self.key else ""

    @property
    def key_id(self) -> str:
        return self.key.key_id if self.key else ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Who was not. retry_after_s: 0 where coming back does not help."""

    reason: Reason
    message: str
    retry_after_s: int = 0


ANYBODY = Caller()


class Bucket:
    """Tokens that come back at a rate, up to a burst. Taking may run into debt, which then holds up what comes next: the size
    of a request is known only once it has been read."""

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._left, self._at_s = burst, clock()

    def left(self) -> float:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at_s) * self._rate_per_s)
        self._at_s = now
        return self._left

    def take(self, amount: float) -> None:
        self._left = self.left() - amount

    def wait_s(self) -> float:
        """Until there is something again."""
        return max(0.0, -self.left() / self._rate_per_s)


class Door:
    """Checks keys for one process; safe to use from any thread.

    data: the directory of the keys, in which there may be none: then nobody is asked for one until there is; process: whose file
    of last uses is written; extra: keys that stand in no file, such as the one that lets the command line of the same user in.
    """

    def __init__(
        self,
        data: Path,
        process: str,
        *,
        extra: Mapping[str, AccessKey] | None = None,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data, self._process = data, process
        self._file = KeyFile(data)
        self._extra = dict(extra or {})
        self._clock, self._monotonic = clock, monotonic
        self._lock = threading.Lock()
        self._keys: dict[str, AccessKey] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = float("-inf")
        self._wrong: OrderedDict[str, Bucket] = OrderedDict()
        self._rates: dict[str, Bucket] = {}
        self._used = _LastUses(data, process)
        self.required = False
        self.trouble = ""
        self.reload()

    def reload(self) -> None:
        """Reads the keys again, whether or not their file seems to have changed."""
        with self._lock:
            self._stamp = None
            self._looked_s = float("-inf")
            self._look()

    def close(self) -> None:
        """Writes what would have been written within a minute."""
        self._used.write(float("inf"))

    def admit(self, authorization: str | None, address: str, *scopes: str) -> Caller | Refused:
        """Lets a request in, or says why not.

        authorization: the header's value, "Bearer KEY"; address: of the sender, without port; scopes: any one of them is enough.
        """
        self._look_again()
        if not self.required:
            return ANYBODY
        token = _bearer(authorization)
        if not token:
            return Refused("missing", f"no key; send it as Authorization: Bearer {PREFIX}_...")
        found = self.identify(token)
        if found is None:
            return self._wrong_key(address)
        if not any(found.allows(scope) for scope in scopes):
            wanted = " or ".join(scopes)
            return Refused("forbidden", f"key {found.key_id} has no scope {wanted}; it has {', '.join(found.scopes)}")
        return Caller(found)

    def identify(self, token: str) -> AccessKey | None:
        """The key that this is, while it is in force. Takes as long for an unknown id as for a wrong secret."""
        self._look_again()
        key_id, secret = split_token(token) or ("", token)
        key = self._keys.get(key_id)
        told = hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
        right = hmac.compare_digest(told, key.secret_sha256 if key else _NO_HASH)
        if key is None or not right or key.refused_since(self._clock()):
            return None
        self._used.note(key.key_id, self._clock())
        return key

    def in_force(self, key_id: str) -> AccessKey | None:
        """A key that was shown before, if it still lets one in: for sessions."""
        self._look_again()
        key = self._keys.get(key_id)
        return key if key and not key.refused_since(self._clock()) else None

    def too_fast(self, caller: Caller) -> Refused | None:
        """Whether this key has sent more than its rate allows. `sent` counts."""
        bucket = self._rates.get(caller.key_id)
        if caller.key is None or bucket is None:
            return None
        with self._lock:
            wait_s = bucket.wait_s()
        if not wait_s:
            return None
        words = f"key {caller.key_id} sends more than {RATE_BYTES_PER_S / 1e6:.0f} MB/s; retry"
        return Refused("too_fast", words, min(30, int(wait_s) + 1))

    def sent(self, caller: Caller, size_bytes: int) -> None:
        if caller.key is None:
            return
        with self._lock:
            bucket = self._rates.get(caller.key_id)
            if bucket is None:
                bucket = self._rates[caller.key_id] = Bucket(RATE_BYTES_PER_S, BURST_BYTES, self._monotonic)
            bucket.take(size_bytes)

    def _wrong_key(self, address: str) -> Refused:
        """Counted by address, for an IPv6 one by its network: whoever has one address there has them all."""
        with self._lock:
            source = _source(address)
            bucket = self._wrong.get(source)
            if bucket is None:
                rate = WRONG_KEYS / WRONG_KEYS_WITHIN_S
                bucket = self._wrong[source] = Bucket(rate, WRONG_KEYS, self._monotonic)
                while len(self._wrong) > _ADDRESSES:
                    self._wrong.popitem(last=False)
            self._wrong.move_to_end(source)
            if bucket.left() < 1:
                return Refused("too_many_wrong", "too many wrong keys from this address; correct the key", 30)
            bucket.take(1)
        return Refused("wrong", "the key is not known, or no longer in force; phasewise keys list shows those that are")

    def _look_again(self) -> None:
        if self._monotonic() - self._looked_s >= _LOOK_EVERY_S:
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = self._monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now
        self._used.write(now)
        stamp = self._file.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = self._file.read()
        except PhasewiseError as error:
            # What cannot be trusted lets nobody in: the keys in memory may just have been revoked in that file.
            self.required, self._keys, self.trouble = True, {}, str(error)
            log.error("no key is accepted: %s", error)
            return
        # Once keys were in use, their file going away must not open the door.
        self.required = self.required or bool(keys)
        self.trouble = "" if keys or not self.required else f"{self._file.path} is gone: no key is accepted"
        self._keys = {**{key.key_id: key for key in keys}, **self._extra}
        self._rates = {key_id: bucket for key_id, bucket in self._rates.items() if key_id in self._keys}


class _LastUses:
    """`DIR/keys-used.PROCESS.json`: the hour in which each key came last, written at most once a minute, and only on a change."""

    def __init__(self, data: Path, process: str) -> None:
        self._path = data / f"keys-used.{process}.json"
        self._hours: dict[str, int] = {}
        self._changed = False
        self._written_s = float("-inf")

    def note(self, key_id: str, now_unix_ns: int) -> None:
        hour = now_unix_ns - now_unix_ns % _USED_STEP_NS
        if self._hours.get(key_id) != hour:
            self._hours[key_id] = hour
            self._changed = True

    def write(self, now_s: float) -> None:
        if not self._changed or now_s - self._written_s < _USED_EVERY_S:
            return
        self._changed = False
        self._written_s = now_s
        try:
            write_json(self._path, {**last_used(self._path.parent, self._path.name), **self._hours})
        except OSError as error:
            log.warning("cannot write %s: %s", self._path.name, error)


def last_used(data: Path, pattern: str = "keys-used.*.json") -> dict[str, int]:
    """Key id to the begin of the hour (Unix ns) in which it came last, over all processes."""
    import json

    found: dict[str, int] = {}
    for path in data.glob(pattern):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key_id, hour in told.items() if isinstance(told, dict) else ():
            if isinstance(hour, int):
                found[key_id] = max(hour, found.get(key_id, 0))
    return found


def _bearer(authorization: str | None) -> str:
    """The key of an Authorization header. OTEL_EXPORTER_OTLP_HEADERS writes a blank as %20, which some exporters send as it is."""
    text = (authorization or "").strip()
    if "%20" in text:
        text = unquote(text)
    scheme, _, token = text.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _source(address: str) -> str:
    try:
        found = ipaddress.ip_address(unquote(address).strip("[]"))
    except ValueError:
        return address[:64]
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)
