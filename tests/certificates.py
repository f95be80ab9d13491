"""Certificates for tests, made by openssl: a CA, servers, clients; skipped with a reason where the program is absent."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Pair:
    cert: Path
    key: Path

    def both(self) -> Path:
        """Certificate and key in one file, as clients take them."""
        path = self.cert.with_suffix(".both.pem")
        path.write_bytes(self.cert.read_bytes() + self.key.read_bytes())
        path.chmod(0o600)
        return path


def _openssl(*arguments: object) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA in a folder of its own."""

    folder: Path
    pair: Pair

    def issue(self, name: str, *, expired: bool = False) -> Pair:
        """A certificate for 127.0.0.1, for servers and clients."""
        cert, key, request = (self.folder / f"{name}.{end}" for end in ("crt", "key", "csr"))
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions = self.folder / f"{name}.ext"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        dates = ("-days", "-1" if expired else "2")
        ca = ("-CA", self.pair.cert, "-CAkey", self.pair.key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *ca, "-out", cert, "-extfile", extensions, *dates)
        return Pair(cert, key)


@functools.cache
def authority(name: str) -> Authority:
    """The CA of that name, made once a run."""
    folder = Path(tempfile.mkdtemp(prefix=f"phasewise-ca-{name}-"))
    cert, key = folder / "ca.crt", folder / "ca.key"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *new_key, "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}")
    return Authority(folder, Pair(cert, key))
