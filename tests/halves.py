"""Requests that one engine prefills and another decodes, as spans of SGLang and of a router, and the rows they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from writing import engine_span

PREFILL = {"service.instance.id": "p-0", "service.name": "prefill", "host.name": "p"}
DECODE = {"service.instance.id": "d-0", "service.name": "decode", "host.name": "d"}


def sglang(role: str, number: int, room: str, start_s: float = 0.0, trace: int | None = None) -> list[dict[str, Any]]:
    """One half of a request: waits 1 s and is prefilled 0.5 s on one side, decodes 2 s on the other."""
    trace_id = f"{number * 10 + (role == 'decode') if trace is None else trace:032x}"
    resource = PREFILL if role == "prefill" else DECODE
    end_s = start_s + (1.75 if role == "prefill" else 4.0)
    root = f"{number:08x}{'aa' if role == 'prefill' else 'bb'}000000"
    attributes = {
        "module": "sglang::request",
        "bootstrap_room": room,
        "gen_ai.usage.prompt_tokens": 40,
        "gen_ai.latency.e2e": end_s - start_s,
    }
    if role == "decode":
        attributes |= {"gen_ai.usage.completion_tokens": 9, "gen_ai.latency.time_to_first_token": 2.0}
    slices = {
        "prefill": [("prefill_bootstrap", 0.0, 0.25), ("prefill_waiting", 0.25, 1.25), ("prefill_forward", 1.25, 1.75)],
        "decode": [("decode_bootstrap", 0.0, 1.5), ("decode_waiting", 1.75, 2.0), ("decode_forward", 2.0, 4.0)],
    }[role]
    common = {"scope": "sglang server", "kind": 1, "trace": trace_id, "resource": resource}
    return [
        {"name": f"{role} Req {number:08x}", "span_id": root, "start_s": start_s, "end_s": end_s, "attributes": attributes, **common},
        *(
            {"name": name, "parent": root, "start_s": start_s + low, "end_s": start_s + high, "span_id": f"{root[:12]}{k + 1:04x}", **common}
            for k, (name, low, high) in enumerate(slices)
        ),
    ]  # fmt: skip


ROW = {
    "queue_s": 1.0,
    "prefill_s": 0.5,
    "context_s": 0.25,
    "decode_s": 2.25,
    "e2e_s": 4.0,
    "output_tokens": 9,
    "instance": "d-0",
}
# What a half alone is, once it is given up.
KNOWN = {
    "queue_s": 1.0,
    "prefill_s": 0.5,
    "context_s": 0.25,
    "instance": "p-0",
    "input_tokens": 40,
    "quality": '["decode_missing"]',
}
UNKNOWN = ("e2e_s", "ttft_s", "tpot_s", "decode_s", "output_tokens", "residual_s", "outcome")


def routed(front: str, markers: Sequence[tuple[str, dict[str, str]]], traces: int = 1) -> list[dict[str, Any]]:
    """A router that asks one vLLM to prefill, and when that is done another to decode."""
    spans = []
    for n in range(1, traces + 1):
        more = {"trace": f"{n:032x}", "kind": 1}
        top = f"{n:08x}00000001"
        spans.append(
            {
                "name": front,
                "span_id": top,
                "start_s": 0,
                "end_s": 4,
                "attributes": {"model": "m", "output_tokens": 5},
                **more,
            }
        )
        for k, (name, attributes) in enumerate(markers):
            start, length, resource = (0.0, 1.0, PREFILL) if k == 0 else (1.5, 2.0, DECODE)
            marker = f"{n:08x}1000000{k}"
            spans.append(
                {
                    "name": name,
                    "parent": top,
                    "span_id": marker,
                    "start_s": start,
                    "end_s": start + length,
                    "attributes": attributes,
                    **more,
                }
            )
            spans.append(
                {
                    **engine_span(
                        start_s=start,
                        e2e_s=length,
                        parent=marker,
                        resource=resource,
                        attributes={"gen_ai.usage.completion_tokens": 1 if k == 0 else 5},
                    ),
                    "span_id": f"{n:08x}2000000{k}",
                    **more,
                    "kind": 2,
                }
            )
    return spans  # fmt: skip


LLMD: list[tuple[str, dict[str, str]]] = [("llm_d.pd_proxy.prefill", {}), ("llm_d.pd_proxy.decode", {})]
DYNAMO = [
    ("engine.generate", {"disagg_role": "prefill", "model": "m"}),
    ("engine.generate", {"disagg_role": "decode", "model": "m"}),
]
