"""The command line: its verbs and how it ends. What each can be told stands in ``grammar/``; what it does, in ``commands/``, one
module a verb, imported when asked for.

Exit codes: 0 done; 1 a requested check failed; 2 wrong usage or input; 3 no data in the range; 4 the machine refuses (a busy
port, no permission, a locked store, no server); 70 a fault of Phasewise itself; 130 interrupted; 141 the reader went away.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.dashboard.grammar.calibration import calibrate_verb
from phasewise.dashboard.grammar.engines import engine_verb
from phasewise.dashboard.grammar.servers import config_verb, demo_verb, doctor_verb, keys_verb, serve_verb
from phasewise.dashboard.grammar.stored import db_verb, export_verb, ingest_verb
from phasewise.dashboard.grammar.verdicts import analyze_verb, compare_verb, explain_verb, rules_verb
from phasewise.rules.errors import PhasewiseError
from phasewise.rules.secret_text import hidden

if TYPE_CHECKING:
    from phasewise.dashboard.commands.configuration import Configuration

CONFIGURED_VERBS = {"serve", "doctor", "analyze"}
EPILOG = """exit codes: 0 done, 1 a requested check failed, 2 wrong usage or input, 3 no data in the range,
4 the machine refuses (port, permission, lock, no server), 70 internal error, 130 interrupted.
Colour is off when NO_COLOR is set or the output is no terminal."""


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: reading package metadata would slow every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"phasewise {version('phasewise')}")
        parser.exit(0)


VERBS = {
    "serve": ("receive telemetry, judge it, show it", serve_verb),
    "demo": ("replay two recordings of a real vLLM, run the instrumented engine, and judge all three", demo_verb),
    "ingest": ("import files, or a window of what Prometheus, Tempo or Jaeger stored", ingest_verb),
    "export": ("what is stored as Parquet files, which ingest takes back", export_verb),
    "analyze": ("the verdict over a window", analyze_verb),
    "explain": ("one request, or deployments told by their numbers", explain_verb),
    "compare": ("choose between strategies by their tails", compare_verb),
    "rules": ("what the verdicts rest on: techniques, hardware, models, engines", rules_verb),
    "calibrate": ("measure what this machine reaches, for a roofline of its own", calibrate_verb),
    "engine": ("a small serving engine that tells everything it does, and whose truth is known", engine_verb),
    "keys": ("access keys: who may send, who may look", keys_verb),
    "config": ("what the configuration file and the environment say", config_verb),
    "db": ("backup, restore, check, salvage and purge of a data directory", db_verb),
    "doctor": ("check ports, permissions, disk, store and a round trip", doctor_verb),
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows a sign it lacks as a question mark
            stream.reconfigure(errors="replace")
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
