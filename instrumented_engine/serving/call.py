"""One call from its parsed body to the last byte: context stage, queue, stream, tools, and what is told of it afterwards."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from phasewise.instrumented_engine.metrics import SERVED
from phasewise.instrumented_engine.request_telemetry import CANCELLED, Caller, ToolRun, request_telemetry
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence
from phasewise.instrumented_engine.serving.context_stage import ContextFailed, context_of, save_turn
from phasewise.instrumented_engine.serving.desk import Desk
from phasewise.instrumented_engine.serving.line import Line
from phasewise.instrumented_engine.serving.openai_answers import DONE, Answer, Usage, event
from phasewise.instrumented_engine.serving.openai_api import Generation, error_document, refused
from phasewise.instrumented_engine.serving.reply import Headers, Reply, Send
from phasewise.instrumented_engine.serving.service import Ended, Event, Paused, Stream, Token
from phasewise.instrumented_engine.serving.tools import ToolAsk, run_tool
from phasewise.instrumented_engine.serving.trace_parent import TraceParent
from phasewise.rules.errors import InputError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
LOGGER = logging.getLogger("phasewise.engine")
SHUT_DOWN = "cancelled: the server shut down"


class Call:
    """arrival_ns: when its first byte was seen. key: unique in this process, the stem of the engine's request ids."""

    def __init__(
        self,
        desk: Desk,
        generation: Generation,
        answer: Answer,
        *,
        arrival_ns: int,
        key: str,
        route: str,
        client_request_id: str | None,
        parent: TraceParent | None,
        headers: Headers,
    ) -> None:
        self._desk = desk
        self._asked = generation
        self._answer = answer
        self._arrival_ns = arrival_ns
        self._route = route
        self._client_request_id = client_request_id
        self._parent = parent
        self._trace_id = parent.trace_id if parent else os.urandom(16)
        self._headers = headers
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tools: list[ToolRun] = []
        self._inside = [ask for ask in generation.tools if ask.when == "inside"]
        self._shown: list[ToolAsk] = []  # of `_inside`: their marker has come
        self._submitting: asyncio.Future[list[Sequence | Refusal | BaseException]] | None = None
        self._work: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._silent = False  # refused: nothing was begun, so nothing is told
        self._lines = [
            Line(index, f"{key}-{index}", os.urandom(8), desk.tokenizer.stream(), generation.stop)
            for index in range(generation.sequences)
        ]

    async def run(self, receive: Receive, send: Send) -> None:
        """Answers, unless the client goes away first: then its sequences end at once."""
        reply = Reply(send, self._headers)
        self._work = asyncio.ensure_future(self._respond(reply))
        gone = asyncio.ensure_future(_disconnected(receive))
        self._desk.calls.add(self)
        try:
            await asyncio.wait((self._work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not self._work.done():
                self._error = CANCELLED
        finally:
            gone.cancel()
            self._work.cancel()
            (outcome,) = await asyncio.gather(self._work, return_exceptions=True)
            if isinstance(outcome, asyncio.CancelledError):
                self._error = self._error or SHUT_DOWN
            elif isinstance(outcome, BaseException):
                LOGGER.error("a call failed: %s: %s", type(outcome).__name__, outcome)
                self._error = f"{type(outcome).__name__}: {outcome}"
            self._desk.calls.discard(self)
            self._desk.keep(self._close())
        if self._error and self._error != CANCELLED and not reply.started:
            await reply.error(503 if self._error == SHUT_DOWN else 500, self._error, "server_error")

    def stop(self) -> None:
        """The server shuts down: what the engine has of it ends, and the client is told."""
        if self._submitting is None and self._work is not None:
            self._work.cancel()
        for line in self._lines:
            self._desk.service.cancel(line.request_id, "abort", SHUT_DOWN)

    # --- the answer ---------------------------------------------------------------------------------------------------

    async def _respond(self, reply: Reply) -> None:
        field = "messages" if self._asked.chat else "prompt"
        try:
            prompts = await context_of(self._desk, self._asked, self._tools)
            refusal = await self._submit(prompts)
        except InputError as problem:
            self._silent = True
            await reply.error(400, told(problem), "invalid_request_error", problem.field)
            return
        except ContextFailed as problem:
            self._error = str(problem)
            await reply.error(502, self._error, "context_error")
            return
        if refusal is not None:
            self._silent = True
            await reply.refusal(refusal, field)
            return
        if self._asked.stream:
            await reply.stream()
        await self._follow(reply)
        if not self._asked.stream:
            await self._send_whole(reply)
        if self._failed() is None:
            save_turn(self._desk, self._asked, self._lines[0].text)

    async def _submit(self, prompts: list[tuple[int, ...]]) -> Refusal | None:
        """Hands all sequences in at once; None where all were taken."""
        desk, asked = self._desk, self._asked
        ready_ns = desk.service.clock.now_ns()
        pauses = sorted({ask.after_tokens for ask in self._inside if ask.after_tokens is not None})
        specs = []
        for line in self._lines:
            prompt = prompts[line.index // asked.n]
            specs.append(desk.spec(asked, line.request_id, line.index, prompt, self._limit(len(prompt)), ready_ns))
        handed = [
            desk.service.submit(spec, Stream(index, self._events, list(pauses))) for index, spec in enumerate(specs)
        ]
        # Shielded: who goes away now must still be told which of them the engine took.
        self._submitting = asyncio.ensure_future(asyncio.gather(*handed, return_exceptions=True))
        answers = await asyncio.shield(self._submitting)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return next((answer for answer in answers if isinstance(answer, Refusal)), None)

    def _limit(self, prompt_tokens: int) -> int:
        """Most output tokens. InputError where they do not fit."""
        config, service = self._desk.service.config, self._desk.service
        room = config.max_model_tokens - prompt_tokens
        asked = self._asked.max_tokens
        most = room if asked is not None else min(room, service.kv_blocks_total * config.block_tokens - prompt_tokens)
        if most < 1:  # no limit on the answer would help
            raise refused(
                "messages" if self._asked.chat else "prompt",
                f"{prompt_tokens} tokens leave no room for an answer",
                f"shorten it: prompt and answer together have {prompt_tokens + most} tokens",
            )
        if asked is None:
            asked = most
        elif asked > room:
            raise refused(
                "max_tokens",
                f"{asked} output tokens after a prompt of {prompt_tokens} are more than {config.max_model_tokens}",
                "lower it or shorten the prompt",
            )
        return asked

    async def _follow(self, reply: Reply) -> None:
        """Takes the engine's events until all sequences have ended."""
        open_lines = len(self._lines)
        while open_lines:
            happened = await self._events.get()
            line = self._lines[happened.index]
            if isinstance(happened, Token):
                await self._token(reply, line, happened.token)
            elif isinstance(happened, Paused):
                await self._call_inside(line, happened.after_tokens)
            else:
                open_lines -= 1
                line.sequence = happened.sequence
                await self._end(reply, line, whole=not open_lines)

    async def _token(self, reply: Reply, line: Line, token: int) -> None:
        if line.stopped:
            return  # what the engine had begun when the stop string came
        first = line.tokens == 0
        text = line.push(token)
        if text or first:
            await self._hand_over(reply, line, text, first=first)
        if line.stopped:
            self._desk.service.cancel(line.request_id, "stop")
        elif self._inside and text:
            fresh = [ask for ask in self._inside if ask.marker and ask.marker in line.text and ask not in self._shown]
            if fresh:
                self._shown += fresh
                self._desk.service.pause(line.request_id)

    async def _hand_over(self, reply: Reply, line: Line, text: str, *, first: bool = False) -> None:
        """New text to the socket; the moment after is when the client can have it. An answer that goes out as a whole has
        no such moment: there it is when the text was there."""
        if self._asked.stream:
            await reply.write(self._answer.piece(line.index, text, first=first))
        now_ns = self._desk.service.clock.now_ns()
        gap_ns = line.handed_over(now_ns)
        if gap_ns is None:
            self._desk.service.counters.observe_first_token((now_ns - self._arrival_ns) / 1e9)
        else:
            self._desk.service.counters.observe_gap(gap_ns / 1e9)

    async def _end(self, reply: Reply, line: Line, *, whole: bool) -> None:
        """The last bytes of a sequence, and with the last one those of the call."""
        rest = line.finish()
        if rest:
            await self._hand_over(reply, line, rest)
        if self._failed(line) is None:
            late = [ask for ask in self._shown if ask in self._inside]  # the stream ended before it could be held
            for ask in late + [ask for ask in self._asked.tools if ask.when == "after"]:
                await self._call_tool(ask, line)
        line.ended = True
        if not self._asked.stream:
            return
        problem = self._failed(line)
        last = (
            event(error_document(problem, "server_error"))
            if problem
            else self._answer.piece(line.index, None, self._reason(line))
        )
        if whole:
            if self._asked.include_usage and problem is None:
                last += self._answer.usage(self._usage())
            last += DONE
        await reply.write(last, last=whole)
        line.finished_ns = self._desk.service.clock.now_ns()

    async def _send_whole(self, reply: Reply) -> None:
        problem = self._failed()
        if problem:
            await reply.error(500, problem, "server_error")
        else:
            texts, reasons = [line.text for line in self._lines], [self._reason(line) for line in self._lines]
            await reply.document(200, self._answer.whole(texts, reasons, self._usage()))
        now_ns = self._desk.service.clock.now_ns()
        for line in self._lines:
            line.finished_ns = now_ns

    def _reason(self, line: Line) -> str:
        if line.stopped or line.sequence is None:
            return "stop"
        return line.sequence.finish_reason or "stop"

    def _failed(self, line: Line | None = None) -> str | None:
        """Why the line, or any, did not end as it should."""
        for each in [line] if line else self._lines:
            sequence = each.sequence
            if sequence is not None and sequence.finish_reason not in SERVED and not each.stopped:
                return sequence.error or f"the engine ended the request: {sequence.finish_reason}"
        return self._error

    def _usage(self) -> Usage:
        prompts = [line for line in self._lines if line.index % self._asked.n == 0 and line.sequence is not None]
        sequences = [line.sequence for line in prompts if line.sequence is not None]
        return Usage(
            sum(sequence.spec.prompt_tokens for sequence in sequences),
            sum(line.tokens for line in self._lines),
            sum(sequence.cached_tokens or 0 for sequence in sequences),
        )

    # --- tools --------------------------------------------------------------------------------------------------------

    async def _call_inside(self, line: Line, after_tokens: int) -> None:
        due = [ask for ask in self._inside if ask in self._shown or (ask.after_tokens or math.inf) <= after_tokens]
        for ask in due:
            self._inside.remove(ask)
            if not await self._call_tool(ask, line):
                self._desk.service.cancel(line.request_id, "error", self._error)
                return
        self._desk.service.resume(line.request_id)

    async def _call_tool(self, ask: ToolAsk, line: Line) -> bool:
        """False: it failed, and so does the request."""
        now_ns = self._desk.service.clock.now_ns
        run, _ = await run_tool(self._desk.tools[ask.name], line.text, now_ns, self._tools)
        if run.error and self._desk.fail_on_tool_error:
            self._error = f"tool {run.name}: {run.error}"
            return False
        return True

    # --- what is left to do after the answer --------------------------------------------------------------------------

    async def _close(self) -> None:
        """Ends what still runs, waits until the engine has let go of it, and tells what happened."""
        seen_ns = self._desk.service.clock.now_ns()
        answers = await self._submitting if self._submitting is not None else []
        for line, answer in zip(self._lines, answers, strict=False):
            if not isinstance(answer, Sequence):
                line.ended = True
            elif line.sequence is None:
                self._desk.service.cancel(line.request_id, "abort", self._error)
        while answers and not all(line.ended or line.sequence is not None for line in self._lines):
            happened = await self._events.get()
            if isinstance(happened, Ended):
                self._lines[happened.index].sequence = happened.sequence
        if not self._silent:
            for line in self._lines:
                self._tell(line, seen_ns)

    def _tell(self, line: Line, seen_ns: int) -> None:
        sequence = line.sequence or self._unborn(line)
        counters, export = self._desk.service.counters, self._desk.export
        counters.observe_request(sequence, n=self._asked.n, arrival_ns=self._arrival_ns)
        if export is None:
            return
        ended_ns = max(seen_ns, sequence.finished_ns or 0)
        caller = Caller(
            trace_id=self._trace_id,
            span_id=line.span_id,
            parent_span_id=self._parent.span_id if self._parent else b"",
            request_id=self._answer.id,
            client_request_id=self._client_request_id,
            route=self._route,
        )
        # A sequence whose last byte was out before the client left ended well.
        error = None if line.finished_ns and self._error in (CANCELLED, SHUT_DOWN) else self._error
        boundary = line.boundary(self._arrival_ns, ended_ns, tuple(self._tools), error)
        told = request_telemetry(sequence, self._answer.model, caller=caller, boundary=boundary)
        export.request(told, parent_sampled=self._parent is None or self._parent.sampled)

    def _unborn(self, line: Line) -> Sequence:
        """Of a call that ended in its context stage: the engine never knew it."""
        asked = self._asked
        sequence = Sequence(
            RequestSpec(
                request_id=line.request_id, arrival_ns=self._arrival_ns, prompt_tokens=0, max_output_tokens=asked.max_tokens or 0,
                priority=asked.priority, tenant=asked.user, request_class=asked.request_class,
            )
        )  # fmt: skip
        sequence.finish_reason = "abort" if self._error in (CANCELLED, SHUT_DOWN) else "error"
        return sequence


def told(problem: InputError) -> str:
    """Field, problem and remedy; that it was a request needs no saying."""
    return str(problem).removeprefix("request: ")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
