"""A CPU or a CUDA device measured with PyTorch. Matrices hold normal random values: a device that multiplies zeros stays too cool."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.instrumented_engine.calibration.machine_facts import (
    last_cache_bytes,
    memory_bytes,
    processor_name,
    stream_array_bytes,
)
from phasewise.instrumented_engine.calibration.repeats import Work
from phasewise.instrumented_engine.torch_import import torch
from phasewise.rules.errors import MachineError

FLOATS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_STREAM_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


def has_cuda() -> bool:
    return bool(torch.cuda.is_available())


class TorchDevice:
    """dtypes: what may be asked of such a device; which of them this one has, a trial tells."""

    smallest_product: int
    largest_product: int

    def __init__(self, name: str) -> None:
        """name: cpu, cuda or cuda:N. MachineError where there is no such device."""
        self.versions = {"torch": str(torch.__version__)}
        self.notes: tuple[str, ...] = ()
        if name == "cpu":
            self.device = torch.device("cpu")
            self.kind, self.name = "cpu", processor_name()
            self.memory_bytes, cache = memory_bytes(), last_cache_bytes()
            self.threads: int | None = torch.get_num_threads()
            self.dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16", "int8")
            self.smallest_product, self.largest_product = 128, 8192
            free = self.memory_bytes
        else:
            self._open_cuda(name)
            told = torch.cuda.get_device_properties(self.device)
            self.kind, self.name = "gpu", str(told.name)
            self.memory_bytes, cache = int(told.total_memory), int(told.L2_cache_size)
            self.threads = None
            self.versions["cuda" if torch.version.cuda else "hip"] = str(torch.version.cuda or torch.version.hip)
            self.dtypes = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
            free = int(torch.cuda.mem_get_info(self.device)[0])
            self.smallest_product, self.largest_product = 1024, 16384 if free > 16 << 30 else 8192
        self.stream_bytes = stream_array_bytes(cache, free, LEAST_STREAM_BYTES[self.device.type])

    def _open_cuda(self, name: str) -> None:
        if not has_cuda():
            raise MachineError("no CUDA device can be used here (phasewise calibrate --device cpu measures the CPU)")
        number = int(name.partition(":")[2] or 0)
        if number >= torch.cuda.device_count():
            raise MachineError(f"there is no device {name}: {torch.cuda.device_count()} can be seen, from cuda:0 on")
        self.device = torch.device("cuda", number)

    def product(self, dtype: str, size: int) -> Work:
        """RuntimeError or NotImplementedError where this device has no such product."""
        if dtype == "int8":
            return self._int8(size)
        if dtype == "fp8":
            return self._fp8(size)
        a, b = (torch.randn(size, size, device=self.device).to(FLOATS[dtype]) for _ in range(2))
        out = torch.empty_like(a)
        if self.device.type == "cuda":
            matmul = torch.backends.cuda.matmul
            wanted = "tf32" if dtype == "tf32" else "ieee"

            def multiply() -> None:
                before, matmul.fp32_precision = matmul.fp32_precision, wanted
                torch.mm(a, b, out=out)
                matmul.fp32_precision = before

            return multiply
        return lambda: torch.mm(a, b, out=out)

    def _int8(self, size: int) -> Work:
        a, b = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device=self.device) for _ in range(2))
        return lambda: torch._int_mm(a, b)

    def _fp8(self, size: int) -> Work:
        """Both operands with one scale, results in bf16, sums as engines take them (fast accumulation)."""
        a, b = (torch.randn(size, size, device=self.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=self.device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def streams(self) -> Mapping[str, tuple[Work, int]]:
        values = self.stream_bytes // 4
        a, b, c = (torch.ones(values, dtype=torch.float32, device=self.device) for _ in range(3))
        return {"copy": (lambda: c.copy_(a), 2), "triad": (lambda: torch.add(a, b, alpha=0.5, out=c), 3)}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
