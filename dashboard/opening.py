"""What is answered on the port of the pages before the store is open: that it is not, and when to ask again.

To open it may take long: its log is read, and where a release brings it up to date it is copied first. Orchestrators see a process that
lives and is not ready; the journal takes what is sent all the while.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from phasewise.dashboard.security import Gate
from phasewise.rules.errors import MachineError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
AGAIN_S = 2
TOLD = (
    "the store is not open yet: its log is read, or a new release brings it up to date, which takes the longer the larger it is; "
    "what is sent meanwhile is kept and shown then"
)


class Opening:
    """The application until another one takes its place, with whose start and end the server's then begin and end."""

    def __init__(self) -> None:
        self._not_yet: App = Gate(_not_yet, hosts=None, state=None)
        self._app: App | None = None
        self._shown: App | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._given = asyncio.Event()
        self._stands = threading.Event()
        self._failed = ""

    def show(self, app: App, within_s: float = 30.0) -> None:
        """From another thread, while the server runs: `app` answers when this returns. MachineError where it does not start."""
        assert self._loop is not None, "the server is not started"
        self._shown = app
        self._loop.call_soon_threadsafe(self._given.set)
        if not self._stands.wait(within_s) or self._failed:
            raise MachineError(f"the pages did not start: {self._failed or f'not within {within_s:g} s'}")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await (self._app or self._not_yet)(scope, receive, send)

    async def _live(self, scope: Message, receive: Receive, send: Send) -> None:
        await receive()  # that the server starts
        self._loop = asyncio.get_running_loop()
        await send({"type": "lifespan.startup.complete"})
        ended = asyncio.ensure_future(receive())
        given = asyncio.ensure_future(self._given.wait())
        await asyncio.wait({ended, given}, return_when=asyncio.FIRST_COMPLETED)
        given.cancel()
        if ended.done() or self._shown is None:
            await send({"type": "lifespan.shutdown.complete"})
            return
        events: list[Message] = [{"type": "lifespan.startup"}]

        async def told() -> Message:
            return events.pop() if events else await ended

        async def tells(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._app = self._shown
                self._stands.set()
            elif message["type"] == "lifespan.startup.failed":
                self._failed = str(message.get("message") or "no reason given")
                self._stands.set()
            else:
                await send(message)

        await self._shown(scope, told, tells)


async def _not_yet(scope: Message, receive: Receive, send: Send) -> None:
    headers = [(b"cache-control", b"no-store"), (b"connection", b"close")]
    if scope["path"] == "/livez":
        status, kind, body = 200, b"application/json", json.dumps({"status": "alive"})
    elif any(name == b"accept" and b"text/html" in value for name, value in scope["headers"]):
        status, kind, body = 503, b"text/plain; charset=utf-8", f"Phasewise: {TOLD}.\n"
        headers.append((b"refresh", str(AGAIN_S).encode()))  # whoever looks at it need not
    else:
        told = {"error": TOLD, "field": "", "remedy": f"ask again in {AGAIN_S} s"}
        status, kind, body = 503, b"application/json", json.dumps(told)
    if status == 503:
        headers.append((b"retry-after", str(AGAIN_S).encode()))
    headers += [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
