"""`phasewise keys`: who may send and who may look. Works on the directory, with or without a server on it, which takes a change
within a second or two."""

from __future__ import annotations

import getpass
import json
import sys
import time
from argparse import Namespace
from pathlib import Path

from phasewise.collector.access import last_used
from phasewise.collector.access_keys import NAME, AccessKey, KeyFile, lifetime, new_key, split_token
from phasewise.collector.audit import audit
from phasewise.dashboard.commands.connection import make_directory
from phasewise.rules.errors import InputError, MachineError

SHOWN_ONCE = "This key is shown once; only its SHA-256 is kept."


def run(options: Namespace) -> int:
    """Prints the key alone on stdout, so that a script can keep it; everything else goes to stderr."""
    work = {"create": _create, "list": _list, "revoke": _revoke, "rotate": _rotate}[options.action]
    return work(options)


def _create(options: Namespace) -> int:
    expires = lifetime(options.expires) if options.expires else None
    scopes = tuple(part.strip() for part in options.scope.split(",") if part.strip())
    now = time.time_ns()
    key, token = new_key(scopes, now_unix_ns=now, name=options.name, tenant=options.tenant, lifetime_ns=expires)
    make_directory(options.data)
    KeyFile(options.data).add(key)
    _audit(options.data, "key_created", key, now, f"scopes {','.join(key.scopes)}")
    _tell(options, key, token)
    return 0


def _rotate(options: Namespace) -> int:
    now = time.time_ns()
    key, token = _existing(options.data).rotate(options.identifier, now, lifetime(options.overlap, "--overlap"))
    split = split_token(options.identifier)
    _audit(options.data, "key_rotated", key, now, f"replaces {split[0] if split else options.identifier}")
    _tell(options, key, token)
    return 0


def _revoke(options: Namespace) -> int:
    now = time.time_ns()
    key = _existing(options.data).revoke(options.identifier, now)
    _audit(options.data, "key_revoked", key, now, "")
    if options.json:
        print(json.dumps(_object(key, {}, now), indent=2))
    else:
        print(f"{key.key_id} is revoked", file=sys.stderr)
    return 0


def _list(options: Namespace) -> int:
    now = time.time_ns()
    keys = _existing(options.data).read()
    used = last_used(options.data)
    told = [_object(key, used, now) for key in keys]
    if options.json:
        print(json.dumps({"keys": told}, indent=2))
        return 0
    if not told:
        print("no keys: whoever reaches the server comes in", file=sys.stderr)
    for one in told:
        parts = [str(one["key_id"]), str(one["state"]), ",".join(key_scopes(one)), str(one["name"] or "-")]
        parts += [f"tenant {one['tenant']}"] if one["tenant"] else []
        parts.append(f"expires {_day(one['expires_unix_ns'])}" if one["expires_unix_ns"] else "never expires")
        parts.append(f"last used {_day(one['last_used_unix_ns'])}" if one["last_used_unix_ns"] else "not used yet")
        print("  ".join(parts))
    return 0


def key_scopes(told: dict[str, object]) -> list[str]:
    found = told["scopes"]
    return [str(one) for one in found] if isinstance(found, list) else []


def _object(key: AccessKey, used: dict[str, int], now_unix_ns: int) -> dict[str, object]:
    """All that is known of a key but the hash of its secret. last_used_unix_ns: begin of the hour, None where never."""
    return {
        "key_id": key.key_id,
        "state": key.refused_since(now_unix_ns) or "in force",
        "scopes": list(key.scopes),
        "name": key.name,
        "tenant": key.tenant,
        "created_unix_ns": key.created_unix_ns,
        "expires_unix_ns": key.expires_unix_ns,
        "revoked_unix_ns": key.revoked_unix_ns,
        "replaced_by": key.replaced_by or None,
        "last_used_unix_ns": used.get(key.key_id),
    }


def _existing(data: Path) -> KeyFile:
    if not data.is_dir():
        raise InputError("--data", str(data), "is not there", "name the directory given to serve")
    return KeyFile(data)


def _tell(options: Namespace, key: AccessKey, token: str) -> None:
    if options.json:
        print(json.dumps({**_object(key, {}, time.time_ns()), "key": token}, indent=2))
    else:
        print(token)
    print(
        f"{SHOWN_ONCE} Send it as Authorization: Bearer KEY, or set PHASEWISE_API_KEY for the command line.",
        file=sys.stderr,
    )


def _audit(data: Path, action: str, key: AccessKey, unix_ns: int, detail: str) -> None:
    audit(data, action, unix_ns, key_id=key.key_id, detail=detail, address=f"local user {_user()}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


def _day(unix_ns: object) -> str:
    assert isinstance(unix_ns, int)
    return time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(unix_ns / 1e9))


def require_keys(data: Path) -> bool:
    """Whether keys are in use on a directory. Raises where their file must not be trusted, before anything is served."""
    keys = KeyFile(data).read()
    now = time.time_ns()
    if keys and all(key.refused_since(now) for key in keys):
        raise MachineError(f"{data / NAME}: none of its {len(keys)} keys is in force (phasewise keys create makes one)")
    return bool(keys)
