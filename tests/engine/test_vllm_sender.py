"""The plugin beside the engine: it sends, is bounded, ends in time, and neither waits nor raises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from live_engine import Received, attributes, grpc_receiver, http_receiver, until
from machine_speed import slowness
from vllm_stats import FACTS, PATIENCE_S, Brought, Done, Kept, State, config, settings, step

from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces
from phasewise.instrumented_engine.vllm.export import open_export
from phasewise.instrumented_engine.vllm.facts import EngineFacts
from phasewise.instrumented_engine.vllm.readings import Reading
from phasewise.instrumented_engine.vllm.sender import Sender
from phasewise.rules.load import load_rulebook


def test_what_is_put_is_sent_and_the_end_waits_for_it() -> None:
    kept = Kept()
    sender = Sender(FACTS, settings(delay_s=60.0), lambda: kept)
    for number in range(3):
        sender.put(step(number, Done(request_id=f"r-{number}")))
    assert sender.close()
    assert [draft.name for draft in kept.drafts] == ["llm_request"] * 3 + ["engine.steps"]
    assert kept.ended
    assert sender.counts.sent == 4


@pytest.fixture(params=["grpc", "http/protobuf"])
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Received, str]]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with grpc_receiver() if request.param == "grpc" else http_receiver() as received:
        path = "" if request.param == "grpc" else "/v1/traces"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", received.endpoint + path)
        yield received, request.param


@pytest.mark.live
def test_over_both_transports_the_collector_reads_the_same(receiver: tuple[Received, str]) -> None:
    received, protocol = receiver
    told = settings(endpoint=received.endpoint, protocol=protocol)
    sender = Sender(FACTS, told, lambda: open_export(told, FACTS))
    for number in range(300):
        sender.put(step(number, *([Done()] if number == 3 else [])))
    assert sender.close()
    assert sender.counts.error == "" and sender.counts.sent == len(received.spans)
    frames = [pl.from_arrow(scan_traces(body, 1).rows) for body in received.bodies]
    done = normalize(pl.concat([f for f in frames if isinstance(f, pl.DataFrame)]), Profiles(load_rulebook().engines))
    assert done.requests.is_empty() and done.broken_steps == 0
    (row,) = done.supplements.iter_rows(named=True)
    assert [row[name] for name in ("request_id", "model", "finish_reason", "preemptions", "cached_tokens")] == [
        "cmpl-1-0", "m", "length", 0, 16,
    ]  # fmt: skip
    steps = done.steps.sort("step")
    assert steps["step"].to_list() == list(range(300))
    assert steps["instance"].n_unique() == 1
    first = steps.row(0, named=True)
    known = {"prefill_tokens": 7, "decode_sequences": 1, "running": 1, "waiting": 2, "kv_blocks_used": 12, "kv_blocks_total": 24}  # fmt: skip
    assert {name: first[name] for name in known} == known
    assert [name for name, value in first.items() if value is None] == [
        "context_tokens", "waiting_slot", "waiting_kv", "waiting_budget", "waiting_window", "waiting_policy",
        "slots_reserved", "schedule_s",
    ]  # fmt: skip


@pytest.mark.live
def test_ranks_behind_one_front_end_are_instances_of_their_own(receiver: tuple[Received, str]) -> None:
    received, protocol = receiver
    told = settings(endpoint=received.endpoint, protocol=protocol)
    sender = Sender(FACTS, told, lambda: open_export(told, replace(FACTS, engine_index=1)))
    sender.put(step(0))
    assert sender.close()
    assert received.resource["service.instance.id"].endswith("/engine-1")
    assert received.resource["phasewise.max_num_seqs"] == 8


def test_a_full_queue_drops_and_counts_and_nothing_waits() -> None:
    kept = Kept()
    kept.going.clear()
    sender = Sender(FACTS, settings(queue_answers=16), lambda: kept)
    sender.put(step(0))
    assert kept.asked.wait(PATIENCE_S)  # the thread now hangs in an export
    for number in range(1, 101):
        sender.put(step(number))
    kept.going.set()
    assert sender.close()
    assert sender.counts.dropped == 84
    running = [draft.attributes["phasewise.step.running"] for draft in kept.drafts]
    assert sum(len(values) for values in running if isinstance(values, list)) == 17


def test_what_cannot_be_read_or_sent_is_counted_and_the_rest_goes_on() -> None:
    kept = Kept()
    sender = Sender(FACTS, settings(delay_s=60.0), lambda: kept)
    sender.put(Reading(1, object(), None))
    sender.put(step(1, Done(request_id=None)))
    sender.put(step(2, Done()))
    assert sender.close()
    assert (sender.counts.errors, sender.counts.unnamed, sender.counts.sent) == (1, 1, 2)
    assert "AttributeError" in sender.counts.error

    refusing = Sender(FACTS, settings(), lambda: Kept(take=False))
    refusing.put(step(0))
    assert refusing.close()
    assert (refusing.counts.failed, refusing.counts.sent) == (1, 0)

    def no_exporter() -> Kept:
        raise ImportError("no module named opentelemetry.exporter")

    without = Sender(FACTS, settings(), no_exporter)
    without.put(step(0))
    assert without.close()
    assert (without.counts.failed, without.counts.errors) == (1, 1)


def test_requests_of_an_engine_that_sends_no_spans_are_not_sent() -> None:
    kept = Kept()
    sender = Sender(EngineFacts(details=True, traced=False), settings(), lambda: kept)
    sender.put(step(0, Done()))
    assert sender.close()
    assert [draft.name for draft in kept.drafts] == ["engine.steps"]


@pytest.mark.alone
def test_the_end_comes_in_time_though_the_receiver_hangs() -> None:
    kept = Kept()
    kept.going.clear()
    sender = Sender(FACTS, settings(closing_s=0.2), lambda: kept)
    sender.put(step(0))
    assert kept.asked.wait(PATIENCE_S)
    began = time.monotonic()
    assert not sender.close()
    assert time.monotonic() - began < 5 * slowness()
    kept.going.set()


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which finds the helpers of the tests."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, capture_output=True, text=True)


FORKS = """
import os, sys, warnings
warnings.simplefilter("ignore")
from vllm_stats import FACTS, Kept, settings, step
from phasewise.instrumented_engine.vllm.sender import Sender
kept = Kept()
sender = Sender(FACTS, settings(delay_s=60.0), lambda: kept)
sender.put(step(0)); sender.put(step(1))
child = os.fork()
if child == 0:
    sender.put(step(2))
    good = sender.close() and [d.attributes["phasewise.step.first"] for d in kept.drafts] == [2]
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
sender.close()
ours = [d.attributes["phasewise.step.first"] for d in kept.drafts] == [0]
sys.exit(0 if ours and os.waitstatus_to_exitcode(status) == 0 else 3)
"""


def test_a_fork_neither_hangs_nor_sends_twice() -> None:
    done = run(FORKS)
    assert done.returncode == 0, done.stderr


ENDS = """
from vllm_stats import FACTS, Kept, settings, step
from phasewise.instrumented_engine.vllm.sender import Sender
class Told(Kept):
    def send(self, drafts):
        print(len(drafts), flush=True)
        return super().send(drafts)
sender = Sender(FACTS, settings(delay_s=60.0), Told)
sender.put(step(0))
"""


def test_what_waits_when_the_process_ends_is_sent() -> None:
    done = run(ENDS)
    assert done.stdout == "1\n", done.stderr


# --- what vLLM sees ---------------------------------------------------------------------------------------------------


class LoggerBase(ABC):
    """The abstract methods of vLLM's own base class."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None: ...  # fmt: skip

    @abstractmethod
    def log_engine_initialized(self) -> None: ...


@pytest.fixture
def logger_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    from phasewise.instrumented_engine.vllm.hook import stat_logger

    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.StatLoggerBase = LoggerBase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.loggers", loggers)
    return stat_logger()


def test_vllm_gets_a_whole_subclass_of_its_own_class(logger_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(logger_class, LoggerBase)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    made = logger_class(config(), 0)
    made.log_engine_initialized()
    kept = Kept()
    made.sender._open_export = lambda: kept
    at = step(0, Done())
    made.record(at.scheduler, at.iteration, mm_cache_stats=None, engine_idx=0)
    made.log()
    made.record_sleep_state(1, 0)
    assert made.sender.close()
    assert [draft.name for draft in kept.drafts] == ["llm_request", "engine.steps"]


@pytest.mark.parametrize(
    "environment",
    [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "PHASEWISE_VLLM": "off"}, {"PHASEWISE_VLLM_QUEUE": "many"}],
)
def test_where_it_is_off_or_wrongly_set_nothing_happens(
    logger_class: Any, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("OTEL_", "PHASEWISE_VLLM"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = logger_class(config(), 0)
    made.log_engine_initialized()
    made.record(State(), Brought())
    assert made.sender is None


def test_nothing_of_ours_reaches_the_engine(logger_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    made = logger_class(config(), 0)
    made.log_engine_initialized()

    def broken(reading: Reading) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(made.sender, "put", broken)
    made.record(State(), Brought())
    assert made.sender.refused == 1


def test_importing_it_imports_nothing_that_vllm_does_not_bring() -> None:
    code = (
        "import sys; before = set(sys.modules); import phasewise.instrumented_engine.vllm as v;"
        "import phasewise.instrumented_engine.vllm.hook;"
        "new = {n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "assert new == {'phasewise'}, new;"
        "import phasewise.instrumented_engine.vllm.export;"
        "ours = {n for n in sys.modules if n.startswith('phasewise.') and '.vllm' not in n};"
        "assert ours == {'phasewise.instrumented_engine'}, ours"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_losses_are_said_in_vllms_log(caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender(FACTS, settings(), lambda: Kept(take=False))
    with caplog.at_level("WARNING", "vllm.plugins.phasewise"):
        sender.put(step(0))
        until(lambda: bool(caplog.messages))
        sender.close()
    assert "1 spans not taken by the receiver" in caplog.text


def test_attributes_keep_their_types_on_the_wire(receiver: tuple[Received, str]) -> None:
    received, protocol = receiver
    told = settings(endpoint=received.endpoint, protocol=protocol)
    sender = Sender(FACTS, told, lambda: open_export(told, FACTS))
    sender.put(step(0, Done()))
    assert sender.close()
    (request,) = received.named("llm_request")
    assert attributes(request)["phasewise.supplement"] is True
    (steps,) = received.named("engine.steps")
    assert attributes(steps)["phasewise.step.duration_ns"] == [10_000_000]
