"""The command line: what can be said. What it does stands in ``commands/``, one module a verb, imported when asked for.

Exit codes: 0 done; 1 a requested check failed; 2 wrong usage or input; 3 no data in the range; 4 the machine refuses (a busy
port, no permission, a locked store, no server); 70 a fault of Phasewise itself; 130 interrupted; 141 the reader went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.dashboard.commands.db_grammar import db_actions
from phasewise.rules.errors import PhasewiseError
from phasewise.rules.secret_text import hidden

if TYPE_CHECKING:
    from phasewise.dashboard.commands.configuration import Configuration

DEFAULT_DATA = "phasewise-data"
CONFIGURED_VERBS = {"serve", "doctor", "analyze"}
TIMES = "now, now-15m, 2026-11-29T14:02:00Z, or Unix seconds, ms or ns"
EPILOG = """exit codes: 0 done, 1 a requested check failed, 2 wrong usage or input, 3 no data in the range,
4 the machine refuses (port, permission, lock, no server), 70 internal error, 130 interrupted.
Colour is off when NO_COLOR is set or the output is no terminal."""


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: reading package metadata would slow every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"phasewise {version('phasewise')}")
        parser.exit(0)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 (any free one) to 65535")
    return int(text)


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: it begins with http:// or https://")
    return text


def _data(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    chosen = default or os.environ.get("PHASEWISE_DATA", DEFAULT_DATA)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=Path(chosen),
        help=f"data directory (default: PHASEWISE_DATA, else {DEFAULT_DATA})",
    )


def _source(parser: argparse.ArgumentParser) -> None:
    """Where to read: a directory (through its server where one runs) or a server."""
    _data(parser)
    parser.add_argument("--server", type=_url, metavar="URL", help="ask this server instead of opening --data")


def _ports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    for option, number, what in (
        ("--port", 8080, "pages and HTTP API"),
        ("--otlp-grpc-port", 4317, "OTLP over gRPC"),
        ("--otlp-http-port", 4318, "OTLP over HTTP"),
    ):
        parser.add_argument(
            option, type=_port, default=number, metavar="N", help=f"{what} (%(default)s; 0: any free port)"
        )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the object of the HTTP API")


def _serve(parser: argparse.ArgumentParser) -> None:
    _data(parser)
    _ports(parser)
    parser.add_argument(
        "--scrape",
        action="append",
        default=[],
        type=_url,
        metavar="URL",
        help="read these engine metrics once a second, e.g. http://localhost:8000/metrics; may be repeated",
    )
    parser.add_argument(
        "--on-corruption",
        choices=("quarantine", "fail"),
        default="quarantine",
        help="a damaged store is moved aside and made anew from journal and cold tier, or nothing starts (%(default)s)",
    )
    parser.add_argument("--all-in-one", action="store_true", help="run the store in this process (for tests)")
    parser.add_argument(
        "--insecure-no-auth",
        "--allow-remote",
        action="store_true",
        help="listen beyond this machine without any key: whoever reaches the port can read and write",
    )
    for option, what in (
        ("--tls-cert", "certificate chain (PEM) for pages, API and OTLP; read again on SIGHUP"),
        ("--tls-key", "its key (PEM), without passphrase"),
        ("--tls-client-ca", "CAs (PEM) of the certificates that clients must show"),
    ):
        parser.add_argument(option, metavar="FILE", help=what)


def _keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|revoke|rotate")
    create = actions.add_parser("create", help="make a key and print it, once")
    create.add_argument(
        "--scope",
        default="ingest,read",
        metavar="LIST",
        help="some of ingest, read, content, admin, with commas between (%(default)s)",
    )
    create.add_argument("--expires", default="", metavar="TIME", help="ends it after 90d, 12h or 30m (default: never)")
    create.add_argument("--name", default="", metavar="TEXT", help="what it is for, to know it by in the list")
    create.add_argument(
        "--tenant", default="", metavar="NAME", help="tenant of all requests sent with it, whatever the sender says"
    )
    listing = actions.add_parser("list", help="all keys: scopes, state, when they were last used")
    revoke = actions.add_parser("revoke", help="withdraw a key at once")
    rotate = actions.add_parser("rotate", help="make a key in the place of another, which goes on for a while")
    rotate.add_argument(
        "--overlap", default="24h", metavar="TIME", help="how long the old one goes on: 30m, 12h, 7d (%(default)s)"
    )
    for action in (revoke, rotate):
        action.add_argument("identifier", metavar="ID", help="as the list shows it, or the whole key")
    for action in (create, listing, revoke, rotate):
        _data(action)
        _json(action)


def _config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="show")
    _json(actions.add_parser("show", help="what file and environment say, secrets as ***"))


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the data here (default: a temporary folder)")
    _ports(parser)
    parser.add_argument("--fast", action="store_true", help="send the recordings at once, as if they had just ended")
    parser.add_argument("--once", action="store_true", help="end after the cards; exit 1 where a verdict is not right")
    parser.add_argument(
        "--engine",
        choices=("auto", "torch", "simulated", "none"),
        default="auto",
        help="the live run after the recordings: auto takes torch where the extra 'engine' is installed (%(default)s)",
    )


def _ingest(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="or folders; the format is told by the content"
    )
    parser.add_argument(
        "--scrapes",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help='JSON lines of {"unix_ns", "text", "instance"?, "job"?}: scraped /metrics pages; may be repeated',
    )
    parser.add_argument(
        "--facts",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="what engines are set to: a pod (kubectl get pod -o json), a start-up log, a command line, or an answer of the "
        "engine's server as JSON; may be repeated",
    )
    parser.add_argument(
        "--instance", default="", metavar="NAME", help="the engine process --facts is about, as data health names it"
    )
    for option, what in (
        ("--prometheus", "engine metrics stored in Prometheus, Mimir, Thanos or VictoriaMetrics"),
        ("--tempo", "traces stored in Tempo"),
        ("--jaeger", "traces stored in Jaeger"),
    ):
        parser.add_argument(
            option, action="append", default=[], type=_url, metavar="URL", help=f"bring in {what}; may be repeated"
        )
    parser.add_argument("--from", dest="start", metavar="T", help=f"of their window: {TIMES} (default: now-1h)")
    parser.add_argument("--to", dest="end", metavar="T", help="end of their window (default: now)")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="sent to them, e.g. 'Authorization: Bearer TOKEN' or 'X-Scope-OrgID: TENANT'; may be repeated",
    )
    parser.add_argument(
        "--match",
        default="",
        metavar="TEXT",
        help='less of them: label matchers (job="vllm"), TraceQL, or a Jaeger service',
    )
    parser.add_argument(
        "--step",
        default="",
        metavar="TIME",
        help="ask Prometheus for a value every so often (15s), not for every value it has",
    )
    parser.add_argument("--again", action="store_true", help="also what an earlier run brought in")
    _json(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="an empty or a new folder")
    parser.add_argument("--from", dest="start", metavar="T", help=f"begin of a window: {TIMES} (default: everything)")
    parser.add_argument("--to", dest="end", metavar="T", help="end of the window, itself outside (default: everything)")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="KEY:OP:VALUE",
        help="only these requests, their turns and spans; may be repeated",
    )
    _json(parser)


def _window(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="start", metavar="T", help=f"begin of the window: {TIMES} (default: now-15m)")
    parser.add_argument("--to", dest="end", metavar="T", help="end of the window (default: now)")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY:OP:VALUE", help="e.g. model:eq:llama-8b; may be repeated"
    )
    parser.add_argument("--slo", default="", metavar="LIMITS", help="e.g. ttft:2s,itl:80ms or client.ttft:3s")


def _card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compact", action="store_true", help="five lines instead of the full card")
    parser.add_argument("--markdown", action="store_true", help="the card as Markdown, for a ticket or a wiki")


def _analyze(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    _window(parser)
    _card(parser)
    _json(parser)


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("identifier", nargs="?", metavar="ID", help="request key, request id, x-request-id or trace id")
    parser.add_argument(
        "--summary",
        nargs="+",
        metavar="FILE",
        help="explain deployments told by their numbers (phasewise-summary/1: object, array or JSON lines; - is stdin)",
    )
    _source(parser)
    _card(parser)
    _json(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--summary", required=True, metavar="FILE", help="strategies as numbers: phasewise-summary/1")
    parser.add_argument("--slo", required=True, metavar="LIMIT", help="e.g. ttft_p99:2s; several with commas")
    _json(parser)


def _rules(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show")
    listing = actions.add_parser("list", help="all rules of a kind, or of every kind")
    listing.add_argument("kind", nargs="?", choices=("techniques", "gpus", "models", "engines", "signals", "causes"))
    _json(listing)
    show = actions.add_parser("show", help="one rule in full, with its sources")
    show.add_argument("identifier", metavar="ID")
    _json(show)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: a whole number from 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: a whole number from 0")
    return int(text)


def _engine(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="serve|simulate|truth")
    text = "start the OpenAI-compatible server of the instrumented engine"
    _engine_serve(actions.add_parser("serve", help=text, description=f"{text[0].upper()}{text[1:]}."))
    for name, text in (
        ("simulate", "run a scenario on a virtual clock and store what the engine would have sent"),
        ("truth", "what truly bounds the requests of a scenario, by taking each resource away"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("scenario", metavar="SCENARIO", help="a scenario family; list names them all")
        action.add_argument("--seed", type=_seed, default=0, metavar="N", help="draws another one (%(default)s)")
        action.add_argument(
            "--requests", type=_count, default=1000, metavar="N", help="how many requests to run (%(default)s)"
        )
        if name == "simulate":
            _source(action)
        _json(action)


def _engine_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        choices=("auto", "torch", "simulated"),
        default="auto",
        help="what computes: auto takes torch where the extra 'engine' is installed (%(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="torch: smollm2-135m, a folder of safetensors or a GGUF file; simulated: a name of rules list models",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="accelerator to simulate: a name of rules list gpus (default: h100-sxm)"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="OpenAI API and /metrics (%(default)s; 0: any free port)"
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="listen beyond this machine: whoever reaches the port can use it"
    )
    parser.add_argument(
        "--otlp-endpoint",
        type=_url,
        metavar="URL",
        help="where spans go: OTLP over gRPC, or over HTTP where it ends in /v1/traces or at port 4318, e.g. http://localhost:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere)",
    )
    parser.add_argument("--max-num-seqs", type=_count, metavar="N", help="slots: sequences that run at once")
    parser.add_argument("--step-token-budget", type=_count, metavar="N", help="tokens of one step, prompts and decode")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting of scheduler, memory and server (docs/cli.md lists them); may be repeated",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the simulated noise (%(default)s)")


def _doctor(parser: argparse.ArgumentParser) -> None:
    _data(parser)
    _ports(parser)
    parser.add_argument(
        "--quick", action="store_true", help="only ask the running server (for container health checks)"
    )
    parser.add_argument(
        "--scrape", action="append", default=[], type=_url, metavar="URL", help="also read these metrics"
    )
    _json(parser)


def _db(parser: argparse.ArgumentParser) -> None:
    for action in db_actions(parser):
        _data(action)
        _json(action)


VERBS = {
    "serve": ("receive telemetry, judge it, show it", _serve),
    "demo": ("replay two recordings of a real vLLM, run the instrumented engine, and judge all three", _demo),
    "ingest": ("import files, or a window of what Prometheus, Tempo or Jaeger stored", _ingest),
    "export": ("what is stored as Parquet files, which ingest takes back", _export),
    "analyze": ("the verdict over a window", _analyze),
    "explain": ("one request, or deployments told by their numbers", _explain),
    "compare": ("choose between strategies by their tails", _compare),
    "rules": ("what the verdicts rest on: techniques, hardware, models, engines", _rules),
    "engine": ("a small serving engine that tells everything it does, and whose truth is known", _engine),
    "keys": ("access keys: who may send, who may look", _keys),
    "config": ("what the configuration file and the environment say", _config),
    "db": ("backup, restore, check and purge of a data directory", _db),
    "doctor": ("check ports, permissions, disk, store and a round trip", _doctor),
}


def parser(configured: Configuration | None = None) -> argparse.ArgumentParser:
    """The whole grammar. configured: what `phasewise.toml` says, as defaults."""
    root = argparse.ArgumentParser(
        prog="phasewise",
        description="Where the time of each LLM request goes, which resource bounds it, and which change acts on it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", nargs=0, action=_Version, help="print the version")
    root.add_argument("--no-color", action="store_true", help="no colour, whatever the terminal")
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (text, arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        arguments(verb)
        if configured and name in ("serve", "doctor"):
            told = {"hardware": configured.hardware, "slo": configured.slo, "retention": configured.retention}
            verb.set_defaults(**configured.serve, **told, scrape_jobs=configured.scrape_jobs)
        if configured and name == "analyze":
            verb.set_defaults(slo=configured.slo)
    return root


def _configured(arguments: Sequence[str]) -> Configuration | None:
    """The configuration file, read only for verbs that it speaks of."""
    if not CONFIGURED_VERBS & set(arguments):
        return None
    from phasewise.dashboard.commands.configuration import read_configuration

    return read_configuration()


def _internal(fault: Exception) -> int:
    """A fault of ours: one line with an id here, the trace in a file that can be sent along."""
    import secrets
    import tempfile
    import traceback

    error_id = secrets.token_hex(4)
    path = Path(tempfile.gettempdir()) / f"phasewise-error-{error_id}.txt"
    try:
        path.write_text("".join(traceback.format_exception(fault)), encoding="utf-8")
        kept = f"the trace is in {path}"
    except OSError:
        kept = "the trace could not be written"
    print(f"phasewise: internal error {error_id}: {type(fault).__name__}: {fault} ({kept})", file=sys.stderr)
    return 70


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and gives its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = parser(_configured(arguments)).parse_args(arguments)
        if options.no_color:
            os.environ["NO_COLOR"] = "1"
        code: int = importlib.import_module(f"phasewise.dashboard.commands.{options.verb}").run(options)
        sys.stdout.flush()
        return code
    except PhasewiseError as error:
        print(f"phasewise: {hidden(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Python flushes stdout once more at exit; without this it would complain about the same pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as fault:
        return _internal(fault)


if __name__ == "__main__":
    sys.exit(main())
