"""The small pieces of the server: stop strings, words, traceparent, the store of conversations, tools."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.instrumented_engine.request_telemetry import ToolRun
from phasewise.instrumented_engine.serving.context_store import ContextStore
from phasewise.instrumented_engine.serving.stop_text import StopText
from phasewise.instrumented_engine.serving.synthetic_text import WordTokenizer
from phasewise.instrumented_engine.serving.tools import OUTPUT_LIMIT_BYTES, Tool, run_tool
from phasewise.instrumented_engine.serving.trace_parent import parse_traceparent
from phasewise.rules.errors import InputError, MachineError

PYTHON = sys.executable


@given(st.lists(st.text("abc", max_size=3), max_size=8), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string_however_it_is_cut(parts: list[str], stops: list[str]) -> None:
    scan = StopText(tuple(stops))
    given_out = "".join(scan.push(part) for part in parts) + scan.finish()
    whole = "".join(parts)
    # The stop string that is complete first ends the text; of several that one push completes, the one that begins first.
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert scan.stopped is bool(found)
    if not found:
        assert given_out == whole
    else:
        assert whole.startswith(given_out)
        assert len(given_out) in {at for stop in stops for at in _places(whole, stop)}
        assert not any(stop in given_out for stop in stops)


def _places(text: str, stop: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(stop, at)]


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    scan = StopText(("END",))
    assert scan.push("hello E") == "hello "
    assert scan.push("N") == ""
    assert scan.push("x") == "ENx"
    assert scan.push(" EN") == " "
    assert scan.finish() == "EN"


def test_equal_text_gives_equal_tokens_and_other_text_others() -> None:
    words = WordTokenizer(128_256)
    one, other = words.encode("a long text that goes on"), words.encode("a long text that ends")
    assert one[:5] == other[:5]
    assert one != other
    assert all(0 <= token < words.vocab for token in one)
    assert words.encode_chat([{"role": "user", "content": "x"}]) != words.encode_chat(
        [{"role": "system", "content": "x"}]
    )


@given(st.integers(min_value=0, max_value=2**40), st.integers(min_value=0, max_value=10**6), st.integers(3, 200_000))
def test_what_a_simulated_model_says_is_a_word(source: int, position: int, vocab: int) -> None:
    words = WordTokenizer(vocab)
    token = words.uttered(source, position)
    assert 0 <= token < vocab
    assert words.decode([token]).startswith(" ")
    assert words.stream().push(token) == words.decode([token])


GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_read() -> None:
    parent = parse_traceparent(GOOD)
    assert parent is not None
    assert (parent.trace_id.hex(), parent.span_id.hex(), parent.sampled) == (GOOD[3:35], GOOD[36:52], True)
    unsampled = parse_traceparent(GOOD[:-1] + "0")
    assert unsampled is not None and not unsampled.sampled
    assert parse_traceparent("01" + GOOD[2:] + "-more") is not None  # a later version may say more


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        GOOD.upper(),
        GOOD + "-x",
        "ff" + GOOD[2:],
        GOOD[:3] + "0" * 32 + GOOD[35:],
        GOOD[:36] + "0" * 16 + GOOD[52:],
    ],
)
def test_a_traceparent_that_must_be_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


# --- conversations ---------------------------------------------------------------------------------------------------


def test_turns_come_back_in_order_and_survive_a_restart(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    assert store.load("c") == []
    for number in range(3):
        store.append("c", [{"role": "user", "content": f"ä{number}"}, {"role": "assistant", "content": "b"}])
    again = ContextStore(tmp_path).load("c")
    assert [message["content"] for message in again] == ["ä0", "b", "ä1", "b", "ä2", "b"]


def test_a_conversation_belongs_to_its_tenant(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    store.append("c", [{"role": "user", "content": "secret"}], "one")
    assert store.load("c", "two") == []
    assert store.load("c") == []
    assert len(store.load("c", "one")) == 1


def test_threads_lose_no_turn(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    threads = [
        threading.Thread(target=store.append, args=("c", [{"role": "user", "content": str(number)}]))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(message["content"]) for message in store.load("c")) == list(range(16))


def test_loading_waits_as_long_as_it_was_told(tmp_path: Path) -> None:
    slept: list[float] = []
    ContextStore(tmp_path, delay_s=1.5, sleep=slept.append).load("c")
    assert slept == [1.5]


def test_a_folder_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be kept"):
        ContextStore(tmp_path / "file" / "below")


def test_a_broken_store_says_where(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "conversations.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(MachineError, match=r"conversations\.sqlite"):
        store.load("c")


# --- tools -----------------------------------------------------------------------------------------------------------


def run(tool: Tool, text: str = "") -> tuple[ToolRun, str]:
    runs: list[ToolRun] = []
    told, answer = asyncio.run(run_tool(tool, text, time.monotonic_ns, runs))
    assert runs == [told]
    return told, answer


def test_a_command_reads_and_answers() -> None:
    told, answer = run(Tool(name="up", command=(PYTHON, "-c", "print(input().upper(), end='')")), "hello")
    assert (told.name, told.error, answer) == ("up", None, "HELLO")
    assert told.end_ns > told.start_ns


def test_a_command_need_not_read() -> None:
    told, answer = run(Tool(name="deaf", command=(PYTHON, "-c", "print(1)")), "x" * 1_000_000)
    assert (told.error, answer) == (None, "1\n")


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (Tool(name="bad", command=(PYTHON, "-c", "raise SystemExit(3)")), "code 3"),
        (Tool(name="gone", command=("/no/such/program",)), "No such file"),
        (Tool(name="slow", command=(PYTHON, "-c", "import time; time.sleep(60)"), timeout_s=0.3), "within 0.3 s"),
        (Tool(name="loud", command=(PYTHON, "-c", f"print('x' * {OUTPUT_LIMIT_BYTES + 1})")), "more than"),
        (Tool(name="raises", function=lambda text: str(1 / 0)), "ZeroDivisionError"),
        (Tool(name="number", function=lambda text: 5), "gave int, not text"),  # type: ignore[arg-type, return-value]
        (Tool(name="hangs", function=lambda text: str(threading.Event().wait(20)), timeout_s=0.2), "within 0.2 s"),
    ],
)
def test_what_a_tool_does_wrong_is_told(tool: Tool, says: str) -> None:
    told, answer = run(tool)
    assert told.error is not None and says in told.error
    assert answer == ""


def test_a_hanging_command_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    told, _ = run(Tool(name="tree", command=("sh", "-c", script), timeout_s=0.5))
    assert told.error
    child = int((tmp_path / "pid").read_text())
    limit = time.monotonic() + 5
    while time.monotonic() < limit and _runs(child):
        time.sleep(0.01)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_function_answers() -> None:
    told, answer = run(Tool(name="f", function=lambda text: text[::-1]), "abc")
    assert (told.error, answer) == (None, "cba")


def test_a_tool_is_one_thing() -> None:
    with pytest.raises(InputError, match="both or neither"):
        Tool(name="none")
    with pytest.raises(InputError, match="not positive"):
        Tool(name="f", function=str, timeout_s=0)
