"""`DIR/audit.jsonl`: who changed what, one JSON line for each key made or withdrawn, login, start, purge, and look at content."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

NAME = "audit.jsonl"
LOG = logging.getLogger("phasewise.audit")


def audit(
    data: Path,
    action: str,
    unix_ns: int,
    *,
    key_id: str = "",
    address: str = "",
    detail: str = "",
    facts: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Appends one line, with `facts` (JSON values) behind the rest. A full disk costs the line, which then stands in the log, and not the action: revoking must go on."""
    told = {"unix_ns": unix_ns, "action": action, "key_id": key_id, "address": address, "detail": detail, **facts}
    line = json.dumps({name: value for name, value in told.items() if value != ""}) + "\n"
    try:
        # One write of one line in append mode: lines of both processes and of the command line never mix.
        descriptor = os.open(data / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        LOG.warning("could not be written to %s (%s): %s", NAME, error.strerror, line.rstrip())
