"""Verbs about a server: `serve`, `keys`, `config`, `doctor`, and `demo`, which starts one."""

from __future__ import annotations

import argparse
from pathlib import Path

from phasewise.dashboard.grammar.options import (
    data_option,
    json_option,
    port_options,
    url,
)


def serve_verb(parser: argparse.ArgumentParser) -> None:
    data_option(parser)
    port_options(parser)
    parser.add_argument(
        "--scrape",
        action="append",
        default=[],
        type=url,
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


def keys_verb(parser: argparse.ArgumentParser) -> None:
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
        data_option(action)
        json_option(action)


def config_verb(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="show")
    json_option(actions.add_parser("show", help="what file and environment say, secrets as ***"))


def doctor_verb(parser: argparse.ArgumentParser) -> None:
    data_option(parser)
    port_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="only ask the running server (for container health checks)"
    )
    parser.add_argument(
        "--scrape", action="append", default=[], type=url, metavar="URL", help="also read these metrics"
    )
    json_option(parser)


def demo_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the data here (default: a temporary folder)")
    port_options(parser)
    parser.add_argument("--fast", action="store_true", help="send the recordings at once, as if they had just ended")
    parser.add_argument("--once", action="store_true", help="end after the cards; exit 1 where a verdict is not right")
    parser.add_argument(
        "--engine",
        choices=("auto", "torch", "simulated", "none"),
        default="auto",
        help="the live run after the recordings: auto takes torch where the extra 'engine' is installed (%(default)s)",
    )
