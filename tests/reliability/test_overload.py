"""F20 to F22: more than it can take: refused to be retried, never killed, never lying, and well again at once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from mass_senders import BODY_SPANS, Crowd, Phase
from memory_bound import killed_for_memory, memory_group, peak_bytes
from otlp_messages import span_message, trace_request
from process_tree import children, cpu_s
from receive_process import RECEIVER, receiving, warm
from serving import Served, serving
from span_ledger import Ledger, Sender, sending
from system_faults import TESTS
from waiting import wait_for

from phasewise.collector.limits import INTAKE_LIMITS

pytestmark = [pytest.mark.live, pytest.mark.slow]
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
GOODPUT_RATIO = 0.8  # F20, by long rounds; short ones, of which one in three is a fifth off, are held to LEAST_RATIO
LEAST_RATIO = 0.6


def overload(data: Path, seconds: float, rounds: int, store_mib: int, goodput_ratio: float) -> None:
    """Rounds of what it can take (R) and of ten times that, by clients that come again however often they are refused; then half of
    it: answers, memory, goodput, recovery, and the account.

    Clients and server share a machine, so that what is taken a second says how much of it the clients left. Compared is what is taken
    with a second of the receiver's own processor time, the median of the rounds; the others are printed.
    """
    ledger = Ledger()
    done: list[tuple[Work, Work]] = []
    warm()
    with serving(data) as server:
        ports = {"grpc": server.ready["otlp_grpc_port"], "http": server.ready["otlp_http_port"]}
        pids = children(server.process.pid)
        crowd = Crowd(ports["http"], CROWD, seed=random.randrange(2**32))
        for _ in range(rounds):
            calm, over = Work(), Work()
            with calm.counted(pids["receive"]), crowd.sending(CALM, again_s=0.1) as calm.phase:
                time.sleep(seconds)
            again_s = CROWD * BODY_SPANS / (TIMES * calm.phase.spans_per_s)
            others = [Sender(ledger, lambda: ports["grpc"], "grpc", pause_s=0.2, timeout_s=60.0) for _ in range(2)]
            before = len(ledger.acknowledged)
            with (
                answering(server),
                over.counted(pids["receive"]),
                crowd.sending(CROWD, again_s) as over.phase,
                sending(*others),
            ):
                time.sleep(seconds)
            over.others = len(ledger.acknowledged) - before
            done.append((calm, over))
        assert children(server.process.pid) == pids, "a process died"
        assert wait_for(lambda: server.get("/api/v1/health")["status"] == "ok", 10.0)
        calm, over = Work.of([one for one, _ in done]), Work.of([one for _, one in done])
        rate = min(calm.phase.spans_per_s, over.phase.spans_per_s)
        with crowd.sending(CALM, again_s=0.1, spans_per_s=rate / 2) as half:
            time.sleep(seconds)
        assert children(server.process.pid) == pids
        peaks = {name: memory_bytes(pid) // MIB for name, pid in pids.items()}
        server.stop()
    times = over.phase.offered_per_s / calm.phase.spans_per_s
    print(
        f"R: {calm}; offered {over.phase.offered_per_s:,.0f} spans/s, {times:.1f} R: {over}; goodput of R by the second "
        f"{over.per_s / calm.per_s:.2f}, by the second that the clients left {over.per_left_s / calm.per_left_s:.2f}, by the receiver's "
        f"CPU-second {median(ratios(done)):.2f} ({', '.join(f'{one:.2f}' for one in ratios(done))}); {over.phase.refused:,} requests refused; slowest "
        f"of a hundred replies {p99(over.phase.acknowledged_s):.1f} s (R: {p99(calm.phase.acknowledged_s):.1f} s); then half of R: "
        f"{half.refused} refused; peaks in MiB {peaks}"
    )
    assert times > AT_LEAST_TIMES, "it was not more than it can take"
    assert over.phase.refused == over.phase.hinted, "refused, and not told when to come again"
    assert over.phase.unknown == 0
    assert set(ledger.answers) <= {"acknowledged", "refused"} and ledger.answers["acknowledged"]
    assert median(ratios(done)) > goodput_ratio
    # Nobody waits longer than what may wait takes at the rate of this machine.
    queue_s = INTAKE_LIMITS.queue_bytes / (rate * crowd.body_bytes / BODY_SPANS)
    assert p99(over.phase.acknowledged_s) < max(SLOWEST_REPLY_S, 2 * queue_s)
    assert (half.refused, half.unknown) == (0, 0) and half.acknowledged
    assert p99(half.acknowledged_s) < max(SLOWEST_REPLY_S, queue_s)
    assert peaks["receive"] < 512
    crowd.assert_account(data, 900.0, ledger)
    assert peaks["store"] < store_mib


def ratios(done: Sequence[tuple[Work, Work]]) -> list[float]:
    """What it takes under overload of what it takes calmly, by its CPU-second, round by round."""
    return [over.per_cpu_s / calm.per_cpu_s for calm, over in done]


@dataclass
class Work:
    """What was answered, and the time of processors that the receiver and the clients took meanwhile."""

    phase: Phase = field(default_factory=Phase)
    others: int = 0  # spans taken of other clients meanwhile
    cpu_s: float = 0.0
    clients_cpu_s: float = 0.0

    @classmethod
    def of(cls, parts: Sequence[Work]) -> Work:
        whole = cls()
        for part in parts:
            whole.phase.add(part.phase)
            whole.others += part.others
            whole.cpu_s += part.cpu_s
            whole.clients_cpu_s += part.clients_cpu_s
        return whole

    @contextmanager
    def counted(self, pid: int) -> Iterator[None]:
        before, clients_before = cpu_s(pid), time.process_time()
        yield
        self.cpu_s += cpu_s(pid) - before
        self.clients_cpu_s += time.process_time() - clients_before

    @property
    def _spans(self) -> int:
        return self.phase.acknowledged + self.others

    @property
    def per_s(self) -> float:
        return self._spans / self.phase.seconds

    @property
    def per_left_s(self) -> float:
        """By the second of the whole machine, less what the clients took of it."""
        processors = os.cpu_count() or 1
        return self._spans / (self.phase.seconds - self.clients_cpu_s / processors)

    @property
    def per_cpu_s(self) -> float:
        return self._spans / self.cpu_s

    def __str__(self) -> str:
        share = self.clients_cpu_s / self.phase.seconds / (os.cpu_count() or 1)
        return f"{self.per_s:,.0f} spans/s taken, {self.per_cpu_s:,.0f} by the receiver's CPU-second, clients {share:.0%} of the machine"


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
    assert max(took) < ANSWER_S


def test_more_than_it_can_take_is_refused_and_nothing_breaks(tmp_path: Path) -> None:
    """F20, but for its goodput: that is `test_rounds_of_it`."""
    overload(tmp_path / "data", 0.8, 3, 2048, LEAST_RATIO)


@pytest.mark.nightly
def test_rounds_of_it(tmp_path: Path) -> None:
    # A question over everything takes more memory the more there is, and with millions of requests more than the 2 GB that the store is to
    # have: docs/reliability.md says so. This bounds how much more.
    overload(tmp_path / "data", 3.0, 5, 4096, GOODPUT_RATIO)


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
