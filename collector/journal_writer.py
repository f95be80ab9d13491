"""The writing side of the journal; what it promises stands in ``journal``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa

from phasewise.collector.durable import sync_path
from phasewise.collector.segment import CODES, Gap, Kind, Position, frames, header, segment_numbers, segment_path
from phasewise.rules.errors import MachineError

SEGMENT_BYTES = 64 << 20
SEGMENT_AGE_S = 60.0
JOURNAL_BYTES = 8 << 30
VOLUME_RATIO = 0.10  # of the volume, where that is less than JOURNAL_BYTES
FREE_BYTES = 512 << 20  # left on the volume, or 5 % of it where that is less: below, nothing is accepted
FREE_RATIO = 0.05
_USAGE_AGE_S = 0.5  # the reader deletes segments behind our back: how old a measured size may be
# In the thread that writes: an entry's columns are so small that handing them to others costs more than packing them.
_WRITE = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


class JournalFull(MachineError):
    """The journal or its volume has no room; the sender should retry later."""


class JournalFailed(MachineError):
    """The disk refused to store or to sync; what was appended since the last sync may or may not be there."""


class JournalWriter:
    """The one writer of a journal directory. `append` then `sync`; threads may share it, and then share each fsync.

    limit_bytes: size of all segments from which on `append` raises JournalFull; None takes the smaller of 8 GiB and 10 % of
    the volume. Opening cuts off a torn tail of the last segment: those bytes were never acknowledged.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        segment_age_s: float = SEGMENT_AGE_S,
        free_bytes: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segment_age_s = segment_age_s
        self._monotonic = monotonic
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_path(directory.parent)
            self._lock_file = _exclusive_lock(directory)
            self._turn_file = _turn_file(directory)
            volume = os.statvfs(directory)
            volume_bytes = volume.f_blocks * volume.f_frsize
            self.limit_bytes = (
                min(JOURNAL_BYTES, int(volume_bytes * VOLUME_RATIO)) if limit_bytes is None else limit_bytes
            )
            self._free_bytes = min(FREE_BYTES, int(volume_bytes * FREE_RATIO)) if free_bytes is None else free_bytes
            self.torn_bytes = _cut_torn_tail(directory)  # at this opening
            self._state = threading.Lock()  # what has been appended, and where
            self._flush = threading.Lock()  # held over an fsync: who waits for it finds the work done
            self._appended = 0  # bytes ever appended by this writer
            self._synced = 0  # of those, how many are durable
            self._lost: list[tuple[int, int]] = []  # ranges whose sync failed
            self._own = threading.local()  # where this thread's unsynced entries begin
            self._segment = max(segment_numbers(directory), default=0)
            self._usage_bytes = 0
            self._free_now_bytes = 0
            self._usage_at = -1.0
            self._begin_segment()
        except OSError as error:
            raise MachineError(
                f"{directory}: cannot open the journal: {error.strerror or error} (check the owner and the free space)"
            ) from error

    def append(self, kind: Kind, rows: pa.Table) -> Position:
        """Write rows; they are not durable before the next `sync` returns. Raises JournalFull, JournalFailed."""
        payload = serialized(rows)
        head = header(CODES[kind], rows.num_rows, payload)
        size = len(head) + payload.size
        while True:
            self._rotate_if_due(size)
            with self._state, _turn(self._turn_file, fcntl.LOCK_SH):
                if not self._is_replaced():
                    return self._append(head, payload)

    def _append(self, head: bytes, payload: pa.Buffer) -> Position:
        """One entry at the end of the segment, with `_state` held."""
        size = len(head) + payload.size
        self._refuse_if_full(size)
        try:
            _write_all(self._descriptor, head, payload)
        except OSError as error:
            self._forget_partial_write()
            raise _refusal(self._directory, error) from error
        if getattr(self._own, "begin", None) is None:
            self._own.begin = self._appended
        self._offset += size
        self._appended += size
        self._usage_bytes += size
        return Position(self._segment, self._offset)

    def sync(self) -> None:
        """Return when all that this thread appended is durable. Raises JournalFailed where that is not certain."""
        with self._state:
            target = self._appended
        begin = getattr(self._own, "begin", None)
        self._own.begin = None
        with self._flush:
            if self._synced < target:
                self._sync_segment()
            if begin is not None and any(lost < target and begin < end for lost, end in self._lost):
                raise JournalFailed(f"{self._directory}: the disk failed while writing (check it, then retry)")

    def has_room(self, more_bytes: int = 0) -> bool:
        """Whether an append of that many bytes would be accepted now."""
        with self._state:
            try:
                self._refuse_if_full(more_bytes)
            except JournalFull:
                return False
            return True

    def facts(self) -> dict[str, int]:
        """Numbers for data health: segment, bytes in all segments, limit, free bytes of the volume, torn bytes."""
        with self._state:
            self._measure_usage()
            return {
                "segment": self._segment,
                "offset": self._offset,
                "bytes": self._usage_bytes,
                "limit_bytes": self.limit_bytes,
                "free_bytes": self._free_now_bytes,
                "torn_bytes": self.torn_bytes,
                "failed_syncs": len(self._lost),
            }

    def close(self) -> None:
        """Sync and let go of the directory."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            os.close(self._turn_file)
            os.close(self._lock_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_segment(self) -> None:
        self._descriptor = _new_segment(self._directory, self._segment + 1)
        self._segment += 1
        self._inode = os.fstat(self._descriptor).st_ino
        self._offset = 0
        self._segment_born = self._monotonic()

    def _rotate_if_due(self, more_bytes: int) -> None:
        old = self._monotonic() - self._segment_born > self._segment_age_s
        replaced = self._is_replaced()
        if not replaced and (not self._offset or not (old or self._offset + more_bytes > self._segment_bytes)):
            return
        with self._flush:
            if self._synced < self._appended:
                self._sync_segment()
            with self._state:
                if self._offset or self._is_replaced():
                    self._replace_segment()

    def _is_replaced(self) -> bool:
        """Whether a purge has put a copy in the segment's place: what is appended here would be in no file."""
        try:
            return segment_path(self._directory, self._segment).stat().st_ino != self._inode
        except FileNotFoundError:
            return False  # somebody removed it by hand: nothing here can help that

    def _replace_segment(self) -> None:
        previous = self._descriptor
        try:
            self._begin_segment()
        except OSError as error:
            raise _refusal(self._directory, error) from error
        os.close(previous)

    def _sync_segment(self) -> None:
        """fsync the segment, with `_flush` held. After a failure the segment is never trusted again: the kernel may have
        thrown the unwritten pages away and would report success the next time."""
        with self._state:
            upto = self._appended
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            with self._state:
                upto = self._appended
                self._lost = [*self._lost[-63:], (self._synced, upto)]
                with contextlib.suppress(JournalFull, JournalFailed):
                    self._replace_segment()
        self._synced = upto

    def _forget_partial_write(self) -> None:
        """Cut what a failed write left; where even that fails a reader skips it by its checksum."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._offset)
            return
        self._offset = os.fstat(self._descriptor).st_size

    def _refuse_if_full(self, more_bytes: int) -> None:
        if self._monotonic() - self._usage_at > _USAGE_AGE_S or self._usage_bytes + more_bytes > self.limit_bytes:
            self._measure_usage()
        if self._usage_bytes + more_bytes > self.limit_bytes:
            raise JournalFull(
                f"{self._directory}: the journal holds {self._usage_bytes:,} of {self.limit_bytes:,} bytes "
                "(the store is not reading it: is it running?)"
            )
        if self._free_now_bytes < self._free_bytes + more_bytes:
            raise JournalFull(
                f"{self._directory}: {self._free_now_bytes:,} bytes left on the volume, {self._free_bytes:,} are kept free "
                "(make room)"
            )

    def _measure_usage(self) -> None:
        total = 0
        for number in segment_numbers(self._directory):
            with contextlib.suppress(FileNotFoundError):
                total += segment_path(self._directory, number).stat().st_size
        volume = os.statvfs(self._directory)
        self._usage_bytes = total
        self._free_now_bytes = volume.f_bavail * volume.f_frsize
        self._usage_at = self._monotonic()


def room_error(directory: Path) -> str:
    """Why a writer of this directory refuses now for lack of room on its volume; empty where it does not."""
    try:
        volume = os.statvfs(directory)
    except FileNotFoundError:  # nobody has received anything here
        return ""
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    free = volume.f_bavail * volume.f_frsize
    kept = min(FREE_BYTES, int(volume.f_blocks * volume.f_frsize * FREE_RATIO))
    return (
        f"{directory}: {free:,} bytes left on the volume, {kept:,} are kept free: senders are refused"
        if free < kept
        else ""
    )


def _new_segment(directory: Path, number: int) -> int:
    """Create a segment. Its directory entry is made durable before its first use: its number is what orders it."""
    path = segment_path(directory, number)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        sync_path(directory)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


def serialized(rows: pa.Table) -> pa.Buffer:
    """Rows as the payload of an entry."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_WRITE) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def _cut_torn_tail(directory: Path) -> int:
    """Remove unfinished bytes at the end of the last segment; returns how many. None of them was acknowledged."""
    numbers = segment_numbers(directory)
    if not numbers:
        return 0
    descriptor = os.open(segment_path(directory, numbers[-1]), os.O_RDWR | os.O_CLOEXEC)
    try:
        for piece in frames(descriptor, 0):
            if isinstance(piece, Gap) and piece.open_ended:
                os.ftruncate(descriptor, piece.start)
                os.fsync(descriptor)
                return piece.end - piece.start
        return 0
    finally:
        os.close(descriptor)


def _exclusive_lock(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise MachineError(
            f"{directory}: another process writes this journal (pid {owner}); stop it or choose another --data"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextlib.contextmanager
def appending_stopped(directory: Path) -> Iterator[None]:
    """Nobody appends to the journal inside, whichever process writes it: for as long as a segment takes to be copied."""
    descriptor = _turn_file(directory)
    try:
        with _turn(descriptor, fcntl.LOCK_EX):
            yield
    finally:
        os.close(descriptor)


def _turn_file(directory: Path) -> int:
    return os.open(directory / "turn", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _turn(descriptor: int, kind: int) -> Iterator[None]:
    """Hold the lock that appending shares and replacing a segment takes alone. The end of a process lets it go."""
    fcntl.flock(descriptor, kind)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _refusal(directory: Path, error: OSError) -> JournalFull | JournalFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(f"{directory}: no space left on the volume (make room)")
    return JournalFailed(f"{directory}: cannot write the journal: {error.strerror or error}")


def _write_all(descriptor: int, head: bytes, payload: pa.Buffer) -> None:
    parts = [memoryview(head), memoryview(payload)]
    while parts:
        written = os.writev(descriptor, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
