"""How a verb reaches the data: through the server that owns the directory, or by opening the file itself.

DuckDB lets no second process in, not even to read, so ``DIR/serve.json`` says where the owner listens.
"""

from __future__ import annotations

import json
import os
import ssl
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.collector.patience import REPORT_LIMIT_S, Patience
from phasewise.rules.errors import InputError, MachineError, PhasewiseError

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader
    from phasewise.collector.store import Store
    from phasewise.collector.writer import Writer
    from phasewise.rules.load import Rulebook

ANSWER_TIMEOUT_S = (
    REPORT_LIMIT_S + 5
)  # the server stops an answer by itself; a hung server should not hold a script for ever
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True, slots=True)
class Server:
    """A running ``phasewise serve``."""

    url: str
    pid: int | None = None
    key: str = field(default="", repr=False)
    pinned: Path | None = None  # the certificate it shows, where its owner told us by a file

    def ask(self, path: str, parameters: Sequence[tuple[str, str]] = ()) -> Any:
        """The JSON answer of a GET."""
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        patient = {"Prefer": f"wait={REPORT_LIMIT_S:.0f}"}
        return self._call(urllib.request.Request(f"{self.url}{path}{query}", headers=patient))

    def send(self, path: str, body: bytes, parameters: Sequence[tuple[str, str]] = (), kind: str = "") -> Any:
        """The JSON answer of a POST."""
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        headers = {"Content-Type": kind or "application/octet-stream"}
        return self._call(urllib.request.Request(f"{self.url}{path}{query}", data=body, headers=headers))

    def fetch(self, path: str, parameters: Sequence[tuple[str, str]] = ()) -> tuple[bytes, Mapping[str, str]]:
        """The body of an answer to a GET that is no JSON, and its headers."""
        patient = {"Prefer": f"wait={REPORT_LIMIT_S:.0f}"}
        request = urllib.request.Request(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", headers=patient)
        with self._answering(request) as answer:
            return answer.read(), dict(answer.headers)

    def alive(self, timeout_s: float = 2.0) -> bool:
        """It answers at all."""
        try:
            with self._opener().open(f"{self.url}/livez", timeout=timeout_s):
                return True
        except (OSError, ValueError):
            return False

    def _opener(self) -> urllib.request.OpenerDirector:
        """Loopback is never asked through a proxy, whatever the environment says."""
        local = (urllib.parse.urlsplit(self.url).hostname or "") in _LOOPBACK
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})] if local else []
        if self.url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=trust(self.pinned)))
        return urllib.request.build_opener(*handlers)

    def _call(self, request: urllib.request.Request) -> Any:
        with self._answering(request) as answer:
            try:
                return json.load(answer)
            except json.JSONDecodeError:
                raise MachineError(f"{self.url} does not answer with JSON: is it a phasewise server?") from None

    @contextmanager
    def _answering(self, request: urllib.request.Request) -> Iterator[Any]:
        if self.key:
            # Not redirected: another server that this one points to must not get it.
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        try:
            with self._opener().open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise _refusal(self.url, error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise MachineError(f"no answer from {self.url}: {reason} (is phasewise serve running there?)") from None


def trust(pinned: Path | None = None) -> ssl.SSLContext:
    """Whom to believe: the pinned certificate and nobody else, else the CAs of PHASEWISE_CA_FILE, else the system's. With the
    client certificate of PHASEWISE_CLIENT_CERT, a PEM file of certificate and key. InputError where a file cannot be used."""
    variables = {
        "PHASEWISE_CA_FILE": os.environ.get("PHASEWISE_CA_FILE"),
        "PHASEWISE_CLIENT_CERT": os.environ.get("PHASEWISE_CLIENT_CERT"),
    }
    name = "serve.json: tls_cert" if pinned else "PHASEWISE_CA_FILE"
    try:
        context = ssl.create_default_context(cafile=str(pinned) if pinned else variables["PHASEWISE_CA_FILE"])
        if pinned:
            # It is known by its bytes: whatever name it carries, and whoever signed it.
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if variables["PHASEWISE_CLIENT_CERT"]:
            name = "PHASEWISE_CLIENT_CERT"
            context.load_cert_chain(variables["PHASEWISE_CLIENT_CERT"])
    except OSError as error:
        shown = str(pinned) if name.startswith("serve") else str(variables.get(name))
        raise InputError(name, shown, f"cannot be used: {error.strerror or error}", "give a PEM file") from None
    return context


def api_key() -> str:
    """The key for a server that is named: PHASEWISE_API_KEY, else what the file PHASEWISE_API_KEY_FILE holds; empty without."""
    told = os.environ.get("PHASEWISE_API_KEY", "").strip()
    path = os.environ.get("PHASEWISE_API_KEY_FILE", "")
    if told or not path:
        return told
    try:
        with open(path, encoding="utf-8") as opened:  # noqa: PTH123 - its mode is asked of what was opened
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                raise InputError(
                    "PHASEWISE_API_KEY_FILE", path, f"can be read by others, mode {mode:04o}", f"chmod 600 {path}"
                )
            return opened.read().strip()
    except OSError as error:
        raise InputError("PHASEWISE_API_KEY_FILE", path, (error.strerror or str(error)).lower()) from None


def _refusal(url: str, error: urllib.error.HTTPError) -> PhasewiseError:
    """The error a server's refusal stands for: its own words where it gave some."""
    try:
        told = json.load(error)
    except (OSError, ValueError):
        told = {}
    words = told if isinstance(told, Mapping) else {}
    problem = str(words.get("error") or words.get("detail") or error.reason)
    remedy = str(words.get("remedy") or "")
    if 400 <= error.code < 500 and error.code != 429:
        return InputError(url, "", problem, remedy)
    return MachineError(f"{url} answers {error.code}: {problem}" + (f" ({remedy})" if remedy else ""))


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def find_server(data: Path) -> Server | None:
    """The server that owns a directory, or None; a file left by a killed server counts as none."""
    path = data / "serve.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        pinned = Path(told["tls_cert"]) if told.get("tls_cert") else None
        server = Server(str(told["url"]), int(told["pid"]), str(told.get("local_key") or ""), pinned)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise MachineError(f"{path}: no permission to read it (run as the user who runs phasewise serve)") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise MachineError(f"{path}: unreadable (delete it if no phasewise serve runs on this directory)") from None
    if server.alive():
        return server
    if server.pid is not None and _process_lives(server.pid) and _is_phasewise(server.pid):
        raise MachineError(f"{data} is owned by process {server.pid}, which does not answer at {server.url}")
    return None


def _is_phasewise(pid: int) -> bool:
    """Guards against a process id that something else has taken since; where it cannot be told, it counts."""
    try:
        return b"phasewise" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def server_of(options: Any) -> Server | None:
    """The server a verb should ask: the one named, else the owner of the directory."""
    if getattr(options, "server", None):
        return Server(options.server.rstrip("/"), key=api_key())
    return find_server(options.data)


def store_path(data: Path) -> Path:
    """The DuckDB file of a data directory."""
    return data / "phasewise.duckdb"


@dataclass(frozen=True, slots=True)
class Local:
    """The data directory, opened by this process. reader: of its store, with the patience of a report."""

    store: Store
    reader: Reader
    writer: Writer
    rulebook: Rulebook


@contextmanager
def open_data(data: Path, *, create: bool = False) -> Iterator[Local]:
    """Opens a directory that no server owns, and brings in what its journal still holds.

    create: make it where it does not exist; otherwise a missing directory is a wrong --data.
    """
    if create:
        make_directory(data)
    elif not store_path(data).exists() and not (data / "journal").exists():
        raise InputError("--data", str(data), "holds no phasewise data", "name the directory given to serve or ingest")
    import time

    from phasewise.analyzer.attribution import attributor
    from phasewise.collector.store import Store
    from phasewise.collector.writer import Writer
    from phasewise.dashboard.answers import GuardedReader
    from phasewise.dashboard.commands.configuration import read_configuration, require_known
    from phasewise.dashboard.work import Work, doing
    from phasewise.rules.load import load_rulebook

    rulebook = load_rulebook()
    stated = read_configuration().hardware
    require_known(stated, rulebook)
    before = os.umask(0o077)  # what is stored belongs to whoever runs this, and to nobody else
    try:
        store = Store(store_path(data), threads=2)  # one question at a time, and some are large
    except BaseException:
        os.umask(before)
        raise
    try:
        writer = Writer(store, data, rulebook, attributor(rulebook), time.time_ns, stated)
        while writer.step():
            pass
        with doing(Work(Patience(REPORT_LIMIT_S))):
            yield Local(store, GuardedReader(store), writer, rulebook)
    finally:
        store.close()
        os.umask(before)


def make_directory(data: Path) -> None:
    """Creates a data directory, for its owner alone, and makes sure that it can be written."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise MachineError(f"{data} is not a directory (choose another with --data)") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(f"cannot write to {data}: {reason} (choose another with --data)") from None
