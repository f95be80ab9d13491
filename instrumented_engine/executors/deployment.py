"""One replica of a model on accelerators: what the time law needs to know, and how many KV blocks it holds."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.rules.counting import Precision, kv_bytes_per_token, kv_copies
from phasewise.rules.errors import InputError
from phasewise.rules.kv_memory import model_kv_pool_bytes, pool_blocks
from phasewise.rules.schema import Gpu, Model

# What an engine keeps free on each device besides the weights: activation peak, CUDA context, graphs, NCCL buffers
# (design/roofline.md 2.5: AIConfigurator reserves 3.5 GB and 0.34-0.39 GB for NCCL).
RESERVE_BYTES = 3.9e9
DEVICES_PER_NODE = 8
SIXTEEN_BITS = Precision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """compute_dtype: data type whose peak the matrix products run at (with weight-only quantization still bf16).

    host_step_s, host_token_s: CPU time of a step and of each sequence that gets a token in it (scheduling, input preparation,
    sampling, output). The defaults are assumed for an engine of 2026; Vidur's table has 0.8 ms and 42 us a sequence for one of
    2024 on one device, 1.5 to 2 ms and 38 to 45 us, and 6 ms of Ray, on several. async_scheduling: it overlaps with the
    device, else the device waits. launch_s: CPU time to launch one kernel; steps of at most graph_tokens tokens are one CUDA
    graph when cuda_graphs. cold_s: extra time of the first step, falling linearly to 0 at step cold_steps (allocation, graph
    capture, autotuning): by the number of the step alone, so that a step asked again costs the same.
    noise_ratio: coefficient of variation of a step. *_slow_ratio: 2 = that resource has half its speed (throttled clock,
    shared link).
    """

    gpu: Gpu
    model: Model
    precision: Precision = SIXTEEN_BITS
    tensor_parallel_count: int = 1
    compute_dtype: str = "bf16"
    host_step_s: float = 1.2e-3
    host_token_s: float = 8e-6
    async_scheduling: bool = True
    cuda_graphs: bool = True
    graph_tokens: int = 512
    launch_s: float = 5e-6
    cold_steps: int = 0
    cold_s: float = 0.0
    noise_ratio: float = 0.03
    compute_slow_ratio: float = 1.0
    memory_slow_ratio: float = 1.0
    communication_slow_ratio: float = 1.0

    def __post_init__(self) -> None:
        """Raises InputError naming the setting."""
        count = self.tensor_parallel_count
        if not 1 <= count <= DEVICES_PER_NODE or count & (count - 1):
            raise _refused(
                "tensor_parallel_count", f"{count} devices were never measured in one node", "give 1, 2, 4 or 8"
            )
        if self.model.heads % count:
            raise _refused(
                "tensor_parallel_count", f"{count} does not divide the {self.model.heads} heads", "give a divisor"
            )
        if count > 1 and self.gpu.link_bandwidth_bytes_per_s is None:
            raise _refused(
                "tensor_parallel_count",
                f"no bandwidth between devices is known for {self.gpu.name}",
                "give 1, or state link_bandwidth_bytes_per_s with its source in the accelerator's rule file",
            )
        if self.gpu.memory_bandwidth_bytes_per_s is None:
            raise _refused(
                "gpu",
                f"{self.gpu.name} was only measured, and the time law starts from a data sheet",
                "give an accelerator that has one",
            )
        if self.compute_dtype not in self.gpu.peak_flops:
            raise _refused(
                "compute_dtype",
                f"no {self.compute_dtype} peak is known for {self.gpu.name}",
                f"give one of {', '.join(self.gpu.peak_flops)}",
            )
        for name in ("host_step_s", "host_token_s", "launch_s", "cold_s", "noise_ratio", "cold_steps"):
            if getattr(self, name) < 0:
                raise _refused(name, f"{getattr(self, name)} is negative", "give 0 or more")
        for name in ("compute_slow_ratio", "memory_slow_ratio", "communication_slow_ratio"):
            if getattr(self, name) < 1:
                raise _refused(name, f"{getattr(self, name)} is below 1", "the law never beats the data sheet")

    @property
    def kv_copies(self) -> float:
        return kv_copies(self.model, self.tensor_parallel_count)


def kv_blocks_for(
    deployment: Deployment,
    block_tokens: int = 16,
    utilization_ratio: float = 0.9,
    reserve_bytes: float = RESERVE_BYTES,
) -> int:
    """Blocks of the KV pool; reserve_bytes: per device, all but the weights. InputError where the weights do not fit."""
    pool_bytes = model_kv_pool_bytes(
        deployment.model,
        deployment.precision,
        deployment.gpu.memory_bytes,
        utilization_ratio,
        deployment.tensor_parallel_count,
        reserve_bytes,
    )
    per_token = kv_bytes_per_token(deployment.model, deployment.precision.kv_bits) * deployment.kv_copies
    blocks = pool_blocks(pool_bytes, block_tokens, per_token)
    if blocks < 1:
        raise _refused(
            "tensor_parallel_count",
            f"{deployment.model.name} leaves no room for KV on {deployment.tensor_parallel_count} x {deployment.gpu.name}",
            "more devices, fewer bits per weight or a smaller model",
        )
    return blocks


def _refused(setting: str, problem: str, remedy: str) -> InputError:
    return InputError("deployment", setting, problem, remedy)
