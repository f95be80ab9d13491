"""Verbs that ask: `analyze`, `explain`, `compare` and `rules`."""

from __future__ import annotations

import argparse

from phasewise.dashboard.grammar.options import (
    card_options,
    json_option,
    rows_options,
    source_options,
    window_options,
)


def analyze_verb(parser: argparse.ArgumentParser) -> None:
    source_options(parser)
    window_options(parser)
    card_options(parser)
    json_option(parser)


def explain_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("identifier", nargs="?", metavar="ID", help="request key, request id, x-request-id or trace id")
    parser.add_argument(
        "--summary",
        nargs="+",
        metavar="FILE",
        help="explain deployments told by their numbers (phasewise-summary/1: object, array or JSON lines; - is stdin)",
    )
    parser.add_argument(
        "--interference",
        action="store_true",
        help="whose prompts took how much of whose time, over a window (--from, --to, --filter)",
    )
    rows_options(parser)
    source_options(parser)
    card_options(parser)
    json_option(parser)


def compare_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--summary", required=True, metavar="FILE", help="strategies as numbers: phasewise-summary/1")
    parser.add_argument("--slo", required=True, metavar="LIMIT", help="e.g. ttft_p99:2s; several with commas")
    json_option(parser)


def rules_verb(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show")
    listing = actions.add_parser("list", help="all rules of a kind, or of every kind")
    listing.add_argument("kind", nargs="?", choices=("techniques", "gpus", "models", "engines", "signals", "causes"))
    json_option(listing)
    show = actions.add_parser("show", help="one rule in full, with its sources")
    show.add_argument("identifier", metavar="ID")
    json_option(show)
