"""Certificates of the servers: one pair for every port, and the CA of client certificates where senders must show one.

TLS 1.2 is the least everywhere: Python's context and granian are told so, gRPC's own default is the same.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phasewise.rules.errors import InputError

SETTINGS = ("tls_cert", "tls_key", "tls_client_ca")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the chain of the server, its key without a passphrase, and the CAs of client certificates (None: not asked)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, told: Mapping[str, object]) -> Tls | None:
        """From settings tls_cert, tls_key and tls_client_ca; None without any. InputError where one lacks the other, or is no
        certificate."""
        cert, key, client_ca = (Path(str(told[name])) if told.get(name) else None for name in SETTINGS)
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            missing = "--tls-cert" if cert is None else "--tls-key"
            raise InputError(missing, "", "is missing", "give --tls-cert FILE and --tls-key FILE together")
        tls = cls(cert.absolute(), key.absolute(), client_ca.absolute() if client_ca else None)
        tls.context()
        return tls

    def context(self) -> ssl.SSLContext:
        """For servers on Python's ssl. Raises InputError naming option and file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for option, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-client-ca", self.client_ca)):
            if path is not None:
                _require_readable(option, path)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        except (ssl.SSLError, ValueError) as error:
            words = f"and --tls-key {self.key} cannot be used: {_reason(error)}"
            raise InputError(
                "--tls-cert", str(self.cert), words, "PEM files of one pair, the key without passphrase"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise InputError(
                    "--tls-client-ca", str(self.client_ca), _reason(error), "give a PEM file of CAs"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """New certificate, and added CAs, for connections from now on. InputError leaves the context as it was."""
        self.context()
        context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)

    def settings(self) -> dict[str, str]:
        """As the other process is told."""
        told = {"tls_cert": str(self.cert), "tls_key": str(self.key)}
        return told | ({"tls_client_ca": str(self.client_ca)} if self.client_ca else {})


def _no_passphrase() -> bytes:
    """Instead of asking on the terminal, for which a server would wait for ever."""
    raise ValueError("the key has a passphrase")


def _require_readable(option: str, path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise InputError(option, str(path), (error.strerror or str(error)).lower()) from None


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
