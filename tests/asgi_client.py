"""Asks an ASGI application without a socket, from synchronous tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI


@dataclass(slots=True)
class Client:
    """One request at a time. started: with the application's start-up run first, as a server does."""

    app: FastAPI
    base_url: str = "http://127.0.0.1:8080"
    started: bool = False

    def get(self, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self._ask("GET", path, more))

    def post(self, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self._ask("POST", path, more))

    async def _ask(self, method: str, path: str, more: dict[str, Any]) -> httpx.Response:
        if self.started:
            async with self.app.router.lifespan_context(self.app):
                return await self._send(method, path, more)
        return await self._send(method, path, more)

    async def _send(self, method: str, path: str, more: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=self.base_url) as client:
            return await client.request(method, path, **more)
