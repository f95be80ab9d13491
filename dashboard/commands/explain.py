"""`phasewise explain`: one request, whose prompts took whose time, or deployments that are told by their numbers."""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.dashboard.commands.connection import open_data, server_of
from phasewise.rules.errors import InputError

SEVERAL = 2
NO_DATA = 3


def run(options: Namespace) -> int:
    """Exit code 2 where an identifier names several requests: they are listed, and one of their keys decides."""
    if options.summary and options.identifier:
        raise InputError("explain", "", "takes an ID or --summary, not both", "say one of them")
    if options.interference:
        if options.summary or options.identifier:
            raise InputError(
                "explain", "", "takes --interference for a window alone", "the report of an ID has that of the request"
            )
        return _interference(options)
    if options.start or options.end or options.filter:
        raise InputError("explain", "", "takes a window with --interference only", "see phasewise explain --help")
    if options.summary:
        return _summaries(options)
    if not options.identifier:
        raise InputError("explain", "", "needs an ID or --summary FILE", "see phasewise explain --help")
    return _request(options)


def _summaries(options: Namespace) -> int:
    from phasewise.analyzer.summary import explain_summary
    from phasewise.dashboard.cards import card_of
    from phasewise.dashboard.commands.documents import placed, read_documents
    from phasewise.dashboard.terminal import show
    from phasewise.rules.load import load_rulebook

    documents, single = read_documents(options.summary)
    rulebook = load_rulebook()
    verdicts = []
    for document in documents:
        with placed(document, "summary"):
            verdicts.append(explain_summary(document.content, rulebook))
    if options.json:
        print(json.dumps(verdicts[0] if single else verdicts, indent=2, ensure_ascii=False))
        return 0
    for verdict in verdicts:
        name = verdict.get("id")
        show(card_of(verdict, badge=str(name) if name else None), compact=options.compact, as_markdown=options.markdown)
    return 0


def _interference(options: Namespace) -> int:
    from phasewise.analyzer.window import parse_filter, parse_window

    window = parse_window(options.start, options.end, time.time_ns())
    filters = [parse_filter(text) for text in options.filter]
    server = server_of(options)
    if server is not None:
        asked = [("from", str(window.from_unix_ns)), ("to", str(window.to_unix_ns))]
        told = server.ask("/api/v1/interference", [*asked, *(("f", text) for text in options.filter)])
    else:
        with open_data(options.data) as local:
            from phasewise.analyzer.interference_ledger import window_ledger

            told = window_ledger(local.reader, local.rulebook, window, filters)
    if options.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        from phasewise.dashboard.interference_card import ledger_lines
        from phasewise.dashboard.terminal import show_lines

        show_lines(ledger_lines(told))
    if not told["requests"]:
        print("phasewise: no requests in this window; set --from and --to (0 is the beginning)", file=sys.stderr)
        return NO_DATA
    return 0


def _request(options: Namespace) -> int:
    reports = _reports(options)
    if not reports:
        raise InputError("explain", repr(options.identifier), "names no request", "use a key that /requests lists")
    if options.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=2, ensure_ascii=False))
    elif len(reports) == 1:
        from phasewise.dashboard.interference_card import request_interference_lines
        from phasewise.dashboard.request_card import request_lines
        from phasewise.dashboard.terminal import show_lines

        show_lines([*request_lines(reports[0]), *request_interference_lines(reports[0]["interference"])])
    else:
        for report in reports:
            print(report.get("request_key"))
    if len(reports) > 1:
        print(f"phasewise: {options.identifier} names {len(reports)} requests; ask for one key", file=sys.stderr)
        return SEVERAL
    return 0


def _reports(options: Namespace) -> Sequence[Mapping[str, Any]]:
    """Of a single request with its part of the interference ledger, as `interference`."""
    server = server_of(options)
    if server is not None:
        named = urllib.parse.quote(options.identifier, safe="")
        told = server.ask(f"/api/v1/requests/{named}")
        if isinstance(told, list):
            return told
        listed = told.get("matches")
        if isinstance(listed, list):
            return listed
        return [told | {"interference": server.ask(f"/api/v1/interference/{told['request_key']}")}]
    with open_data(options.data) as local:
        from phasewise.analyzer.report import request_report
        from phasewise.analyzer.request_interference import request_ledgers

        found = request_report(local.reader, local.rulebook, options.identifier)
        if len(found) != 1:
            return found
        (ledger,) = request_ledgers(local.reader, local.rulebook, str(found[0]["request_key"]))
        return [found[0] | {"interference": ledger}]
