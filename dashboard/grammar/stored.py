"""Verbs about what is stored: `ingest`, `export` and `db`."""

from __future__ import annotations

import argparse
from pathlib import Path

from phasewise.dashboard.grammar.options import (
    TIMES,
    data_option,
    json_option,
    source_options,
    url,
)


def ingest_verb(parser: argparse.ArgumentParser) -> None:
    source_options(parser)
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
            option, action="append", default=[], type=url, metavar="URL", help=f"bring in {what}; may be repeated"
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
    json_option(parser)


def export_verb(parser: argparse.ArgumentParser) -> None:
    source_options(parser)
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
    json_option(parser)


def db_verb(parser: argparse.ArgumentParser) -> None:
    for action in _db_actions(parser):
        data_option(action)
        json_option(action)


def _db_actions(parser: argparse.ArgumentParser) -> tuple[argparse.ArgumentParser, ...]:
    """Adds the actions; each of them still takes the data directory."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="backup|restore|check|salvage|purge")
    backup = actions.add_parser("backup", help="copy everything, as it is after one commit, while a server runs or not")
    backup.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for it")
    restore = actions.add_parser("restore", help="put a backup into an empty data directory, every file checked")
    restore.add_argument("backup", type=Path, metavar="FOLDER", help="what db backup wrote")
    check = actions.add_parser("check", help="read every byte and name what is damaged; exit 1 where anything is")
    salvage = actions.add_parser(
        "salvage", help="export what can be read of a damaged store file, for ingest to take back"
    )
    salvage.add_argument(
        "file", type=Path, metavar="FILE", help="a phasewise.duckdb, as it lies in DIR/quarantine/TIME"
    )
    salvage.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for it")
    json_option(salvage)
    purge = actions.add_parser("purge", help="delete requests with their whole traces until no byte of them is left")
    purge.add_argument(
        "--where", action="append", default=[], metavar="KEY:OP:VALUE", help="which requests; repeated, all must hold"
    )
    purge.add_argument("--tenant", default="", metavar="NAME", help="those of a tenant")
    purge.add_argument("--before", metavar="T", help="those that finished before; alone, everything of that time")
    return backup, restore, check, purge
