"""Access keys: `phw_<id>_<secret>`, of which `DIR/keys.json` holds the id and the SHA-256 of the secret, never the secret.

A secret is 32 random bytes, so guessing it is hopeless and a slow hash would protect nothing. The file belongs to its owner alone
(mode 0600); one that others can read or write is refused, because whoever can write it can let themselves in.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from phasewise.rules.errors import InputError, MachineError

NAME = "keys.json"
PREFIX = "phw"
SCOPES = ("ingest", "read", "content", "admin")
# What a scope lets one do besides itself. Prompts and answers are never part of another scope.
_IMPLIED: Mapping[str, tuple[str, ...]] = {"admin": ("ingest", "read")}
_SHAPE = re.compile(rf"{PREFIX}_([a-z0-9]{{4,32}})_([A-Za-z0-9_-]{{43}})")
LOCAL_KEY = "local"
# Who can read `DIR/serve.json` can change the data anyhow: `db backup` and `db purge` go through the server. Not `content`: as for others.
LOCAL_SCOPES = ("ingest", "read", "admin")
_SECRET_BYTES = 32
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,100}")
_DAY_NS = 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class AccessKey:
    """One key without its secret. expires_unix_ns, revoked_unix_ns: None for never; tenant: empty for none."""

    key_id: str
    secret_sha256: str
    scopes: tuple[str, ...]
    name: str = ""
    tenant: str = ""
    created_unix_ns: int = 0
    expires_unix_ns: int | None = None
    revoked_unix_ns: int | None = None
    replaced_by: str = ""

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or any(scope in _IMPLIED.get(own, ()) for own in self.scopes)

    def refused_since(self, now_unix_ns: int) -> str:
        """Why it lets nobody in any more: "revoked", "expired"; empty while it does."""
        if self.revoked_unix_ns is not None and self.revoked_unix_ns <= now_unix_ns:
            return "revoked"
        return "expired" if self.expires_unix_ns is not None and self.expires_unix_ns <= now_unix_ns else ""


def split_token(token: str) -> tuple[str, str] | None:
    """Id and secret of a key as it is sent; None where it has not the shape of one."""
    match = _SHAPE.fullmatch(token)
    return (match[1], match[2]) if match else None


def secret_hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key(
    scopes: tuple[str, ...],
    *,
    now_unix_ns: int,
    name: str = "",
    tenant: str = "",
    lifetime_ns: int | None = None,
    key_id: str = "",
) -> tuple[AccessKey, str]:
    """A key, and the text to give to whoever shall use it: it cannot be made again from what is kept."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise InputError(
            "--scope", ",".join(unknown), "is no scope", f"some of {','.join(SCOPES)}, with commas between"
        )
    for option, text in (("--name", name), ("--tenant", tenant)):
        if not _TEXT.fullmatch(text):
            raise InputError(
                option, repr(text[:40]), "cannot be used", "up to 100 characters without control characters"
            )
    key_id = key_id or secrets.token_hex(6)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    expires = None if lifetime_ns is None else now_unix_ns + lifetime_ns
    key = AccessKey(key_id, secret_hash(secret), tuple(sorted(set(scopes))), name, tenant, now_unix_ns, expires)
    return key, f"{PREFIX}_{key_id}_{secret}"


def local_keys(secret_sha256: str) -> dict[str, AccessKey]:
    """The key that `serve` makes for each run and leaves in `DIR/serve.json`: whoever can read that file can read all the data."""
    if not secret_sha256:
        return {}
    return {LOCAL_KEY: AccessKey(LOCAL_KEY, secret_sha256, LOCAL_SCOPES, "command line on this machine")}


def lifetime(text: str, option: str = "--expires") -> int:
    """Nanoseconds of `90d`, `12h`, `30m`; InputError, naming the option, for anything else."""
    match = re.fullmatch(r"(\d{1,5})([mhd])", text)
    if not match or not int(match[1]):
        raise InputError(option, repr(text), "is no time", "write 30m, 12h or 90d")
    return int(match[1]) * {"m": 60 * 10**9, "h": 3600 * 10**9, "d": _DAY_NS}[match[2]]


class KeyFile:
    """`DIR/keys.json`. Changes are made under a lock and replace the file as a whole."""

    def __init__(self, data: Path) -> None:
        self.path = data / NAME

    def exists(self) -> bool:
        return self.path.exists()

    def stamp(self) -> tuple[int, int, int]:
        """Changes whenever the file does; zeros where there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_mtime_ns, found.st_mode)

    def read(self) -> tuple[AccessKey, ...]:
        """All keys, the revoked ones too. Raises InputError naming file and field, MachineError where it must not be trusted."""
        try:
            with self.path.open(encoding="utf-8") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                if mode & 0o077:
                    raise MachineError(
                        f"{self.path}: others may read or change it, mode {mode:04o} (chmod 600 {self.path})"
                    )
                told = json.load(opened)
        except (FileNotFoundError, NotADirectoryError):  # whoever makes the directory says what is wrong with it
            return ()
        except OSError as error:
            raise MachineError(f"{self.path}: {(error.strerror or str(error)).lower()}") from None
        except ValueError as error:
            raise InputError(
                self.path, "", f"is not JSON: {error}", "restore it, or delete it and create new keys"
            ) from None
        listed = told.get("keys") if isinstance(told, dict) else None
        if not isinstance(listed, list):
            raise InputError(self.path, "keys", "is not a list", "restore it, or delete it and create new keys")
        return tuple(self._key(one, index) for index, one in enumerate(listed))

    def add(self, key: AccessKey) -> None:
        with self._changing() as keys:
            if key.key_id in keys:
                raise InputError("keys", key.key_id, "exists already")
            keys[key.key_id] = key

    def revoke(self, key_id: str, now_unix_ns: int) -> AccessKey:
        with self._changing() as keys:
            found = self._one(keys, key_id)
            if found.revoked_unix_ns is None:
                keys[found.key_id] = replace(found, revoked_unix_ns=now_unix_ns)
            return keys[found.key_id]

    def rotate(self, key_id: str, now_unix_ns: int, overlap_ns: int) -> tuple[AccessKey, str]:
        """A new key with the scopes, tenant, name and lifetime of an old one, which goes on for the overlap."""
        with self._changing() as keys:
            old = self._one(keys, key_id)
            gone = old.refused_since(now_unix_ns)
            if gone:
                raise InputError("keys", old.key_id, f"is {gone}", "create a new one")
            span = None if old.expires_unix_ns is None else old.expires_unix_ns - old.created_unix_ns
            new, token = new_key(
                old.scopes, now_unix_ns=now_unix_ns, name=old.name, tenant=old.tenant, lifetime_ns=span
            )
            end = now_unix_ns + overlap_ns
            ends = end if old.expires_unix_ns is None else min(end, old.expires_unix_ns)
            keys[old.key_id] = replace(old, expires_unix_ns=ends, replaced_by=new.key_id)
            keys[new.key_id] = new
            return new, token

    def _one(self, keys: Mapping[str, AccessKey], key_id: str) -> AccessKey:
        """By its id, or by the whole key, so that one that leaked can be revoked as it was found."""
        split = split_token(key_id)
        found = keys.get(split[0] if split else key_id)
        if found is None:
            shown = split[0] if split else key_id[:40]
            raise InputError("keys", repr(shown), "is not known", "phasewise keys list shows all ids")
        return found

    def _key(self, told: object, index: int) -> AccessKey:
        where = f"keys[{index}]"
        known = {f.name for f in fields(AccessKey)}
        if not isinstance(told, dict) or not {"key_id", "secret_sha256", "scopes"} <= set(told) <= known:
            raise InputError(self.path, where, "is not a key", "restore the file, or delete it and create new keys")
        scopes = told["scopes"]
        if not isinstance(scopes, list) or not all(scope in SCOPES for scope in scopes):
            raise InputError(self.path, f"{where}.scopes", f"{scopes!r} are not scopes", f"some of {', '.join(SCOPES)}")
        for name in ("key_id", "secret_sha256", "name", "tenant", "replaced_by"):
            if not isinstance(told.get(name, ""), str):
                raise InputError(self.path, f"{where}.{name}", "is no text")
        for name in ("created_unix_ns", "expires_unix_ns", "revoked_unix_ns"):
            if not isinstance(told.get(name), int | None) or isinstance(told.get(name), bool):
                raise InputError(self.path, f"{where}.{name}", "is no time in Unix nanoseconds")
        return AccessKey(**{**told, "scopes": tuple(scopes)})

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, AccessKey]]:
        lock = self.path.with_name("keys.lock")
        try:
            with open(lock, "a", opener=_private) as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                keys = {key.key_id: key for key in self.read()}
                yield keys
                partial = self.path.with_name(f".{NAME}.{os.getpid()}")
                with open(partial, "w", encoding="utf-8", opener=_private) as opened:
                    json.dump({"keys": [asdict(key) for key in keys.values()]}, opened, indent=1)
                    opened.write("\n")
                    opened.flush()
                    os.fsync(opened.fileno())
                partial.replace(self.path)
        except OSError as error:
            raise MachineError(
                f"{self.path}: {(error.strerror or str(error)).lower()} (choose another with --data)"
            ) from None


def _private(path: str, flags: int) -> int:
    """For open(): whatever the umask says, only the owner gets in."""
    return os.open(path, flags, 0o600)
