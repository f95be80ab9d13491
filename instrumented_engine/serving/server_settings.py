"""Everything the engine's server is told, built once at the edge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.export import ExportSettings
from phasewise.instrumented_engine.serving.tools import Tool
from phasewise.rules.errors import InputError

RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """model: simulated: a name of rules/models; torch: `smollm2-135m`, a folder, a GGUF file, `random` (tiny) or `random:NAME`
    (random weights of that shape). None: llama-3.1-8b simulated, smollm2-135m in torch. name: what clients call it.

    gpu, tensor_parallel_count, weight_bits, kv_bits: what is simulated. time_scale: 0.1 runs ten times as fast as that would.
    output_tokens: mean length of a simulated answer that is allowed to end by itself; None: at its limit. dtype, device, kernel:
    of torch; device None: CUDA where there is one. config None: a pool and lengths as model and memory allow, and beyond them
    `switches` (fields of EngineConfig by name). marks: more attributes of the process that sends the spans.
    port 0: any free one. drain_s: how long running requests may take after SIGTERM. instance: None draws a new one, as it must
    be at every start. gpu_metrics: readings of NVML as OTLP gauges, where there is a device and an endpoint.
    """

    executor: Literal["torch", "simulated"]
    model: str | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    config: EngineConfig | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    gpu: str = "h100-sxm"
    tensor_parallel_count: int = 1
    weight_bits: float = 16
    kv_bits: float = 16
    time_scale: float = 1.0
    output_tokens: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    kernel: Literal["naive", "fused"] = "fused"
    export: ExportSettings = field(default_factory=ExportSettings)
    instance: str | None = None
    service_name: str = "phasewise-engine"
    context_folder: Path | None = None
    context_delay_s: float = 0.0
    tools: tuple[Tool, ...] = ()
    fail_on_tool_error: bool = False
    drain_s: float = 10.0
    max_body_bytes: int = 8 << 20
    gpu_metrics: bool = True

    def __post_init__(self) -> None:
        """Raises InputError naming the setting."""
        if not 0 < self.time_scale < math.inf:
            raise _refused("time_scale", f"{self.time_scale} is not positive and finite", "1 is real time")
        for name in ("weight_bits", "kv_bits"):
            bits = getattr(self, name)
            if not 1 <= bits <= 32:
                raise _refused(name, f"{bits} is not within 1 to 32", "16 is BF16, 8 is FP8")
        if self.max_body_bytes < 1:
            raise _refused("max_body_bytes", f"{self.max_body_bytes} is below 1", "give bytes")
        if not self.service_name:
            raise _refused("service_name", "is empty", "give the deployment a name")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise _refused("output_tokens", f"{self.output_tokens} is below 1", "leave it out for no end of its own")
        for name in ("context_delay_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise _refused(name, f"{getattr(self, name)} is negative or endless", "give seconds")
        if self.context_delay_s and self.context_folder is None:
            raise _refused("context_delay_s", "there is no store to slow down", "give context_folder too")
        if not all(tool.name for tool in self.tools):
            raise _refused("tools", "one has no name", "give each a name that requests can ask for")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise _refused("tools", f"names are given twice: {', '.join(names)}", "give each its own")


def _refused(setting: str, problem: str, remedy: str) -> InputError:
    return InputError("server settings", setting, problem, remedy)
