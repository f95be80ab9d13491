"""What the environment says about sending. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OFF = ("off", "0", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """endpoint: where spans go, None: nowhere (switched off, or nobody said where); queue_answers: answers of the engine that may
    wait to be sent, some kilobytes each in large batches; delay_s: between two looks at them; closing_s: for what is left at the end."""

    endpoint: str | None
    protocol: str = "grpc"
    queue_answers: int = 8_192
    delay_s: float = 0.5
    closing_s: float = 2.0


def settings_of(environment: Mapping[str, str]) -> Settings:
    """PHASEWISE_VLLM=off switches it off; PHASEWISE_VLLM_QUEUE bounds the queue; the rest are OpenTelemetry's own variables, of
    which vLLM sets the endpoint itself from --otlp-traces-endpoint. Raises ValueError naming the variable."""
    endpoint = _first(environment, ENDPOINTS)
    protocol = _first(environment, PROTOCOLS) or "grpc"
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or environment.get("PHASEWISE_VLLM", "").lower() in OFF:
        endpoint = None
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"{PROTOCOLS[0]}: {protocol!r} is not known; grpc and http/protobuf are")
    queue = environment.get("PHASEWISE_VLLM_QUEUE", "")
    if queue and not (queue.isdecimal() and int(queue) >= 16):
        raise ValueError(f"PHASEWISE_VLLM_QUEUE: {queue!r} is not a whole number of at least 16")
    return Settings(endpoint=endpoint, protocol=protocol, queue_answers=int(queue) if queue else 8_192)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
