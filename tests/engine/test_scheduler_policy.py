"""Order between classes and tenants, what is kept for whom, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import MS, Driver, make_config, make_spec

from phasewise.instrumented_engine.config import AdmissionControl, EngineConfig, PoolShare, TenantShare
from phasewise.instrumented_engine.scheduler import Scheduler
from phasewise.instrumented_engine.scheduling.admission import Rate
from phasewise.instrumented_engine.scheduling.fairness import OUTPUT_TOKEN, PROMPT_TOKEN
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.rules.errors import InputError


def constant(config: EngineConfig) -> Driver:
    return Driver(config, duration=lambda plan: 10 * MS)


def filled(driver: Driver, *specs: RequestSpec) -> Driver:
    for spec in specs:
        assert driver.submit(spec) is not None
    return driver


# --- fairness ---------------------------------------------------------------------------------------------------------


def service(driver: Driver) -> Counter[str]:
    """Tokens served by tenant, as the scheduler weighs them."""
    served: Counter[str] = Counter()
    for sequence in driver.trace.sequences.values():
        tenant = sequence.spec.tenant
        assert tenant is not None
        prompt = PROMPT_TOKEN * sequence.spec.prompt_tokens if sequence.scheduled_ns is not None else 0
        served[tenant] += int(prompt + OUTPUT_TOKEN * sequence.output_tokens)
    return served


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from([1.0, 2.0, 3.5]),
    st.integers(1, 4),
)
def test_tenants_that_always_wait_get_service_by_weight(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], weight: float, slots: int
) -> None:
    """|served_a / w_a - served_b / w_b| stays under twice the dearest request a seat could hold: theorem 4.4 of the paper."""
    driver = constant(make_config(order="fair", max_num_seqs=slots, tenants={"a": TenantShare(weight=weight)}))
    for number in range(60):
        for tenant, lengths in (("a", ours), ("b", theirs)):
            prompt, output = lengths[number % len(lengths)]
            spec = make_spec(number, prompt_tokens=prompt, max_output_tokens=output, tenant=tenant)
            filled(driver, replace(spec, request_id=f"{tenant}{number}"))
    dearest = max(PROMPT_TOKEN * prompt + OUTPUT_TOKEN * output for prompt, output in ours + theirs)
    bound = 2 * max(dearest, OUTPUT_TOKEN * slots * 20 + PROMPT_TOKEN * 40)
    for _ in range(10_000):
        driver.scheduler_step()
        left = Counter(
            sequence.spec.tenant for sequence in driver.trace.sequences.values() if sequence.scheduled_ns is None
        )
        if not (left["a"] and left["b"]):
            break
        served = service(driver)
        assert abs(served["a"] / weight - served["b"]) <= bound
    else:
        raise AssertionError("the tenants never ran out of work")


def test_nobody_starves_behind_a_flood() -> None:
    """1,000 requests of one tenant are there before the one of another: under fairness it enters as soon as a seat is free."""
    waits = {}
    for order in ("fcfs", "fair"):
        driver = constant(make_config(order=order, max_num_seqs=2))
        filled(driver, *(make_spec(number, tenant="flood") for number in range(1000)))
        driver.step()
        filled(driver, make_spec(5000, tenant="small", arrival_ns=driver.now_ns))
        small = driver.trace.sequences["r5000"]
        for _ in range(12_000):
            if small.scheduled_ns is not None:
                break
            driver.scheduler_step()
        assert small.scheduled_ns is not None and small.queued_ns is not None
        waits[order] = small.scheduled_ns - small.queued_ns
    assert waits["fair"] <= 100 * MS < 10_000 * MS < waits["fcfs"]


def test_idle_time_earns_no_credit() -> None:
    driver = constant(make_config(order="fair", max_num_seqs=1))
    filled(driver, *(make_spec(number, tenant="busy", max_output_tokens=2) for number in range(40)))
    for _ in range(40):
        driver.step()  # 20 requests of the busy one, while the other was idle
    filled(driver, *(make_spec(100 + number, tenant="late", max_output_tokens=2) for number in range(20)))
    for _ in range(20):
        driver.step()
    entered = Counter(
        sequence.spec.tenant
        for sequence in driver.trace.sequences.values()
        if sequence.scheduled_ns is not None and sequence.scheduled_ns >= 400 * MS
    )
    assert abs(entered["busy"] - entered["late"]) <= 1


def test_idle_tenants_are_forgotten_when_they_are_many() -> None:
    driver = constant(make_config(order="fair", max_num_seqs=64))
    for number in range(9000):
        filled(driver, make_spec(number, tenant=f"t{number}", prompt_tokens=1, max_output_tokens=1))
        driver.scheduler_step()
    assert len(driver.scheduler._accounts._accounts) <= 4096


# --- seats and shares kept for someone --------------------------------------------------------------------------------


def test_reserved_seats_stay_empty_for_their_tenant() -> None:
    config = make_config(max_num_seqs=3, tenants={"vip": TenantShare(reserved_slots=1)})
    driver = filled(constant(config), *(make_spec(number, prompt_tokens=4, tenant="other") for number in range(4)))
    step = driver.step()
    assert step is not None and len(step.chunks) == 2 and step.waiting == (0, 0, 0, 0, 2)
    filled(driver, make_spec(9, prompt_tokens=4, tenant="vip", arrival_ns=driver.now_ns))
    step = driver.step()
    assert step is not None and [chunk[0] for chunk in step.chunks] == ["r9"]  # before those that came earlier
    assert step.waiting == (2, 0, 0, 0, 0)
    driver.run([])
    filled(driver, *(make_spec(20 + number, prompt_tokens=4, tenant="other") for number in range(3)))
    step = driver.step()  # the tenant has come and gone: its seat is empty again, and still its own
    assert step is not None and len(step.chunks) == 2 and step.waiting == (0, 0, 0, 0, 1)
    driver.run([])


def test_priority_does_not_take_a_seat_that_is_kept_for_another_tenant() -> None:
    """It would come back at once, and neither would ever get on."""
    config = make_config(
        max_num_seqs=2, order="priority", preempt_for_priority=True, tenants={"vip": TenantShare(reserved_slots=1)}
    )
    driver = filled(
        constant(config),
        make_spec(0, prompt_tokens=4, tenant="vip", priority=9),
        make_spec(1, prompt_tokens=4, tenant="other", priority=5),
    )
    driver.step()
    filled(driver, make_spec(2, prompt_tokens=4, tenant="other", priority=0, arrival_ns=driver.now_ns))
    step = driver.step()
    assert step is not None and step.preempted == ("r1",) and step.decodes == ("r0",)
    filled(driver, make_spec(3, prompt_tokens=4, tenant="other", priority=0, arrival_ns=driver.now_ns))
    step = driver.step()
    assert step is not None and step.preempted == () and step.waiting == (1, 0, 0, 0, 1)
    filled(driver, make_spec(4, prompt_tokens=4, tenant="vip", priority=1, arrival_ns=driver.now_ns))
    step = driver.step()
    assert step is not None and step.preempted == ("r0",)  # its own tenant's more urgent one may
    driver.run([])


def test_a_tenant_beyond_its_seats_waits_like_others() -> None:
    config = make_config(max_num_seqs=2, tenants={"vip": TenantShare(reserved_slots=1)})
    driver = filled(constant(config), *(make_spec(number, prompt_tokens=4, tenant="vip") for number in range(3)))
    step = driver.step()
    assert step is not None and len(step.chunks) == 2 and step.waiting == (1, 0, 0, 0, 0)
    driver.run([])


def test_more_reserved_than_there_is_refuses_the_start() -> None:
    with pytest.raises(InputError, match="5 seats are reserved of max_num_seqs 4"):
        Scheduler(make_config(tenants={"a": TenantShare(reserved_slots=5)}))
    with pytest.raises(InputError, match="weight"):
        Scheduler(make_config(tenants={"a": TenantShare(weight=0)}))
    scheduler = Scheduler(make_config(tenants={"a": TenantShare(reserved_slots=4)}))
    refusal = scheduler.submit(Sequence(make_spec(0, tenant="b")), 0)
    assert refusal is not None and refusal.never


def pools(lends: bool, **given: object) -> EngineConfig:
    """Interactive: 3 of 4 seats, 48 of 64 blocks, 48 of 64 tokens; offline: the rest."""
    shares = (
        PoolShare("interactive", ("interactive",), 0.75, 0.75, 0.75, lends),
        PoolShare("offline", ("offline",), 0.25, 0.25, 0.25),
    )
    return make_config(pools=shares, **given)


def offline(number: int, **given: object) -> RequestSpec:
    return make_spec(number, **{"prompt_tokens": 8, "request_class": "offline", **given})


def interactive(number: int, **given: object) -> RequestSpec:
    return make_spec(number, **{"prompt_tokens": 8, "request_class": "interactive", **given})


def test_a_share_that_does_not_lend_stays_empty() -> None:
    driver = filled(constant(pools(lends=False)), *(offline(number) for number in range(3)))
    step = driver.step()
    assert step is not None and len(step.chunks) == 1 and step.waiting == (0, 0, 0, 0, 2)
    driver.run([])
    assert all(len(step.decodes) + len(step.chunks) <= 1 for step in driver.trace.steps)


def test_each_share_keeps_to_its_tokens_and_blocks() -> None:
    driver = constant(pools(lends=False, kv_blocks=32))
    filled(driver, offline(0, prompt_tokens=20), interactive(1, prompt_tokens=60, max_output_tokens=2))
    step = driver.step()
    assert step is not None and [chunk[2] for chunk in step.chunks] == [
        48,
        16,
    ]  # the shares of the budget, in order of pools
    driver.run([])
    refusal = Driver(pools(lends=False, kv_blocks=32)).scheduler.submit(Sequence(offline(2, prompt_tokens=40)), 0)
    assert refusal is not None and refusal.never and "8" in refusal.reason  # 8 of the 32 blocks are offline's


def test_a_share_without_blocks_waits_though_others_have_some() -> None:
    config = pools(lends=False, max_num_seqs=8)
    driver = filled(
        constant(config), *(offline(number, prompt_tokens=30) for number in range(3))
    )  # 8 of 16 blocks each
    steps = [driver.step() for _ in range(4)]
    assert [step.waiting for step in steps if step] == [(0, 0, 0, 0, 2)] + [(0, 0, 0, 0, 1)] * 3
    assert driver.scheduler.pool.share_used == [0, 16] and driver.scheduler.pool.free_blocks == 48
    driver.run([])
    assert any(step.preempted for step in driver.trace.steps)  # growing, they run out of their own blocks only


def test_what_is_lent_is_taken_back_when_an_owner_waits() -> None:
    driver = filled(constant(pools(lends=True)), *(offline(number, max_output_tokens=30) for number in range(4)))
    step = driver.step()
    assert step is not None and len(step.chunks) == 4
    filled(driver, interactive(10, arrival_ns=driver.now_ns))
    step = driver.step()
    assert step is not None and step.preempted == ("r3",)
    assert [chunk[0] for chunk in step.chunks] == ["r10"] and step.waiting == (0, 0, 0, 0, 1)
    driver.run([])
    out = driver.trace.sequences["r3"]
    assert out.output_tokens == 30 and out.waits_ns[4] > 0 and out.preemptions == 1


def test_nothing_more_is_lent_while_an_owner_waits() -> None:
    """The owner's second prompt waits for its share of the tokens; its free seats are not given away meanwhile."""
    driver = filled(
        constant(pools(lends=True)), *(interactive(number, prompt_tokens=60, max_output_tokens=4) for number in (0, 1))
    )
    filled(driver, *(offline(number, prompt_tokens=4) for number in (10, 11, 12)))
    step = driver.step()
    assert step is not None and [chunk[0] for chunk in step.chunks] == ["r0", "r10"]
    assert step.waiting == (0, 0, 0, 0, 3)
    step = driver.step()
    assert step is not None and [chunk[0] for chunk in step.chunks] == ["r0", "r1", "r11"]  # now none waits
    driver.run([])


def test_what_one_has_borrowed_is_not_lent_again() -> None:
    """a lends its seat, d does not: when b has borrowed that of a, the empty one is not for c."""
    shares = tuple(PoolShare(name, (name,), 0.25, 0.25, 0.25, lends=name == "a") for name in "abcd")
    driver = constant(make_config(pools=shares))
    specs = [make_spec(number, prompt_tokens=4, request_class="b") for number in range(2)]
    filled(driver, *specs, *(make_spec(number, prompt_tokens=4, request_class="c") for number in (2, 3)))
    step = driver.step()
    assert step is not None and [chunk[0] for chunk in step.chunks] == ["r0", "r2", "r1"]
    assert step.waiting == (0, 0, 0, 0, 1)
    driver.run([])


def test_owners_get_their_share_whatever_the_others_send() -> None:
    """A flood of offline work, lending on or off: an interactive request within its share enters with the next plan."""
    for lends in (False, True):
        driver = constant(pools(lends=lends))
        specs = [offline(number, max_output_tokens=20, arrival_ns=number * MS) for number in range(60)]
        specs += [interactive(1000 + number, arrival_ns=(50 + 200 * number) * MS) for number in range(8)]
        trace = driver.run(specs)
        for sequence in trace.sequences.values():
            if sequence.spec.request_class == "interactive":
                assert sequence.queued_ns is not None and sequence.scheduled_ns is not None
                assert sequence.scheduled_ns - sequence.queued_ns < 10 * MS and sum(sequence.waits_ns) == 0
                assert sequence.preemptions == 0


def test_a_class_without_a_share_is_refused_or_has_the_rest() -> None:
    refusal = Scheduler(pools(lends=False)).submit(Sequence(make_spec(0)), 0)
    assert refusal is not None and refusal.never and "no pool" in refusal.reason
    half = make_config(pools=(PoolShare("interactive", ("interactive",), 0.5, 0.5, 0.5),))
    driver = filled(constant(half), *(make_spec(number, prompt_tokens=4) for number in range(3)))
    step = driver.step()
    assert step is not None and len(step.chunks) == 2 and step.waiting == (0, 0, 0, 0, 1)


def test_shares_without_a_whole_seat_refuse_the_start() -> None:
    with pytest.raises(InputError, match="0 seats"):
        Scheduler(make_config(pools=(PoolShare("a", ("a",), 0.1, 0.5, 0.5),)))
    with pytest.raises(InputError, match="two pools"):
        Scheduler(make_config(pools=(PoolShare("a", ("x",), 0.5, 0.5, 0.5), PoolShare("b", ("x",), 0.5, 0.5, 0.5))))


# --- refusals that invite to come back --------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_again() -> None:
    driver = filled(constant(make_config(max_waiting=2, max_num_seqs=1)), make_spec(0), make_spec(1))
    assert driver.submit(make_spec(2)) is None
    refusal = driver.trace.refused["r2"]
    assert not refusal.never and refusal.retry_after_s > 0 and "2 requests wait" in refusal.reason
    driver.step()
    assert driver.submit(make_spec(3, arrival_ns=driver.now_ns)) is not None
    for _ in range(30):
        driver.step()
    for number in range(4, 7):
        driver.submit(make_spec(number, arrival_ns=driver.now_ns))
    # a seat turns over every 10 steps of 10 ms
    assert driver.trace.refused["r6"].retry_after_s == pytest.approx(0.1, rel=0.3)


def test_predicted_queue_time_is_what_is_really_waited() -> None:
    """One seat, 100 ms a request: the limit of 1 s takes about ten, and they do wait up to about 1 s."""
    config = make_config(max_num_seqs=1, admission=AdmissionControl(max_predicted_queue_s=1.0))
    driver = constant(config)
    driver.run([make_spec(number, arrival_ns=number * 20 * MS) for number in range(500)])
    taken = list(driver.trace.sequences.values())[40:]
    waits = [
        (sequence.scheduled_ns - sequence.queued_ns) / 1e9
        for sequence in taken
        if sequence.scheduled_ns is not None and sequence.queued_ns is not None
    ]
    assert len(driver.trace.refused) > 300  # five times too much came
    assert sum(waits) / len(waits) > 0.7 and max(waits) < 1.3
    told = [refusal.retry_after_s for refusal in driver.trace.refused.values()]
    assert all(0.1 <= retry <= 60 for retry in told)


def test_a_queue_that_stands_still_from_the_start_is_seen() -> None:
    """A static batch of 2 s lets nobody in: after half a second three waiting ones say more than the limit of 1 s."""
    config = make_config(batching="static", admission=AdmissionControl(max_predicted_queue_s=1.0))
    driver = filled(constant(config), make_spec(0, prompt_tokens=4, max_output_tokens=50))
    for _ in range(3):
        driver.step()
        filled(driver, make_spec(len(driver.trace.sequences), arrival_ns=driver.now_ns))  # too early to tell
    for _ in range(47):
        driver.step()
    assert driver.submit(make_spec(9, arrival_ns=driver.now_ns)) is None
    assert driver.trace.refused["r9"].retry_after_s == pytest.approx(3 * 0.48 - 1, rel=0.1)


def test_predicted_kv_use_bounds_what_is_taken() -> None:
    config = make_config(admission=AdmissionControl(max_predicted_kv_ratio=0.5))  # 32 blocks; 13 each
    driver = filled(constant(config), make_spec(0), make_spec(1))
    assert driver.submit(make_spec(2)) is None
    refusal = driver.trace.refused["r2"]
    assert not refusal.never and "0.61 of the pool" in refusal.reason
    driver.run([])
    assert driver.submit(make_spec(3, arrival_ns=driver.now_ns)) is not None


def test_the_prediction_learns_how_long_answers_are() -> None:
    config = make_config(admission=AdmissionControl(max_predicted_kv_ratio=10.0))
    driver = constant(config)
    for number in range(300):
        filled(driver, make_spec(number, max_output_tokens=20, stop_after_tokens=5, arrival_ns=driver.now_ns))
        driver.run([])
    assert driver.scheduler._admission.predicted_output_tokens(100) == pytest.approx(25, rel=0.25)


def test_a_rate_fades() -> None:
    rate = Rate()
    assert rate.per_s() is None
    for _ in range(1000):
        rate.add(5, 0.5)
    assert rate.per_s() == pytest.approx(10, rel=0.02)
    for _ in range(1000):
        rate.add(1, 0.5)
    assert rate.per_s() == pytest.approx(2, rel=0.02)


def test_under_overload_the_bounded_queue_bounds_the_wait() -> None:
    specs = [make_spec(number, arrival_ns=number * 10 * MS) for number in range(400)]
    worst = {}
    for bound in (None, 5):
        driver = constant(make_config(max_num_seqs=2, max_waiting=bound))
        trace = driver.run(specs)
        waits = [
            sequence.scheduled_ns - sequence.queued_ns
            for sequence in trace.sequences.values()
            if sequence.scheduled_ns is not None and sequence.queued_ns is not None
        ]
        worst[bound] = max(waits)
        served = len(trace.sequences) / driver.now_ns * 1e9
        assert served == pytest.approx(20, rel=0.1)  # throughput is the same
    assert worst[5] < 500 * MS < 10_000 * MS < worst[None]
