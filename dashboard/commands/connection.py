"""How a verb reaches the data: through the server that owns the directory, or by opening the file itself.

DuckDB lets no second process in, not even to read, so ``DIR/serve.json`` says where the owner listens.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
            with _opener(self.url).open(f"{self.url}/livez", timeout=timeout_s):
                return True
        except (OSError, ValueError):
            return False

    def _call(self, request: urllib.request.Request) -> Any:
        with self._answering(request) as answer:
            try:
                return json.load(answer)
            except json.JSONDecodeError:
                raise MachineError(f"{self.url} does not answer with JSON: is it a phasewise server?") from None

    @contextmanager
    def _answering(self, request: urllib.request.Request) -> Iterator[Any]:
        try:
            with _opener(self.url).open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise _refusal(self.url, error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise MachineError(f"no answer from {self.url}: {reason} (is phasewise serve running there?)") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Loopback is never asked through a proxy, whatever the environment says."""
    local = (urllib.parse.urlsplit(url).hostname or "") in _LOOPBACK
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))


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
        server = Server(str(told["url"]), int(told["pid"]))
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
        return Server(options.server.rstrip("/"))
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
    store = Store(store_path(data))
    try:
        writer = Writer(store, data, rulebook, attributor(rulebook), time.time_ns, stated)
        while writer.step():
            pass
        with doing(Work(Patience(REPORT_LIMIT_S))):
            yield Local(store, GuardedReader(store), writer, rulebook)
    finally:
        store.close()


def make_directory(data: Path) -> None:
    """Creates a data directory and makes sure that it can be written."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        probe = data / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise MachineError(f"{data} is not a directory (choose another with --data)") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(f"cannot write to {data}: {reason} (choose another with --data)") from None
