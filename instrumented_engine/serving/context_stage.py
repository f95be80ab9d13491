"""What happens to a call before it enters the queue: history from the store, tools before the stream, tokens out of text."""

from __future__ import annotations

import asyncio
import logging

from phasewise.instrumented_engine.request_telemetry import ToolRun
from phasewise.instrumented_engine.serving.desk import Desk
from phasewise.instrumented_engine.serving.openai_api import Document, Generation, Prompt, refused
from phasewise.instrumented_engine.serving.tools import run_tool
from phasewise.rules.errors import MachineError

LOGGER = logging.getLogger("phasewise.engine")
LONG_TEXT = 20_000  # characters; tokenizing more of them would hold up the other calls


class ContextFailed(Exception):
    """The stage could not be finished; the request ends in it."""


async def context_of(desk: Desk, asked: Generation, runs: list[ToolRun]) -> list[tuple[int, ...]]:
    """Token ids of each prompt. Tools that were called are added to `runs`, also where the stage is given up.

    Raises InputError for what the client can change, ContextFailed for a store or tool that fails.
    """
    for ask in asked.tools:
        if ask.name not in desk.tools:
            known = ", ".join(desk.tools) or "none"
            raise refused("external_tools", f"no tool {ask.name!r} here", f"the server knows: {known}")
    if _kept(desk, asked) and not asked.chat and (len(asked.prompts) > 1 or not isinstance(asked.prompts[0], str)):
        raise refused(
            "prompt", "a conversation goes on with one text", "send one prompt as text, or no conversation_id"
        )
    history = await _history(desk, asked)
    found = await _tools_before(desk, asked, runs)
    if asked.chat:
        messages = [*history, *asked.messages]
        messages[-1] = _with_found(messages[-1], found)
        return [await _tokens(desk, messages)]
    return [await _prompt(desk, prompt, history, found) for prompt in asked.prompts]


def save_turn(desk: Desk, asked: Generation, answer: str) -> None:
    """Adds a finished turn to its conversation, beside the call; the next turn waits for it."""
    if desk.store is None or asked.conversation_id is None:
        return
    store, conversation, tenant = desk.store, asked.conversation_id, asked.user
    said: list[Document] = list(asked.messages) if asked.chat else [{"role": "user", "content": str(asked.prompts[0])}]
    turn = [{"role": str(each["role"]), "content": str(each["content"])} for each in said]
    turn.append({"role": "assistant", "content": answer})
    before = desk.saving.get((tenant, conversation))

    async def save() -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            await asyncio.to_thread(store.append, conversation, turn, tenant)
        except MachineError as problem:  # the answer is out; the next turn of the conversation will not know this one
            LOGGER.error("a turn was not kept: %s", problem)

    task = desk.keep(save())
    desk.saving[tenant, conversation] = task
    task.add_done_callback(lambda done: _saved(desk, (tenant, conversation), done))


def _saved(desk: Desk, key: tuple[str | None, str], done: asyncio.Task[None]) -> None:
    if desk.saving.get(key) is done:
        del desk.saving[key]


def _kept(desk: Desk, asked: Generation) -> bool:
    """It is a turn of a conversation that is stored."""
    return desk.store is not None and asked.conversation_id is not None


async def _history(desk: Desk, asked: Generation) -> list[Document]:
    if desk.store is None or asked.conversation_id is None:
        return []
    pending = desk.saving.get((asked.user, asked.conversation_id))
    if pending is not None:
        await asyncio.wait({pending})
    try:
        return list(await asyncio.to_thread(desk.store.load, asked.conversation_id, asked.user))
    except MachineError as problem:
        raise ContextFailed(f"history: {problem}") from problem


async def _tools_before(desk: Desk, asked: Generation, runs: list[ToolRun]) -> str:
    """What they answered, for the prompt."""
    said = asked.messages[-1]["content"] if asked.chat else asked.prompts[0]
    found = []
    for ask in asked.tools:
        if ask.when == "before":
            text = said if isinstance(said, str) else ""
            run, answer = await run_tool(desk.tools[ask.name], text, desk.service.clock.now_ns, runs)
            if run.error is None:
                found.append(answer)
            elif desk.fail_on_tool_error:
                raise ContextFailed(f"tool {run.name}: {run.error}")
    return "\n".join(found)


def _with_found(message: Document, found: str) -> Document:
    """In front of the last message: chat templates do not agree on a role for it."""
    return {**message, "content": f"{found}\n\n{message['content']}"} if found else message


async def _prompt(desk: Desk, prompt: Prompt, history: list[Document], found: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        parts = [*(str(message["content"]) for message in history), *([found] if found else []), prompt]
        return await _tokens(desk, "\n".join(parts))
    if history or found:
        raise refused("prompt", "token ids cannot follow a history or a tool's answer", "send the prompt as text")
    highest = max(prompt)
    if highest >= desk.tokenizer.vocab:
        raise refused("prompt", f"{highest} is no token id of this model", f"ids are below {desk.tokenizer.vocab}")
    return prompt


async def _tokens(desk: Desk, said: str | list[Document]) -> tuple[int, ...]:
    tokenizer = desk.tokenizer

    def encode() -> list[int]:
        return tokenizer.encode(said) if isinstance(said, str) else tokenizer.encode_chat(said)

    characters = len(said) if isinstance(said, str) else sum(len(str(message["content"])) for message in said)
    tokens = await asyncio.to_thread(encode) if characters > LONG_TEXT else encode()
    if not tokens:
        raise refused("prompt", "is empty", "give at least one character")
    return tuple(tokens)
