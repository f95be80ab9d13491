"""A relay to a port of this machine that lets only so much through, a second or at all."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def thin_line(port: int, bytes_per_s: int, most_bytes: int = sys.maxsize) -> Iterator[int]:
    """Its port; each connection gets so much towards `port`, and what comes back at once. After most_bytes nothing more comes to
    `port` until the end, and nothing is closed."""
    sockets = [socket.create_server(("127.0.0.1", 0))]
    threads: list[threading.Thread] = []

    def start(work: threading.Thread) -> None:
        threads.append(work)
        work.start()

    stopped = threading.Event()

    def carry(source: socket.socket, sink: socket.socket, pause_s: float) -> None:
        left = most_bytes if pause_s else sys.maxsize
        with contextlib.suppress(OSError):
            while part := source.recv(min(left, bytes_per_s // 20)):
                sink.sendall(part)
                left -= len(part)
                if not left:
                    stopped.wait()
                time.sleep(pause_s * len(part) / bytes_per_s)
        end(source, sink)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = sockets[0].accept()
                far = socket.create_connection(("127.0.0.1", port))
                sockets.extend((near, far))
                for ends in ((near, far, 1.0), (far, near, 0.0)):
                    start(threading.Thread(target=carry, args=ends))

    start(threading.Thread(target=accept))
    try:
        yield sockets[0].getsockname()[1]
    finally:
        stopped.set()
        end(*sockets)
        for thread in threads:
            thread.join()
        for one in sockets:
            one.close()


def end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
