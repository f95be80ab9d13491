"""Texts that a span may carry and nobody should run, follow, or be steered by; the first twenty are for every run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from builders import attributed, make_request, request_table
from span_tables import span_table
from stocked import Served

TEXT_COLUMNS = ("model", "instance", "route", "tenant", "finish_reason", "request_id", "service", "engine_version", "dataset")  # fmt: skip

_MARKUP = [
    "<script>window.hit=1</script>",
    '<img src=x onerror="window.hit=1">',
    '"><svg onload=window.hit=1>',
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    '<a href="http://evil.example/">click</a>',
    "javascript:window.hit=1",
    "[x](javascript:window.hit=1) ![y](http://evil.example/z.png)",
    "{{7*7}} ${7*7} <%= 7*7 %> #{7*7}",
]
_STEERING = [
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "line one\nline two\r\nFAIL  store: made up",
    "\u202egnp.exe\u202c \u2066hidden\u2069",
    "\x00nul\x08\x7f\x9b31m",
]
_FORMULAS = ['=HYPERLINK("http://evil.example","x")', "+1+cmd|' /C calc'!A0", "@SUM(1+9)*cmd|' /C calc'!A0", "\t=1+1"]
_QUERIES = ["'; DROP TABLE requests; --", '" OR 1=1 --', "%' ESCAPE '\\"]
FIRST = [*_MARKUP, *_STEERING, *_FORMULAS, *_QUERIES]


def all_texts() -> list[str]:
    """Over 300: elements times handlers, encodings, and broken forms of what is above."""
    tags = ("img", "svg", "body", "video", "audio", "input", "details", "marquee", "object", "embed", "math", "form")
    events = ("onerror", "onload", "onfocus autofocus", "ontoggle open", "onstart", "onclick", "onmouseover", "onbegin")
    made = [f"<{tag} src=x {event}=window.hit=1>" for tag, event in itertools.product(tags, events)]
    urls = ("javascript:window.hit=1", "JaVaScRiPt:window.hit=1", "java\tscript:window.hit=1", "data:text/html,<script>parent.hit=1</script>", "vbscript:x", "//evil.example/x", "https://evil.example/")  # fmt: skip
    made += [f'<{tag} {attribute}="{url}">x' for (tag, attribute), url in itertools.product((("a", "href"), ("iframe", "src"), ("link rel=stylesheet", "href"), ("base", "href"), ("form", "action"), ("object", "data")), urls)]  # fmt: skip
    made += [f"[x]({url})" for url in urls] + [f"![x]({url})" for url in urls] + list(urls)
    breaks = (
        "</script>",
        "</style>",
        "-->",
        "]]>",
        "'>",
        '">',
        "`>",
        "</textarea>",
        "</title>",
        "\\u003c",
        "&lt;",
        "&#60;",
        "%3C",
    )
    made += [f"{one}<img src=x onerror=window.hit=1>" for one in breaks]
    made += [f"\x1b[{code}m\x1b[{code}Atext" for code in range(30)]
    made += [f"a{chr(code)}b" for code in (*range(32), 127, *range(0x80, 0xA0), 0x200B, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)]  # fmt: skip
    made += [f"{sign}1+1" for sign in "=+-@\t\r"]
    made += [
        "' OR ''='",
        "1; ATTACH 'x' AS y",
        "$1",
        "?",
        "{}",
        "%s%n",
        "\\",
        "'" * 50,
        '"' * 50,
        "x" * 10_000,
        "🙂" * 1000,
    ]
    return [*FIRST, *made]


def in_every_column(served: Served, texts: Sequence[str]) -> Served:
    """The empty store, in which strangers have written each of the texts once in every column."""
    usable = [text.replace("\x00", "") or "x" for text in texts]
    rows = [
        attributed(make_request(at_s=i, **{name: usable[(i + j) % len(usable)] for j, name in enumerate(TEXT_COLUMNS)}))
        for i in range(max(40, len(usable)))
    ]
    with served.store.write() as transaction:
        transaction.insert("requests", request_table(rows))
    served.writer.add_spans(span_table([{"name": one, "scope": one, "start_s": 0, "end_s": 1} for one in usable]))
    for text in usable:
        body = json.dumps({"text": text[:2000], "time": "now-1m"})
        answer = served.client.post("/api/v1/annotations", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (201, 400)
    return served
