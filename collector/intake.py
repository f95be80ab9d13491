"""What happens to a request between its socket and its reply, the same for gRPC and HTTP.

inflate -> OTLP/JSON to protobuf -> scan -> redact -> journal, synced -> reply. The loop of the process runs this; the fronts only
translate replies. Up to `redact` a worker thread does it, or the loop itself where that is sooner done than handed over. Work that
was begun is finished even when its sender has gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from phasewise.collector.committer import Committer, QueueFull
from phasewise.collector.journal import JournalFailed, JournalFull, Kind
from phasewise.collector.limits import IntakeLimits
from phasewise.collector.log_scan import NOT_KEPT, scan_logs
from phasewise.collector.metric_scan import scan_metrics
from phasewise.collector.otlp_json import Signal, json_to_protobuf
from phasewise.collector.receipts import Receipts
from phasewise.collector.records import Scanned
from phasewise.collector.redact import RedactionPolicy, redact_metrics, redact_spans
from phasewise.collector.room import Holding, Room
from phasewise.collector.scan import scan_traces
from phasewise.collector.scanners import Scan
from phasewise.collector.tenants import with_tenant
from phasewise.collector.wire import Malformed, TooLarge

Encoding = Literal["identity", "gzip", "deflate"]
Status = Literal["ok", "malformed", "too_large", "refused", "internal"]
# Reading holds the interpreter lock for much of its time: two bodies read at once take longer than one after the other (under overload by
# a tenth), and hold more memory. The second thread is for what comes behind a body that takes long.
_WORKERS, TURN_S = 2, 0.1
# Traces of that size in protobuf are mostly read in a millisecond, and a thread takes as long to be woken and heard of. Where reading
# took long, since each span was odd, threads read what comes for a while: the loop serves others too.
_AT_ONCE_BYTES = 512 << 10
LONG_S, THREADS_FOR_S = 0.02, 1.0
_INFLATE_STEP_BYTES = 1 << 18
_PACKED_STEP_BYTES = 1 << 16
_INFLATE_AT_ONCE_BYTES = 4 << 20
_WBITS: Mapping[Encoding, int] = {"gzip": 31, "deflate": 15}  # zlib's numbers for the framing, largest window
_WARN_EVERY_S = 60.0
_WARNED_PEERS = 1024
log = logging.getLogger("phasewise.receive")


@dataclass(frozen=True, slots=True)
class Body:
    """A request as it came: signal, encodings, bytes, and who sent it: an address, and the tenant of its key (None: no key)."""

    signal: Signal
    data: bytes
    json: bool = False
    encoding: Encoding = "identity"
    peer: str = ""
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What to tell the sender. rejected: items that can never be kept; message: English, empty when there is nothing to say.

    retry_after_s: seconds to wait before trying again, where that helps; HTTP can say whole ones only.
    """

    status: Status
    rejected: int = 0
    message: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    kind: Kind
    scanned: Scanned
    redacted: dict[str, int]
    noun: str
    grown_bytes: int  # by decompression: of rows that wait, more than what came


class Intake:
    """Takes requests on one event loop, and holds what is under way within the limits."""

    def __init__(
        self,
        committer: Committer,
        receipts: Receipts,
        limits: IntakeLimits,
        policy: RedactionPolicy,
        clock: Callable[[], int] = time.time_ns,
        scan: Scan = scan_traces,
        is_quick: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_quick: whether `scan` is the compiled one by now; the plain one would hold up the loop."""
        self._scan = scan
        self._is_quick = is_quick
        self._threads_until_s = 0.0
        self.limits = limits
        self.receipts = receipts
        self.room = Room(limits)
        self.draining = False
        self._committer = committer
        self._policy = policy
        self._clock = clock
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="scan")
        self._turn = threading.Lock()
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._warned_at: OrderedDict[str, float] = OrderedDict()

    def refusal(self, reason: str) -> Reply:
        """ "Retry later", counted; the hint is spread so that senders do not all come back at once."""
        self.receipts.request(f"refused_{reason}")
        words = {
            "queue_full": "too much is waiting to be written",
            "journal_full": "the journal is full",
            "journal_failed": "the disk failed",
            "draining": "the receiver is stopping",
        }
        low, high = self.limits.retry_after_s
        return Reply("refused", message=f"{words[reason]}; retry", retry_after_s=random.uniform(low, high))

    async def take(self, body: Body) -> Reply:
        """Store a request. Returns when it is durable or refused."""
        if self.draining:
            return self.refusal("draining")
        task = asyncio.create_task(self._take(body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.receipts.request("cancelled")
            raise

    async def drain(self, within_s: float) -> bool:
        """Refuse what comes, finish what is under way; False when that took longer."""
        self.draining = True
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            return not late
        return True

    def close(self) -> None:
        """Let go of the worker threads, whatever they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _take(self, body: Body) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            if self._is_done_at_once(body):
                prepared = self._prepare_at_once(body)
            else:
                prepared = await loop.run_in_executor(self._pool, self._prepare_in_turn, body)
        except Malformed as error:
            self.receipts.request("malformed")
            return Reply("malformed", message=str(error))
        except TooLarge as error:
            self.receipts.request("too_large")
            return Reply("too_large", message=str(error))
        except Exception:
            return self._broken()
        if isinstance(prepared, Reply):
            return prepared
        if prepared.scanned.rows.num_rows:
            refused = await self._commit(prepared)
            if refused is not None:
                return self.refusal(refused)
        return self._stored(prepared, body.peer)

    async def _commit(self, prepared: _Prepared) -> str | None:
        """The reason where it is refused."""
        rows = prepared.scanned.rows
        held = Holding(self.room)
        try:
            if not held.more(prepared.grown_bytes):
                self.receipts.refused(prepared.kind, rows.num_rows, "queue_full")
                return "queue_full"
            await asyncio.wrap_future(self._committer.submit(prepared.kind, rows))
        except QueueFull:
            return "queue_full"
        except JournalFull:
            return "journal_full"
        except JournalFailed:
            return "journal_failed"
        finally:
            held.release()
        return None

    def _is_done_at_once(self, body: Body) -> bool:
        plain = body.signal == "traces" and body.encoding == "identity" and not body.json
        small = plain and len(body.data) <= _AT_ONCE_BYTES
        return small and self._is_quick() and time.monotonic() >= self._threads_until_s

    def _prepare_at_once(self, body: Body) -> _Prepared | Reply:
        started_s = time.thread_time()
        try:
            return self._prepare(body)
        finally:
            if time.thread_time() - started_s > LONG_S:
                self._threads_until_s = time.monotonic() + THREADS_FOR_S

    def _prepare_in_turn(self, body: Body) -> _Prepared | Reply:
        has_turn = self._turn.acquire(timeout=TURN_S)
        try:
            return self._prepare(body)
        finally:
            if has_turn:
                self._turn.release()

    def _prepare(self, body: Body) -> _Prepared | Reply:
        data = body.data
        if body.encoding != "identity":
            data = inflated(data, self.limits.request_bytes, body.encoding)
        grown_bytes = max(0, len(data) - len(body.data))
        if body.json:
            if len(data) > self.limits.json_bytes:
                raise TooLarge(f"OTLP/JSON may have {self.limits.json_bytes:,} bytes, protobuf more")
            data = json_to_protobuf(data, body.signal)
        received_unix_ns = self._clock()
        kind: Kind = "spans"
        noun = "spans"
        if body.signal == "logs":
            noun = "log records"
            scanned = scan_logs(data, received_unix_ns)
            if not scanned.rows.num_rows and set(scanned.rejected) <= {NOT_KEPT}:
                return self._unsupported(scanned.rejected.get(NOT_KEPT, 0))
            rows, redacted = redact_spans(scanned.rows, self._policy)
        elif body.signal == "traces":
            scanned = self._scan(data, received_unix_ns)
            rows, redacted = redact_spans(scanned.rows, self._policy, scanned.names)
        else:
            kind, noun = "metrics", "points"
            scanned = scan_metrics(data, received_unix_ns)
            rows, redacted = redact_metrics(scanned.rows, self._policy)
        if body.tenant is not None and kind == "spans":
            rows = with_tenant(rows, body.tenant)
        self.receipts.scanned(kind, rows.num_rows, len(data), scanned.rejected, scanned.warned, redacted)
        kept = Scanned(rows, scanned.rejected, scanned.warned, scanned.first_error)
        return _Prepared(kind, kept, redacted, noun, grown_bytes)

    def _unsupported(self, count: int) -> Reply:
        self.receipts.request("unsupported_signal")
        kept = "log records are not kept, but Dynamo's request records are: send traces and metrics"
        return Reply("ok", count, kept if count else "")

    def _stored(self, prepared: _Prepared, peer: str) -> Reply:
        scanned = prepared.scanned
        rejected = sum(scanned.rejected.values())
        if rejected:
            self.receipts.request("partial")
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(scanned.rejected.items()))
            return Reply(
                "ok", rejected, f"{rejected} {prepared.noun} refused ({reasons}); first: {scanned.first_error}"
            )
        self.receipts.request("ok" if scanned.rows.num_rows else "empty")
        return Reply("ok", message=self._warning(scanned.warned, prepared.redacted, peer))

    def _warning(self, warned: Mapping[str, int], redacted: Mapping[str, int], peer: str) -> str:
        """What was changed, told to each sender at most once a minute."""
        if not warned and not redacted:
            return ""
        now = time.monotonic()
        if now - self._warned_at.get(peer, -_WARN_EVERY_S) < _WARN_EVERY_S:
            return ""
        self._warned_at[peer] = now
        self._warned_at.move_to_end(peer)
        while len(self._warned_at) > _WARNED_PEERS:
            self._warned_at.popitem(last=False)
        told = [f"{count} {reason}" for reason, count in sorted(warned.items())]
        told += [f"{count} values removed ({reason})" for reason, count in sorted(redacted.items())]
        return f"stored, but changed: {', '.join(told)}"

    def _broken(self) -> Reply:
        identifier = uuid.uuid4().hex[:12]
        self.receipts.request("internal")
        log.exception("request failed, error id %s", identifier)
        return Reply("internal", message=f"internal error {identifier}; please report it with the log around that id")


def inflated(data: bytes, limit_bytes: int, encoding: Encoding = "gzip") -> bytes:
    """gzip or zlib ("deflate") content, of one or more members. Raises TooLarge as soon as it would grow over the limit, and Malformed.

    Beyond a few MiB it is first only measured, so that what is over the limit never lies in memory, then inflated into place.
    """
    parts: list[bytes] = []
    total = members = 0
    for part, ended in _inflating(data, limit_bytes, encoding):
        total += len(part)
        members += ended
        if total <= _INFLATE_AT_ONCE_BYTES:
            parts.append(part)
    if total <= _INFLATE_AT_ONCE_BYTES:
        return b"".join(parts)
    if members == 1:
        return zlib.decompress(data, wbits=_WBITS[encoding], bufsize=total)
    return b"".join(part for part, _ in _inflating(data, limit_bytes, encoding))


def _inflating(data: bytes, limit_bytes: int, encoding: Encoding) -> Iterator[tuple[bytes, bool]]:
    """Parts of the content, and whether a member ended with them. What is packed is looked at in pieces, never copied as a whole."""
    packed = memoryview(data)
    total = at = 0
    while at < len(packed):
        stream = zlib.decompressobj(wbits=_WBITS[encoding])
        piece: memoryview | bytes = b""
        while not stream.eof:
            if not piece:
                piece = packed[at : at + _PACKED_STEP_BYTES]
                at += len(piece)
            at_end = not piece
            try:
                part = stream.decompress(piece, _INFLATE_STEP_BYTES)
            except zlib.error as error:
                raise Malformed(f"its {encoding} is damaged: {error}") from None
            piece = stream.unconsumed_tail
            if not part and at_end and not stream.eof:
                raise Malformed(f"its {encoding} is cut off")
            total += len(part)
            if total > limit_bytes:
                raise TooLarge(f"it has over {limit_bytes:,} bytes after decompression")
            yield part, stream.eof
        at -= len(stream.unused_data)
