"""Measuring with a device and a clock that are made up: sizes, budgets, spread, and what a device does not have."""

from __future__ import annotations

import pytest
from made_device import MadeDevice

from phasewise.instrumented_engine.calibration.machine_facts import stream_array_bytes
from phasewise.instrumented_engine.calibration.numpy_device import NumpyDevice
from phasewise.instrumented_engine.calibration.profile import identity_of, measure
from phasewise.instrumented_engine.calibration.repeats import (
    FEWEST_REPEATS,
    LEAST_REPEAT_S,
    MOST_REPEATS,
    Work,
    doubt,
    product_rate,
    rate_of,
    stream_rates,
    timed_for,
)
from phasewise.rules.errors import MachineError


@pytest.mark.parametrize("flops", [1e8, 1e10, 1e12, 1e15])
@pytest.mark.parametrize("budget_s", [0.1, 1.0, 30.0])
def test_the_size_fits_device_and_budget(flops: float, budget_s: float) -> None:
    device = MadeDevice(flops=flops)
    rate = product_rate(device, "fp32", budget_s, device.clock)
    smallest = 2 * 128**3 / flops
    assert device.now_s <= 2 * budget_s + 14 * (smallest + LEAST_REPEAT_S), "never far over the budget"
    assert FEWEST_REPEATS <= rate.repeats <= MOST_REPEATS
    assert rate.median <= flops
    if smallest < budget_s / 100:
        assert rate.median > flops / 4, "far enough from what it costs to start a call"


def test_the_size_that_gives_most_is_repeated() -> None:
    class Worse(MadeDevice):
        def product(self, dtype: str, size: int) -> Work:
            self.sizes.append(size)
            slow = 10 if size > 512 else 1
            return lambda: self._take(slow * 2 * size**3 / self.flops)

    device = Worse()
    assert product_rate(device, "fp32", 10.0, device.clock).shape == "512 x 512 x 512"
    assert device.sizes[-1] == 512 and max(device.sizes) > 512


def test_a_short_call_is_run_several_times_a_repeat() -> None:
    device = MadeDevice()
    taken = timed_for(1.0, lambda: device._take(1e-6), device.wait, device.clock)
    assert taken == pytest.approx([1.1e-5] * len(taken))
    assert device.calls > 100 * len(taken)


def test_a_stream_counts_what_is_read_and_what_is_written() -> None:
    device = MadeDevice(start_s=0.0)
    rate = stream_rates(device, 1.0, device.clock)["copy"]
    assert rate.median == pytest.approx(device.bytes_per_s)
    assert rate.shape == "1 read and 1 written, 64 MiB each"


def test_arrays_outgrow_the_cache_and_leave_the_memory_to_others() -> None:
    least, gib = 64 << 20, 1 << 30
    assert stream_array_bytes(36 << 20, 24 * gib, least) == 144 << 20
    assert stream_array_bytes(None, 24 * gib, least) == least
    assert stream_array_bytes(36 << 20, gib, least) == 64 << 20, "a sixteenth of the memory"
    assert stream_array_bytes(None, 1, least) == 1 << 20


def test_a_rate_has_its_spread_and_a_note_where_that_is_wide() -> None:
    rate = rate_of(100.0, [1.0, 1.0, 2.0, 1.0, 4.0], "x")
    assert (rate.least, rate.median, rate.most, rate.repeats) == (25.0, 100.0, 100.0, 5)
    assert rate.least <= rate.p10 < rate.p90 <= rate.most
    assert (said := doubt("fp32", rate)) is not None and "fp32: too noisy, spread" in said and "over 5 repeats" in said
    assert doubt("fp32", rate_of(1.0, [1.0] * 5, "x")) == "fp32: only 5 repeats fit into the time"
    assert doubt("fp32", rate_of(1.0, [1.0] * 50, "x")) is None


def test_a_noisy_machine_still_gives_a_profile() -> None:
    device = MadeDevice(jitter=(1.0, 30.0, 1.0, 0.7, 5.0))
    found = measure(device, device.dtypes, 2.0, "2026-11-30", {}, clock=device.clock)
    assert set(found.measured.products) == set(device.dtypes)
    assert any("too noisy" in note for note in found.measured.notes)


def test_what_a_device_does_not_have_is_left_out_and_noted() -> None:
    device = MadeDevice(without=("bf16",))
    told: list[str] = []
    found = measure(device, device.dtypes, 2.0, "2026-11-30", {"phasewise": "1"}, told.append, device.clock)
    assert set(found.measured.products) == {"fp32", "int8"}
    assert "bf16: not here (no kernel for bf16)" in found.measured.notes
    assert found.measured.versions == {"phasewise": "1", "made": "1"}
    assert told == ["streams", "fp32", "bf16", "int8"]


def test_without_any_product_there_is_no_profile() -> None:
    device = MadeDevice(without=("bf16",))
    with pytest.raises(MachineError, match="no matrix product can be computed: bf16: not here"):
        measure(device, ("bf16",), 1.0, "2026-11-30", {}, clock=device.clock)


def test_a_file_name_is_made_of_the_name_of_a_device() -> None:
    assert identity_of("NVIDIA H200") == "nvidia-h200"
    assert identity_of("Intel(R) Xeon(R) Processor @ 2.00GHz") == "intel-xeon-processor-2-00ghz"
    assert identity_of("///") == "device"


def test_without_torch_numpy_measures_one_type() -> None:
    device = NumpyDevice()
    device.stream_bytes = 1 << 20
    rate = product_rate(device, "fp32", 0.05)
    assert rate.median > 0 and stream_rates(device, 0.05)["copy"].median > 0
    assert device.memory_bytes > 0 and device.name
    with pytest.raises(NotImplementedError):
        device.product("bf16", 8)


def test_torch_measures_this_cpu() -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    from phasewise.instrumented_engine.calibration.torch_device import TorchDevice

    device = TorchDevice("cpu")
    device.stream_bytes = 1 << 20
    found = measure(device, ("fp32", "bf16", "int8"), 0.2, "2026-11-30", {})
    assert set(found.measured.products) >= {"fp32", "bf16"}
    assert set(found.measured.streams) == {"copy", "triad"}
    assert "2 read and 1 written" in found.measured.streams["triad"].shape


def test_without_a_cuda_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    from phasewise.instrumented_engine.calibration import torch_device

    monkeypatch.setattr(torch_device, "has_cuda", lambda: False)
    with pytest.raises(MachineError, match="no CUDA device can be used here"):
        torch_device.TorchDevice("cuda")


@pytest.mark.gpu
def test_a_cuda_device_reaches_more_in_16_bits_than_in_32() -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    from phasewise.instrumented_engine.calibration.torch_device import TorchDevice

    found = measure(TorchDevice("cuda"), ("fp32", "bf16"), 3.0, "2026-11-30", {})
    assert found.measured.products["bf16"].median > found.measured.products["fp32"].median
