"""`phasewise compare --summary`: choose between strategies that are given as numbers, by their tails and never by the mean."""

from __future__ import annotations

import json
from argparse import Namespace

from phasewise.dashboard.commands.documents import read_documents


def run(options: Namespace) -> int:
    """That no strategy meets the limit is an answer too, not a failure."""
    from phasewise.analyzer.experiments import compare_summaries
    from phasewise.dashboard.comparison import comparison_lines
    from phasewise.dashboard.terminal import show_lines

    documents, _ = read_documents([options.summary])
    compared = compare_summaries([document.content for document in documents], options.slo)
    if options.json:
        print(json.dumps(compared, indent=2, ensure_ascii=False))
    else:
        show_lines(comparison_lines(compared))
    return 0
