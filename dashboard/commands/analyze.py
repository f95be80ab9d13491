"""`phasewise analyze`: the verdict over a window, from the server that owns the data or from the file."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from typing import Any

from phasewise.dashboard.commands.connection import open_data, server_of

NO_DATA = 3


def run(options: Namespace) -> int:
    """Exit code 3 where the window holds nothing to judge."""
    verdict = window_verdict_of(options)
    if options.json:
        print(json.dumps(verdict, indent=2, ensure_ascii=False))
    else:
        from phasewise.dashboard.cards import card_of, ends_now
        from phasewise.dashboard.terminal import show

        show(
            card_of(verdict, current=ends_now(verdict, time.time_ns())),
            compact=options.compact,
            as_markdown=options.markdown,
        )
    if verdict.get("status") == "unknown" and not verdict.get("requests"):
        print("phasewise: no requests in this window; set --from and --to (0 is the beginning)", file=sys.stderr)
        return NO_DATA
    return 0


def window_verdict_of(options: Namespace) -> dict[str, Any]:
    """The verdict object, the same whoever computes it. The options are read before anything is opened."""
    from phasewise.analyzer.window import parse_filter, parse_slo, parse_window

    now_unix_ns = time.time_ns()
    window = parse_window(options.start, options.end, now_unix_ns)
    filters = [parse_filter(text) for text in options.filter]
    objectives = parse_slo(options.slo)
    server = server_of(options)
    if server is not None:
        asked = [("from", str(window.from_unix_ns)), ("to", str(window.to_unix_ns))]
        asked += [("f", text) for text in options.filter]
        asked += [("slo", options.slo)] if options.slo else []
        told: dict[str, Any] = server.ask("/api/v1/verdict", asked)
        return told
    with open_data(options.data) as local:
        from phasewise.analyzer.report import window_verdict

        return window_verdict(
            local.reader, local.rulebook, window, filters=filters, slo=objectives, now_unix_ns=now_unix_ns
        )
