"""A relay to a port of this machine that lets only so much through."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def thin_line(port: int, bytes_per_s: int) -> Iterator[int]:
    """Its port; each connection gets so much towards `port`, and what comes back at once."""
    sockets = [socket.create_server(("127.0.0.1", 0))]
    threads: list[threading.Thread] = []

    def start(work: threading.Thread) -> None:
        threads.append(work)
        work.start()

    def carry(source: socket.socket, sink: socket.socket, pause_s: float) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(bytes_per_s // 20):
                sink.sendall(part)
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
        end(*sockets)
        for thread in threads:
            thread.join()
        for one in sockets:
            one.close()


def end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
