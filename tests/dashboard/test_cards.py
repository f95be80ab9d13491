from __future__ import annotations

import copy
from typing import Any

import pytest
from rich.console import Console

from phasewise.dashboard.cards import Card, card_of, clean, markdown
from phasewise.dashboard.terminal import show

VERDICT: dict[str, Any] = {
    "status": "slow",
    "headline": "Slow: affected requests mostly wait for a free slot in the batch (93% of their time).",
    "window": {"from_unix_ns": 1_795_972_770 * 10**9, "to_unix_ns": 1_795_972_850 * 10**9},
    "requests": 96,
    "refused": 0,
    "aborted": 0,
    "open": 0,
    "affected": {"count": 10, "of": 96, "slo": "slowest tenth by end-to-end time", "over_limit": None, "matching": 10},
    "baseline": {"matched": False},
    "primary": "queueing",
    "cause": "queue.slots",
    "shares": {"queue.slots": 0.9, "decode.weights": 0.08, "host": 0.02},
    "confidence": {"level": "high", "checks": []},
    "evidence": [
        {
            "name": "queue share",
            "observed": 0.93,
            "expected": "under 0.1",
            "unit": "ratio",
            "says": "for",
            "about": "queueing",
        },
        {
            "name": "waiting requests",
            "observed": 46.0,
            "expected": "0",
            "unit": "requests",
            "says": "for",
            "about": "queueing",
        },
        {
            "name": "KV cache in use, p95",
            "observed": 0.0055,
            "expected": "under 0.9",
            "unit": "ratio",
            "says": "against",
            "about": "kv",
        },
    ],
    "recommend": [
        {
            "technique": "raise_max_num_seqs",
            "title": "Let more sequences run at once",
            "ceiling": {"direct": 0.02, "induced": 0.8},
            "expected": {"low": 0.3, "high": 0.7, "source": "model estimate"},
            "flags": {"vllm": "--max-num-seqs 8"},
            "current": {"value": 4, "source": "plateau"},
            "risk": {"level": "low", "reason": "TPOT rises with the batch"},
            "output_effect": "exact",
            "requires_with": ["admission_control"],
        }
    ],
    "will_not_help": [
        {
            "technique": "kv_cache_quantization",
            "title": "Quantize the KV cache",
            "reason": "the KV cache is 0.55 % full",
            "starts_to_help_at": "at KV use over 90 %",
        }
    ],
    "missing": [
        {"signal": "cached_tokens", "how": "send gen_ai.usage.cached_tokens", "why": "the cache hit is unknown"}
    ],
    "verify": {
        "command": "phasewise analyze",
        "arms": ["as now", "more slots"],
        "minutes": 10,
        "pass": "p95 halves",
        "guard": "mix",
    },
    "stage": "chosen",
    "provenance": {"rules": "ab12", "analyzer": "0.1.0", "coverage": 1.0},
}


def verdict(**changed: Any) -> dict[str, Any]:
    return copy.deepcopy(VERDICT) | changed


def drawn(card: Card, width: int = 110, **how: bool) -> str:
    screen = Console(
        width=width, force_terminal=False, highlight=False, emoji=False, markup=False, record=True, quiet=False
    )
    with screen.capture() as capture:
        show(card, to=screen, **how)
    return capture.get()


def test_a_full_card_names_cause_evidence_change_refusal_check_and_provenance() -> None:
    text = drawn(card_of(VERDICT))
    for expected in (
        "Requests wait for a free batch slot",
        "confidence high",
        "the slowest 10 of 96 requests",
        "93 %",
        "against KV cache",
        "--max-num-seqs 8",
        "at best −82 %",
        "2 % direct, 80 % from waiting that drains",
        "expect −30 % to −70 % (model estimate)",
        "risk low (TPOT rises with the batch)",
        "now 4 (plateau)",
        "together with admission_control",
        "Quantize the KV cache: the KV cache is 0.55 % full; starts to help at KV use over 90 %",
        "proven if p95 halves",
        "rules ab12",
        "100 % with phase data",
        "not yet proven by ablation",
    ):
        assert expected in " ".join(text.split()), expected


def test_the_word_caused_by_is_kept_for_proven_findings() -> None:
    assert "caused by" not in drawn(card_of(VERDICT))
    assert "proven by ablation" in card_of(verdict(stage="ablated")).standing


def test_the_time_line_says_whose_time_it_is() -> None:
    assert "time     of all 96 requests: " in drawn(card_of(VERDICT), width=200)
    assert "Time of all 96 requests: " in markdown(card_of(VERDICT))


def test_a_compact_card_fits_five_lines() -> None:
    assert len(drawn(card_of(VERDICT), width=240, compact=True).splitlines()) == 5


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int) -> None:
    text = drawn(card_of(VERDICT), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "admission_control" in text


def test_under_thirty_affected_requests_there_is_no_percentage() -> None:
    few = verdict(affected={"count": 12, "of": 96, "slo": "ttft 2 s", "over_limit": 12, "matching": 9})
    many = verdict(affected={"count": 48, "of": 96, "slo": "ttft 2 s", "over_limit": 48, "matching": 40})
    assert "12 of 96 requests break TTFT 2 s, 9 of them" in card_of(few).affected
    assert "48 of 96 requests (50" in card_of(many).affected


def test_evidence_against_the_verdict_itself_is_said_in_the_standing() -> None:
    changed = verdict()
    changed["evidence"][1]["says"] = "against"
    assert card_of(changed).standing.startswith("contradicted by 1 of 2")


def test_unknown_is_a_card_of_its_own() -> None:
    card = card_of(
        {"status": "unknown", "requests": 0, "missing": VERDICT["missing"], "verify": None, "baseline": None}
    )
    text = drawn(card)
    assert "Not enough evidence" in text
    assert "send gen_ai.usage.cached_tokens" in text
    assert "0 requests" in text


def test_a_recording_is_badged_by_what_travels_with_its_rows() -> None:
    told = verdict(recorded={"vllm-overload": {"badge": "recorded 2026-11-29: vLLM"}})
    assert card_of(told).badge == "recorded 2026-11-29: vLLM"
    assert "recorded" in drawn(card_of(told))
    assert card_of(VERDICT).badge is None


@pytest.mark.parametrize(
    ("badge", "label", "rest"),
    [
        ("recorded 2026-11-29: vLLM", "recorded", "2026-11-29: vLLM"),
        ("simulated NVIDIA L4: Llama-3.1-8B, live", "simulated", "NVIDIA L4: Llama-3.1-8B, live"),
        ("live, simulated NVIDIA H100 SXM: llama-3.1-8b", "live", "simulated NVIDIA H100 SXM: llama-3.1-8b"),
        ("deployment 7", "about", "deployment 7"),
    ],
)
def test_the_first_line_of_a_card_says_what_kind_of_rows_it_is_about(badge: str, label: str, rest: str) -> None:
    line = drawn(card_of(VERDICT, badge=badge)).splitlines()[2]
    assert line.split(maxsplit=1)[0] == label
    assert line.split(maxsplit=1)[1].strip() == rest


def test_text_from_telemetry_steers_no_terminal_and_no_page() -> None:
    hostile = "\x1b[31mred\x07 \u202eabc <img src=x onerror=alert(1)> [x](http://y) | `code`"
    changed = verdict(headline=hostile)
    changed["evidence"][0]["name"] = hostile
    text = drawn(card_of(changed))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "<img" not in markdown(card_of(changed)).replace("\\<img", "")
    assert clean("a\nb") == "a b"


def test_markdown_has_the_evidence_as_a_table_and_no_narrower_truth() -> None:
    text = markdown(card_of(VERDICT, badge="recorded: vLLM"))
    assert text.startswith("### Queueing: Requests wait for a free batch slot")
    assert "| queue share |" in text
    assert "> recorded: vLLM" in text
    assert text.count("kv\\_cache") == 0  # the title stands for the id
    assert "Will not help" in text and "Verify" in text and "Missing" in text


def test_a_pipe_gets_no_colour_codes() -> None:
    assert "\x1b" not in drawn(card_of(VERDICT))


def test_many_runs_behind_the_rows_are_counted_not_listed() -> None:
    facts = {"badge": "simulated NVIDIA L4: Llama, scenario kv_pool"}
    few = {f"simulated-{k}": facts for k in range(2)}
    assert card_of(VERDICT | {"recorded": few}).badge == "; ".join([facts["badge"]] * 2)
    many = {f"simulated-{k}": facts for k in range(15)} | {"vllm-overload": {"badge": "recorded 2025: vLLM"}}
    assert card_of(VERDICT | {"recorded": many}).badge == "simulated, 15 runs; recorded, 1 run"


def test_one_request_is_one_request() -> None:
    told = VERDICT | {"requests": 1, "affected": VERDICT["affected"] | {"count": 1, "of": 1, "matching": 1}, "open": 1}
    card = card_of(told)
    assert card.affected.startswith("the only request, 1 of them bound by Queueing; 1 still open")
    assert "1 request," in card.provenance and "1 requests" not in card.affected + card.provenance


def test_a_card_says_how_many_requests_were_read_where_not_all() -> None:
    told = {"rules": "ab12", "drawn": {"read": 120_113, "of": 1_204_311, "by": "request_key", "baseline": None}}
    assert (
        "1,204,311 requests, 120,113 of them read"
        in card_of(VERDICT | {"requests": 1_204_311, "provenance": told}).provenance
    )
    whole = {"rules": "ab12", "drawn": {"read": 96, "of": 96, "by": "request_key", "baseline": {"read": 5, "of": 9}}}
    assert "read" not in card_of(VERDICT | {"requests": 96, "provenance": whole}).provenance
