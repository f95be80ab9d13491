"""From settings to an engine: what is chosen where nobody chose, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live_engine import engine

from phasewise.instrumented_engine.plan import StepOutcome, StepPlan
from phasewise.instrumented_engine.serving.launch import launch
from phasewise.instrumented_engine.serving.server_settings import ServerSettings
from phasewise.instrumented_engine.serving.tools import Tool
from phasewise.instrumented_engine.serving.wall_clock import PacedExecutor, WallClock
from phasewise.rules.errors import InputError


def launched(**settings: Any) -> Any:
    return launch(ServerSettings(**{"executor": "simulated", **settings}), WallClock())


def test_the_pool_is_what_the_accelerator_has_room_for() -> None:
    on_h100 = launched(model="llama-3.1-8b").service
    on_l4 = launched(model="llama-3.1-8b", gpu="l4").service
    halved = launched(model="llama-3.1-8b", switches={"block_tokens": 32}).service
    assert on_h100.kv_blocks_total > 5 * on_l4.kv_blocks_total
    assert halved.kv_blocks_total == pytest.approx(on_h100.kv_blocks_total / 2, abs=1)
    assert on_h100.config.max_model_tokens == 131_072


def test_switches_come_on_top() -> None:
    service = launched(switches={"max_num_seqs": 3, "kv_blocks": 77}).service
    assert (service.config.max_num_seqs, service.kv_blocks_total) == (3, 77)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "no-such"}, "list models"),
        ({"gpu": "no-such"}, "list gpus"),
        ({"model": "llama-3.1-405b"}, "leaves no room"),
        ({"tensor_parallel_count": 3}, "tensor_parallel_count"),
        ({"time_scale": 0}, "time_scale"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"context_delay_s": 1.0}, "context_folder"),
        ({"drain_s": -1}, "drain_s"),
        ({"tools": (Tool(name="a", function=str), Tool(name="a", function=str))}, "given twice"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        launched(**settings)


def test_a_random_model_of_a_known_shape() -> None:
    pytest.importorskip("torch", reason="needs the extra engine (torch)")
    tiny = launched(executor="torch", model="random")
    assert tiny.facts["executor"] == "torch"
    assert tiny.model == "random"
    assert tiny.service.config.max_model_tokens == 2048
    with pytest.raises(InputError, match="list models"):
        launched(executor="torch", model="random:no-such")
    with pytest.raises(InputError, match="does not exist"):
        launched(executor="torch", model="/no/such/folder")
    with pytest.raises(InputError, match="device: tpu: is no device"):
        launched(executor="torch", model="random", device="tpu")


def test_each_start_is_an_instance_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        with engine(marks={"phasewise.mark": "x"}) as running:
            names.append(running.server.instance)
            assert running.server._resource()["phasewise.mark"] == "x"
    assert names[0] != names[1]


def test_the_clock_never_steps_back() -> None:
    clock = WallClock()
    moments = [clock.now_ns() for _ in range(1000)]
    assert moments == sorted(moments)
    clock.advance(10**12)
    assert clock.now_ns() - moments[-1] < 10**9


class Fixed:
    """A step that should take 20 ms."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        return StepOutcome(20_000_000)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_simulated_step_takes_its_time_and_tells_what_it_took(scale: float) -> None:
    clock = WallClock()
    before = clock.now_ns()
    outcome = PacedExecutor(Fixed(), clock, time_scale=scale).execute(StepPlan(0))
    passed = clock.now_ns() - before
    assert 20_000_000 * scale <= outcome.duration_ns <= passed
