"""Time of the collectives of tensor parallelism inside one node."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.rules.kernels.operators import EVERYTHING, Amount, Kept, one_where_any, smooth_maximum
from phasewise.rules.schema import CollectiveEfficiency


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The all-reduces of a step, one message size: latency and transfer joined by a smooth maximum.

    A ring moves 2 (n-1)/n of the message over each device's link; small messages cost the latency of n devices.
    """

    curve: CollectiveEfficiency
    devices: int
    link_bytes_per_s: float
    calls: int
    bytes_per_row: float
    slow_ratio: float

    def seconds(self, rows: Amount, kept: Kept = EVERYTHING) -> Amount:
        works = one_where_any(rows)
        share = 2.0 * (self.devices - 1) / self.devices
        transfer_s = rows * (self.bytes_per_row * share / (self.link_bytes_per_s * self.curve.link_ratio[self.devices]))
        latency_s = works * self.curve.latency_s[self.devices]
        call_s = smooth_maximum(latency_s, transfer_s, self.curve.sharpness)
        return call_s * (self.calls * self.slow_ratio * kept.communication)
