"""`phasewise explain`: one request, or deployments that are told by their numbers."""

from __future__ import annotations

import json
import sys
import urllib.parse
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.dashboard.commands.connection import open_data, server_of
from phasewise.rules.errors import InputError

SEVERAL = 2


def run(options: Namespace) -> int:
    """Exit code 2 where an identifier names several requests: they are listed, and one of their keys decides."""
    if options.summary and options.identifier:
        raise InputError("explain", "", "takes an ID or --summary, not both", "say one of them")
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


def _request(options: Namespace) -> int:
    reports = _reports(options)
    if not reports:
        raise InputError("explain", repr(options.identifier), "names no request", "use a key that /requests lists")
    if options.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=2, ensure_ascii=False))
    elif len(reports) == 1:
        from phasewise.dashboard.request_card import request_lines
        from phasewise.dashboard.terminal import show_lines

        show_lines(request_lines(reports[0]))
    else:
        for report in reports:
            print(report.get("request_key"))
    if len(reports) > 1:
        print(f"phasewise: {options.identifier} names {len(reports)} requests; ask for one key", file=sys.stderr)
        return SEVERAL
    return 0


def _reports(options: Namespace) -> Sequence[Mapping[str, Any]]:
    server = server_of(options)
    if server is not None:
        told = server.ask(f"/api/v1/requests/{urllib.parse.quote(options.identifier, safe='')}")
        if isinstance(told, list):
            return told
        listed = told.get("matches")
        return listed if isinstance(listed, list) else [told]
    with open_data(options.data) as local:
        from phasewise.analyzer.report import request_report

        return request_report(local.reader, local.rulebook, options.identifier)
