"""The interference ledger over the API and on the command line: the analyzer's answer, and its text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import attributed, make_request, request_table
from stocked import Served

from phasewise.analyzer.interference_ledger import window_ledger
from phasewise.analyzer.window import Window
from phasewise.dashboard import cli
from phasewise.dashboard.commands.connection import open_data
from phasewise.dashboard.interference_card import ledger_lines, request_interference_lines
from phasewise.rules.load import Rulebook


def rows() -> list[dict[str, object]]:
    """A chat that loses 0.2 s of its decode to a prompt of 6,000 tokens, and one that nobody is beside."""
    shape: dict[str, Any] = {"queue_s": 0.0, "first_token_s": 0.0}
    chat = make_request(
        at_s=1.0, prefill_s=0.1, decode_s=2.0, tenant="chat", route="/chat", request_key="c" * 32, request_id="cmpl-c", **shape
    )  # fmt: skip
    long = make_request(
        at_s=1.5, prefill_s=0.5, decode_s=1.0, tenant="rag", input_tokens=6000, request_key="d" * 32, request_id="cmpl-d", **shape
    )  # fmt: skip
    alone = make_request(at_s=20.0, prefill_s=0.1, decode_s=1.0, **shape)
    return [
        attributed(chat, {"interference": 0.2, "prefill.compute": 0.1, "decode.weights": 1.8}),
        attributed(long),
        attributed(alone),
    ]


@pytest.fixture
def filled(serve: Callable[..., Served]) -> Served:
    served = serve(filled=False)
    with served.store.write() as transaction:
        transaction.insert("requests", request_table(rows()))
    return served


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    with open_data(tmp_path / "data", create=True) as local, local.store.write() as transaction:
        transaction.insert("requests", request_table(rows()))
    yield tmp_path / "data"


def get(served: Served, path: str, **parameters: object) -> Any:
    return served.client.get(f"/api/v1/interference{path}", params=parameters)


def test_the_api_answers_with_the_ledger_of_the_window(filled: Served, rulebook: Rulebook) -> None:
    told = get(filled, "", **{"from": "0", "to": "now"}).json()
    own = window_ledger(filled.store, rulebook, Window(0, told["window"]["to_unix_ns"]))
    assert told == json.loads(json.dumps(own))
    assert (told["requests"], told["victims"], told["interference_s"], told["unnamed_s"]) == (3, 1, 0.2, 0.0)
    assert told["pairs"] == [
        {
            "culprit": {"tenant": "rag", "route": None},
            "victim": {"tenant": "chat", "route": "/chat"},
            "took_s": 0.2,
            "share": 1.0,
            "victims": 1,
            "provenance": "inferred",
        }
    ]
    assert get(filled, "", **{"from": "0", "f": "tenant:eq:rag"}).json()["pairs"] == []


def test_the_api_answers_for_one_request_by_any_of_its_names(filled: Served) -> None:
    lost, took = get(filled, f"/{'c' * 32}").json(), get(filled, "/cmpl-d").json()
    assert [(one["request_id"], one["took_s"], one["input_tokens"]) for one in lost["culprits"]] == [
        ("cmpl-d", 0.2, 6000)
    ]
    assert [(one["request_id"], one["took_s"]) for one in took["took"]["victims"]] == [("cmpl-c", 0.2)]
    assert took["interference_s"] == 0.0 and took["culprits"] == []
    answer = get(filled, "/nobody")
    assert answer.status_code == 404 and answer.json()["field"] == "id"
    wrong = get(filled, "/cmpl-d", limit=3)
    assert wrong.status_code == 400 and wrong.json()["field"] == "limit"


def test_explain_prints_the_ledger_of_a_window(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--interference", "--data", str(data), "--from", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["interference_s"] == 0.2 and told["culprits"][0]["request_id"] == "cmpl-d"
    assert cli.main(["explain", "--interference", "--data", str(data), "--from", "0"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "lost 200 ms to others' prompts by 1 request" in lines
    assert "who rag → chat /chat 200 ms 100 % 1 victim, by overlap" in lines
    assert "most cmpl-d, rag, 6,000 tokens in 200 ms 100 % of 1 other, by overlap" in lines
    none = ["explain", "--interference", "--data", str(data), "--from", "0", "--to", "10"]
    assert cli.main(none) == 3
    assert "no requests in this window" in capsys.readouterr().err


def test_explain_of_a_request_has_its_part_of_the_ledger(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "cmpl-c", "--data", str(data), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["partition"]["interference"] == 0.2 and told["interference"]["culprits"][0]["request_id"] == "cmpl-d"
    assert cli.main(["explain", "cmpl-d", "--data", str(data)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "took 200 ms of 1 other by its own prompt" in lines
    assert "of cmpl-c, chat /chat, 500 tokens in 200 ms 100 % by overlap" in lines


def test_a_window_stands_with_the_ledger_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "x", "--interference"]) == 2
    assert "takes --interference for a window alone" in capsys.readouterr().err
    assert cli.main(["explain", "x", "--from", "0"]) == 2
    assert "with --interference only" in capsys.readouterr().err


def test_the_text_says_what_is_left_out_and_what_nobody_is_named_for() -> None:
    who = {"tenant": None, "route": None}
    pair = {
        "culprit": who | {"others": 7},
        "victim": who,
        "took_s": 1.0,
        "share": 0.25,
        "victims": 3,
        "provenance": "mixed",
    }
    told = {
        "window": {"from_unix_ns": 0, "to_unix_ns": 10**9}, "requests": 9, "victims": 5, "interference_s": 8.0,
        "read": {"victims": 4, "interference_s": 4.0}, "measured_s": 1.0, "inferred_s": 1.0, "unnamed_s": 2.0,
        "pairs": [pair], "pairs_left_out": {"pairs": 2, "took_s": 1.0}, "culprits": [], "culprits_count": 12,
    }  # fmt: skip
    text = " ".join(" ".join(ledger_lines(told)).split())
    assert text.startswith("window Jan 1, 00:00:00 – 00:00:01 UTC, 9 requests")
    everything = told | {"window": {"from_unix_ns": 0, "to_unix_ns": 4_102_444_800 * 10**9}}
    assert next(ledger_lines(everything)) == "window   Jan 1 1970 00:00:00 – Jan 1 2100 00:00:00 UTC, 9 requests"
    assert "below: 4 s of it, by 4 requests" in text and "2 s of nobody in sight" in text
    assert "7 other tenants and routes → no tenant or route 1 s 25 % 3 victims, by steps and overlap" in text
    assert "and 2 more pairs: 1 s" in text and "and 12 more requests that took some" in text
    nothing = {"interference_s": 0.0, "took": {"took_s": 0.0}}
    assert list(request_interference_lines(nothing)) == []
