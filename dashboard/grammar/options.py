"""Options that several verbs share, and how their values are read."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DEFAULT_DATA = "phasewise-data"
TIMES = "now, now-15m, 2026-11-29T14:02:00Z, or Unix seconds, ms or ns"


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 (any free one) to 65535")
    return int(text)


def url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: it begins with http:// or https://")
    return text


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: a whole number from 1")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: a whole number from 0")
    return int(text)


def data_option(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    chosen = default or os.environ.get("PHASEWISE_DATA", DEFAULT_DATA)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=Path(chosen),
        help=f"data directory (default: PHASEWISE_DATA, else {DEFAULT_DATA})",
    )


def source_options(parser: argparse.ArgumentParser) -> None:
    """Where to read: a directory (through its server where one runs) or a server."""
    data_option(parser)
    parser.add_argument("--server", type=url, metavar="URL", help="ask this server instead of opening --data")


def port_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    for option, number, what in (
        ("--port", 8080, "pages and HTTP API"),
        ("--otlp-grpc-port", 4317, "OTLP over gRPC"),
        ("--otlp-http-port", 4318, "OTLP over HTTP"),
    ):
        parser.add_argument(
            option, type=port, default=number, metavar="N", help=f"{what} (%(default)s; 0: any free port)"
        )


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the object of the HTTP API")


def window_options(parser: argparse.ArgumentParser) -> None:
    rows_options(parser)
    parser.add_argument("--slo", default="", metavar="LIMITS", help="e.g. ttft:2s,itl:80ms or client.ttft:3s")


def rows_options(parser: argparse.ArgumentParser) -> None:
    """Which requests: those that ended in a window and pass the filters."""
    parser.add_argument("--from", dest="start", metavar="T", help=f"begin of the window: {TIMES} (default: now-15m)")
    parser.add_argument("--to", dest="end", metavar="T", help="end of the window (default: now)")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY:OP:VALUE", help="e.g. model:eq:llama-8b; may be repeated"
    )


def card_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compact", action="store_true", help="five lines instead of the full card")
    parser.add_argument("--markdown", action="store_true", help="the card as Markdown, for a ticket or a wiki")
