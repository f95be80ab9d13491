"""F20 to F22: more than it can take: refused to be retried, never killed, never lying, and well again at once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from intake_work import Work, again_s, times_offered, told
from machine_speed import slowness
from mass_senders import BODY_SPANS, Crowd
from memory_bound import killed_for_memory, memory_group, peak_bytes
from otlp_messages import span_message, trace_request
from process_tree import children
from receive_process import RECEIVER, receiving, warm
from serving import Served, serving
from span_ledger import Ledger, Sender, sending
from system_faults import TESTS
from waiting import wait_for

from phasewise.collector.limits import INTAKE_LIMITS

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.slow]
MIB = 1 << 20


def memory_bytes(pid: int) -> int:
    """The most that a process held, without the parts of files (its libraries) that the kernel can drop."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(fields["VmHWM"].split()[0]) - int(fields["RssFile"].split()[0])) * 1024


CALM, MANY, CROWD = 4, 48, 192
TIMES = 10  # what is offered, of what it takes calmly: F20
AT_LEAST_TIMES = 5  # where the machine leaves the clients less of itself
SLOWEST_REPLY_S = 5.0
ANSWER_S = 10.0  # of a machine that its clients share; 3 s where it is the server's own
GOODPUT_RATIO = 0.8
GOODPUT_ROUNDS, GOODPUT_ROUND_S = 6, 2.0  # the ratio of one round is a twentieth off, more or less


def overload(data: Path, seconds: float, rounds: int, store_mib: int) -> None:
    """Rounds of what it can take (R) and of ten times that, by clients that come again however often they are refused; then half of
    it: answers, memory, recovery, and the account."""
    ledger = Ledger()
    calm, over = Work(), Work()
    warm()
    with serving(data) as server:
        ports = {"grpc": server.ready["otlp_grpc_port"], "http": server.ready["otlp_http_port"]}
        pids = children(server.process.pid)
        crowd = Crowd(ports["http"], CROWD, seed=random.randrange(2**32))
        for _ in range(rounds):
            with calm.counted(pids["receive"], crowd.sending(CALM, again_s=0.1)):
                time.sleep(seconds)
            others = [Sender(ledger, lambda: ports["grpc"], "grpc", pause_s=0.2, timeout_s=60.0) for _ in range(2)]
            before = len(ledger.acknowledged)
            with (
                answering(server),
                over.counted(pids["receive"], crowd.sending(CROWD, again_s(calm, CROWD, TIMES))),
                sending(*others),
            ):
                time.sleep(seconds)
            over.others += len(ledger.acknowledged) - before
        assert children(server.process.pid) == pids, "a process died"
        assert wait_for(lambda: server.get("/api/v1/health")["status"] == "ok", 10.0)
        rate = min(calm.phase.spans_per_s, over.phase.spans_per_s)
        with crowd.sending(CALM, again_s=0.1, spans_per_s=rate / 2) as half:
            time.sleep(seconds)
        assert children(server.process.pid) == pids
        peaks = {name: memory_bytes(pid) // MIB for name, pid in pids.items()}
        server.stop()
    print(
        f"{told(calm, over)}; slowest of a hundred replies {p99(over.phase.acknowledged_s):.1f} s "
        f"(R: {p99(calm.phase.acknowledged_s):.1f} s); then half of R: {half.refused} refused; peaks in MiB {peaks}"
    )
    assert times_offered(calm, over) > AT_LEAST_TIMES, "it was not more than it can take"
    assert over.phase.refused == over.phase.hinted, "refused, and not told when to come again"
    assert over.phase.unknown == 0
    assert set(ledger.answers) <= {"acknowledged", "refused"} and ledger.answers["acknowledged"]
    # Nobody waits longer than what may wait takes at the rate of this machine.
    queue_s = INTAKE_LIMITS.queue_bytes / (rate * crowd.body_bytes / BODY_SPANS)
    assert p99(over.phase.acknowledged_s) < max(SLOWEST_REPLY_S * slowness(), 2 * queue_s)
    assert (half.refused, half.unknown) == (0, 0) and half.acknowledged
    assert p99(half.acknowledged_s) < max(SLOWEST_REPLY_S * slowness(), queue_s)
    assert peaks["receive"] < 512
    crowd.assert_account(data, 900.0, ledger)
    assert peaks["store"] < store_mib


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


@contextmanager
def answering(server: Served) -> Iterator[None]:
    """Health and a question over everything are asked and answered while it is overloaded, which lasts no longer for that."""
    took: list[float] = []
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            for path, asked in (("/api/v1/health", []), ("/api/v1/verdict", [("from", "0"), ("to", "4102444800")])):
                began = time.monotonic()
                assert server.get(path, asked)
                took.append(time.monotonic() - began)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failed, failed
    assert max(took) < ANSWER_S * slowness()


def test_more_than_it_can_take_is_refused_and_nothing_breaks(tmp_path: Path) -> None:
    """F20, but for its goodput, which is asked of the receiver alone: the store beside it takes the more of the machine the more is taken in."""
    overload(tmp_path / "data", 0.8, 3, 2048)


@pytest.mark.nightly
def test_rounds_of_it(tmp_path: Path) -> None:
    # A question over everything takes more memory the more there is, and with millions of requests more than the 2 GB that the store is to
    # have: docs/reliability.md says so. This bounds how much more.
    overload(tmp_path / "data", 3.0, 5, 4096)


def test_goodput_under_overload(tmp_path: Path) -> None:
    """F20: of what it takes calmly, at least eight tenths are taken while ten times that is offered, by clients on the same machine."""
    calm, over = Work(), Work()
    with receiving(tmp_path / "data") as process:
        crowd = Crowd(process.http_port, CROWD, seed=random.randrange(2**32))
        for _ in range(GOODPUT_ROUNDS):
            with calm.counted(process.process.pid, crowd.sending(CALM, again_s=0.1)):
                time.sleep(GOODPUT_ROUND_S)
            with over.counted(process.process.pid, crowd.sending(CROWD, again_s(calm, CROWD, TIMES))):
                time.sleep(GOODPUT_ROUND_S)
        process.stop()
    print(told(calm, over))
    crowd.assert_journal(tmp_path / "data")
    assert times_offered(calm, over) > AT_LEAST_TIMES, "it was not more than it can take"
    assert over.phase.refused == over.phase.hinted and over.phase.unknown == 0
    assert over.per_s > GOODPUT_RATIO * calm.per_s


def test_within_512_mib_it_refuses_and_is_not_ended(tmp_path: Path) -> None:
    """F22: a container's limit, the kernel's hand on it: more is refused, and below it all goes on."""
    with memory_group(512 * MIB) as group:
        program = (str(TESTS / "memory_bound.py"), str(group), *RECEIVER)
        with receiving(tmp_path / "data", program=program) as process:
            crowd = Crowd(process.http_port, MANY, seed=random.randrange(2**32))
            with crowd.sending(MANY, again_s=0.02) as over:
                time.sleep(4.0)
            with crowd.sending(CALM, again_s=0.1) as calm:
                time.sleep(1.0)
            assert process.process.poll() is None
            peak = peak_bytes(group) // MIB
            print(
                f"{over.acknowledged:,} spans taken, {over.refused:,} requests refused; {peak} MiB with cached files, {process.rss_bytes('VmHWM') // MIB} without"
            )
            assert killed_for_memory(group) == 0
            assert over.refused > 0 and over.unknown == 0 and over.acknowledged
            assert (calm.refused, calm.unknown) == (0, 0) and calm.acknowledged
            process.stop()
        crowd.assert_journal(tmp_path / "data")


def test_refused_senders_are_sent_away_for_different_times(tmp_path: Path) -> None:
    """F21: 200 refusals spread over the hinted seconds, so that the senders do not come back as one."""
    with receiving(tmp_path, journal_limit_bytes=1) as process:
        body = trace_request(span_message()).SerializeToString()
        whole = Counter(int(process.post(body).headers["retry-after"]) for _ in range(50))
        tenths: Counter[int] = Counter()
        for _ in range(200):
            with pytest.raises(grpc.RpcError) as raised:
                process.export(body)
            error: Any = raised.value
            hint = RetryInfo.FromString(dict(error.trailing_metadata())["google.rpc.retryinfo-bin"]).retry_delay
            tenths[int((hint.seconds + hint.nanos / 1e9) * 10)] += 1
    assert set(whole) == {1, 2}  # HTTP has whole seconds only
    assert set(tenths) <= set(range(10, 21))
    assert max(tenths.values()) < 3 * 200 / 10  # in any tenth of a second of the one over which they are spread
