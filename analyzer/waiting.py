"""How waiting depends on utilisation: what drains from a queue when service gets shorter or servers are added."""

from __future__ import annotations

import math

# From here on utilisation is taken for saturated: slots in use cannot exceed their limit, so the offered load is unknown.
SATURATED_RATIO = 0.99


def kingman_wait_s(utilization_ratio: float, service_s: float, cv2_arrival: float, cv2_service: float) -> float:
    """Mean wait in a single-server queue, Kingman's approximation (Kingman 1961).

    Exact for Poisson arrivals (cv2_arrival = 1), else good near saturation; infinite from 1 on.
    A batching engine is not one server: give it the time between admissions, not that of a request.
    """
    if utilization_ratio >= 1:
        return math.inf
    return utilization_ratio / (1 - utilization_ratio) * (cv2_arrival + cv2_service) / 2 * service_s


def waiting_probability(servers: int, offered_load: float) -> float:
    """Erlang C: share of arrivals that wait, `servers` equal servers, offered_load = arrival rate * service time.

    Poisson arrivals and exponential service (Erlang 1917); 1 where the load is not below the servers. Computed by Erlang B's
    recursion, which does not overflow.
    """
    if offered_load >= servers:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = offered_load * blocked / (server + offered_load * blocked)
    return blocked / (1 - offered_load / servers * (1 - blocked))


def mmc_wait_s(servers: int, arrival_rate_per_s: float, service_s: float) -> float:
    """Mean wait in an M/M/c queue; infinite where the load is not below the servers.

    For an engine with c slots it holds while the time of a sequence does not depend on how many run beside it, that is
    while decode is bound by weight bytes.
    """
    load = arrival_rate_per_s * service_s
    if load >= servers:
        return math.inf
    return waiting_probability(servers, load) * service_s / (servers - load)


def sojourn_removed_ratio(utilization_ratio: float, service_removed_ratio: float) -> float:
    """Part of the time in a single-server queue (wait and service, s/(1 - rho)) that a faster service removes.

    At 95 % utilisation a 20 % faster service removes 83 %. Below saturation only.
    """
    faster = utilization_ratio * (1 - service_removed_ratio)
    return 1 - (1 - service_removed_ratio) * (1 - utilization_ratio) / (1 - faster)


def wait_removed_ratio(utilization_ratio: float, service_removed_ratio: float, servers_factor: float = 1.0) -> float:
    """Part of the waiting that is removed when each service takes less time and servers are multiplied.

    Waiting goes as rho / (1 - rho) * s (Kingman, variability unchanged), rho falling with service and with servers. At
    saturation the offered load is unknown: a standing backlog then drains in proportion to the time between departures,
    which is the least that is removed of any overload.
    """
    between_departures = (1 - service_removed_ratio) / servers_factor
    if utilization_ratio >= SATURATED_RATIO:
        return min(1.0, max(0.0, 1 - between_departures))
    if utilization_ratio <= 0:
        return 0.0
    lower = utilization_ratio * between_departures
    before = utilization_ratio / (1 - utilization_ratio)
    after = lower / (1 - lower) * between_departures
    return min(1.0, max(0.0, 1 - after / before))
