"""Reading an address within bounds: time, size, no redirect, the token as it is now; never more than one answer at once."""

from __future__ import annotations

import re
import ssl
import time
from pathlib import Path

import httpx

from phasewise.collector.scraping.jobs import Access
from phasewise.rules.errors import InputError

BODY_BYTES = 16 << 20
_TOKEN_BYTES = 1 << 20
_ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


class Refused(Exception):
    """An answer that is no reading: why, in words. status: of the answer, None where it was another reason."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


def client_of(access: Access, timeout_s: float, source: str) -> httpx.Client:
    """A client for one address. Proxies of the environment are left aside, as metrics are asked directly.

    Raises InputError where the authority's certificate cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=str(access.ca_file) if access.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise InputError(source, str(access.ca_file), reason.lower(), "name a readable PEM file in ca_file") from None
    return httpx.Client(timeout=timeout_s, follow_redirects=False, trust_env=False, verify=context)


def headers_of(access: Access) -> dict[str, str]:
    """The token of the file, read anew: one that a cluster hands out is replaced within the hour. Raises Refused."""
    if access.token_file is None:
        return {}
    token = token_of(access.token_file)
    return {"Authorization": f"Bearer {token}"}


def token_of(path: Path) -> str:
    """One line without blanks; what is in the file is never shown."""
    try:
        with path.open("rb") as handle:
            token = handle.read(_TOKEN_BYTES).decode("ascii").strip()
    except OSError as error:
        raise Refused(f"the token in {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise Refused(f"{path} holds no token: its text is not ASCII") from None
    if not token or any(sign.isspace() for sign in token):
        raise Refused(f"{path} holds no token: one word is expected")
    return token


def read_body(client: httpx.Client, url: str, access: Access, timeout_s: float, most_bytes: int | None = None) -> str:
    """The text of a page. Raises Refused, or httpx.HTTPError, for anything but a whole answer in time."""
    most = BODY_BYTES if most_bytes is None else most_bytes
    until = time.monotonic() + timeout_s  # httpx limits each wait only: an answer that drips would never end
    with client.stream("GET", url, headers=headers_of(access)) as answer:
        status = answer.status_code
        if answer.is_redirect:
            raise Refused(f"answers {status} and leads elsewhere; name the address it leads to", status)
        if status in (401, 403):
            raise Refused(f"answers {status}: give the job a bearer_token_file that may read it", status)
        if status != 200:
            raise Refused(f"answers {status} {answer.reason_phrase}".rstrip(), status)
        parts, size = [], 0
        for chunk in answer.iter_bytes():
            size += len(chunk)
            if size > most:
                raise Refused(f"the answer is longer than {most >> 20} MiB")
            if time.monotonic() > until:
                raise Refused(f"the answer takes longer than {timeout_s:g} s")
            parts.append(chunk)
    return b"".join(parts).decode("utf-8", "replace")


def unreached(error: httpx.HTTPError) -> str:
    """Why an address did not answer, in words for whoever runs it."""
    told = _ERROR_NUMBER.sub("", str(error))
    if "CERTIFICATE_VERIFY_FAILED" in told:
        return "its certificate is not trusted: name its authority in ca_file"
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return f"{told[:1].lower()}{told[1:]}" or type(error).__name__
