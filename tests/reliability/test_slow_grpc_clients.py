"""F32 over gRPC: connections whose headers or bodies never end, and those that never read; over HTTP it is test_receiver_process.py
and test_unread_answers.py."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from http2_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    OPENING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Connection,
    by_the_byte,
    frame,
    header_block,
    message,
)
from machine_speed import slowness
from otlp_messages import span_message, trace_request
from receive_process import EXPORT, Receiving, assert_neighbour_is_stored, receiving
from thin_line import thin_line

from phasewise.collector.limits import INTAKE_LIMITS as LIMITS
from phasewise.collector.limits import MIB

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.slow]
OF_A_KIND = 60
WAITS_S = 5.0  # what a neighbour may wait on a machine that does much else
SLACK_S = 10.0
BLOCK = header_block()
CALL = frame(HEADERS, END_HEADERS, 1, BLOCK)
PIECEMEAL = [
    frame(HEADERS, 0, 1, BLOCK[:1]),
    *(frame(CONTINUATION, 0, 1, BLOCK[i : i + 1]) for i in range(1, len(BLOCK))),
]
BODY = message(bytes(4096))
NO_CALL = {
    "nothing": ((), True),
    "a preface, by the byte": (by_the_byte(OPENING + CALL), True),
    "headers by the byte": ([OPENING, *by_the_byte(CALL)], True),
    "headers in frames of a byte each": ([OPENING, *PIECEMEAL], True),
    "settings, over and over": ([OPENING, *[frame(SETTINGS)] * 100], True),
    "no word about our settings": ([OPENING], False),
}
NO_END = {
    "no body": [OPENING + CALL],
    "a body by the byte": [OPENING + CALL, *by_the_byte(frame(DATA, 0, 1, BODY))],
    "a body in frames of a byte each": [OPENING + CALL, *(frame(DATA, 0, 1, bytes((byte,))) for byte in BODY)],
    "two bodies by the byte": [
        OPENING + CALL + frame(HEADERS, END_HEADERS, 3, BLOCK),
        *(frame(DATA, 0, stream, bytes((byte,))) for byte in BODY for stream in (1, 3)),
    ],
}
EMPTY_CALLS = [
    frame(HEADERS, END_HEADERS, stream, BLOCK) + frame(DATA, END_STREAM, stream, message(b""))
    for stream in range(1, 4000, 2)
]


def test_slow_and_deaf_clients_are_cut_off_and_others_are_not_held_up(tmp_path: Path) -> None:
    with receiving(tmp_path) as process:
        assert_neighbour_is_stored(process)
        before, memory = descriptors(process), process.rss_bytes()
        port = process.grpc_port
        silent = [Connection(port, b"", pieces, polite=polite) for pieces, polite in NO_CALL.values() for _ in range(OF_A_KIND)]  # fmt: skip
        endless = [Connection(port, b"", pieces) for pieces in NO_END.values() for _ in range(OF_A_KIND)]
        deaf = [Connection(port, OPENING + frame(SETTINGS, ACK), EMPTY_CALLS, deaf=True) for _ in range(2 * OF_A_KIND)]
        everybody = [*silent, *endless, *deaf]
        with real_clients(port) as trouble:
            waited_s, most_bytes = 0.0, 0
            ended_s: dict[int, float] = {}
            began = time.monotonic()
            until = began + max(LIMITS.slow_after_s + 2 * LIMITS.idle_s, LIMITS.unread_s) + 2 * SLACK_S
            while any(c.open for c in everybody) and time.monotonic() < until:
                turn = time.monotonic()
                for one in everybody:
                    if one.open:
                        one.step()
                    if id(one) not in ended_s and (not one.open or RST_STREAM in one.heard):
                        ended_s[id(one)] = time.monotonic() - began
                asked = time.monotonic()
                assert_neighbour_is_stored(process)
                waited_s = max(waited_s, time.monotonic() - asked)
                most_bytes = max(most_bytes, process.rss_bytes())
                time.sleep(max(0.0, 1.0 - (time.monotonic() - turn)))
            spent_s = time.monotonic() - began
        for one in everybody:
            one.close()
        slowest = {name: max((ended_s.get(id(c), spent_s) for c in group), default=0.0) for name, group in (("silent", silent), ("endless", endless), ("deaf", deaf))}  # fmt: skip
        print(f"seconds until each was closed, or its call ended: {slowest}; all gone after {spent_s:.0f} s; others waited {waited_s:.2f} s; {(most_bytes - memory) / MIB:.0f} MiB more")  # fmt: skip
        assert not trouble
        assert waited_s < WAITS_S * slowness()
        assert [name for name, group in (("silent", silent), ("endless", endless), ("deaf", deaf)) if any(c.open for c in group)] == []  # fmt: skip
        assert slowest["silent"] < 2 * LIMITS.idle_s + SLACK_S * slowness()
        assert slowest["endless"] < LIMITS.slow_after_s + SLACK_S * slowness()
        assert slowest["deaf"] < LIMITS.unread_s + SLACK_S * slowness()
        assert most_bytes - memory < 64 * MIB
        assert descriptors(process) <= before + 4
        assert process.counters()["requests"]["slow"] >= len(endless)
        assert_neighbour_is_stored(process)


def test_an_answer_that_may_never_be_sent_ends_with_the_age_of_its_connection(tmp_path: Path) -> None:
    """A client that is polite about everything but lets nothing be sent to it; and who sends all the time notices no age."""
    program = (
        "-c",
        "import dataclasses, sys; from phasewise.collector import limits\n"
        "limits.INTAKE_LIMITS = dataclasses.replace(limits.INTAKE_LIMITS, age_s=3.0, body_s=2.0, header_s=1.0)\n"
        "from phasewise.collector.receiver import main; sys.exit(main(sys.argv[1:]))",
    )
    no_window = PREFACE + frame(SETTINGS, content=(4).to_bytes(2, "big") + bytes(4))
    with receiving(tmp_path, program=program) as process, real_clients(process.grpc_port) as trouble:
        holding = [Connection(process.grpc_port, no_window + EMPTY_CALLS[0]) for _ in range(20)]
        began = time.monotonic()
        while any(one.open for one in holding) and time.monotonic() < began + 30:
            for one in holding:
                one.step()
            time.sleep(0.1)
        assert not any(one.open for one in holding)
        assert time.monotonic() - began > 2.0, "closed for another reason"
        time.sleep(3.0)
        assert not trouble
        for one in holding:
            one.close()


def test_large_messages_on_thin_lines_are_held_within_the_budget(tmp_path: Path) -> None:
    """None of them is slow: what has come of all together is bounded, and those beyond are told to come again."""
    body = bytes(60 * MIB)
    with receiving(tmp_path) as process, thin_line(process.grpc_port, 10 * MIB) as port:
        assert_neighbour_is_stored(process)
        before = process.rss_bytes()
        process.reset_peak()

        def sends(_: int) -> grpc.StatusCode:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                try:
                    cast(Any, channel).unary_unary(EXPORT.format("trace", "Trace"))(body, timeout=25)
                except grpc.RpcError as error:
                    return cast(grpc.StatusCode, cast(Any, error).code())
            return grpc.StatusCode.OK

        with ThreadPoolExecutor(8) as pool:
            codes = Counter(pool.map(sends, range(8)))
        more_bytes = process.rss_bytes("VmHWM") - before
        print(f"{dict(codes)}; {more_bytes / MIB:.0f} MiB more")
        assert codes[grpc.StatusCode.UNAVAILABLE] >= 5  # a second one fits only as long as the first is small
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] >= 1, "read to its end: no protobuf"
        assert process.counters()["requests"]["refused_queue_full"] >= codes[grpc.StatusCode.UNAVAILABLE]
        assert more_bytes < LIMITS.queue_bytes + 4 * LIMITS.request_bytes
        assert_neighbour_is_stored(process)


@contextmanager
def real_clients(port: int) -> Iterator[list[Exception]]:
    """Two that keep their channel: one sends all the time, one so seldom that its connection is closed meanwhile. What went wrong."""
    trouble: list[Exception] = []
    stop = threading.Event()

    def sends(pause_s: float) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call: Any = cast(Any, channel).unary_unary(EXPORT.format("trace", "Trace"))
            while not stop.wait(pause_s):
                try:
                    call(trace_request(span_message()).SerializeToString(), timeout=10)
                except grpc.RpcError as error:
                    trouble.append(error)

    threads = [threading.Thread(target=sends, args=(pause_s,)) for pause_s in (0.2, LIMITS.idle_s + 1.0)]
    for thread in threads:
        thread.start()
    try:
        yield trouble
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def descriptors(process: Receiving) -> int:
    return sum(1 for _ in Path(f"/proc/{process.process.pid}/fd").iterdir())
