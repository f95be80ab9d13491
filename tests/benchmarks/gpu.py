"""What one accelerator gives, in at most fifteen minutes: its peaks, the engine's steps over batch x context, and what spans cost.

    python tests/benchmarks/gpu.py --out DIR [--minutes 12] [--shape llama-3.1-8b] [--gpu h100-sxm] [--device cuda]
    python tests/benchmarks/gpu.py --out DIR --device cpu --shape tiny --minutes 1     # a rehearsal without a device

Random weights of a real shape: the time of a step does not depend on what the weights say. Stages run in the order of their
worth and each keeps to its part of the time, so that a run cut short leaves what it has measured in DIR/gpu.json and DIR/gpu.md.

1. facts      device, driver, versions
2. calibrate  best matrix product (FLOP/s) and best stream (bytes/s), median and spread of the repeats
3. decode     batch x context: milliseconds, share of the measured bandwidth, ratio to the data sheet's bound and to the time law
4. prefill    prompt lengths: milliseconds, share of the measured peak
5. spans      the same closed load with telemetry on and off, interleaved; ratio of the wall times with its spread

Exit code 1 where a request was not served, a span not sent or no step run; 2 for an unknown shape, 4 without a device.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.machine import machine
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from phasewise.instrumented_engine.calibration.repeats import Work, product_rate, stream_rates, timed
from phasewise.instrumented_engine.calibration.torch_device import TorchDevice
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.export import ExportSettings, SpanExport, StepBatch, request_telemetry
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.llama.weights import random_llama
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.plan import PromptChunk, StepOutcome, StepPlan
from phasewise.instrumented_engine.recording import composition
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.instrumented_engine.serving.wall_clock import WallClock
from phasewise.rules.counting import Precision, step_work
from phasewise.rules.load import Rulebook, load_rulebook
from phasewise.rules.measured import Rate

TINY = LlamaConfig(vocab=512, hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256, max_context_tokens=8192)
DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
BLOCK_TOKENS = 16
REPEATS = 7
# Share of the whole time a stage may take; decode is what the device was asked for.
PARTS = {"calibrate": 0.12, "decode": 0.45, "prefill": 0.15, "spans": 0.20}
BATCHES, CONTEXTS = (1, 8, 32, 64, 128), (128, 1024, 4096, 8192)
PROMPTS = (128, 512, 2048, 8192)


@dataclass(slots=True)
class Report:
    """Grows stage by stage, and is on disk after each."""

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, stage: str, value: object) -> None:
        self.found[stage] = value
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (self.folder / "gpu.md").write_text(markdown(self.found))
        print(f"{stage}: done", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the stages share. name: of the shape; gpu: id of its rule file, None where the device is none of the rules'."""

    rulebook: Rulebook
    model: Llama
    name: str
    gpu: str | None
    dtype: str

    @property
    def device(self) -> torch.device:
        return self.model.device


def repeated(work: Work, device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Seconds of each repeat after one run to warm up, the device waited for."""
    return timed(work, lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None, repeats)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def rate_spread(rate: Rate) -> dict[str, float]:
    return {"median": rate.median, "least": rate.least, "most": rate.most}


def facts(bench: Bench) -> dict[str, object]:
    cuda = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if cuda else platform.processor() or platform.machine(),
        "memory_bytes": torch.cuda.get_device_properties(bench.device).total_memory if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **machine(("phasewise", "torch")),
        "shape": bench.name,
        "dtype": bench.dtype,
        "weights": "random",
        "weight_bytes": bench.model.nbytes,
        "rules": bench.rulebook.version,
    }


def calibrate(bench: Bench, until: float) -> dict[str, object]:
    """The matrix product and the stream of `phasewise calibrate`, of the shape's own data type."""
    device = TorchDevice(str(bench.device))
    left = until - time.monotonic()
    product = product_rate(device, DTYPE[bench.dtype], 0.7 * left)
    stream = max(stream_rates(device, 0.25 * left).values(), key=lambda rate: rate.median)
    small = torch.ones(1, device=bench.device)
    return {
        "matmul_flops_per_s": rate_spread(product),
        "stream_bytes_per_s": rate_spread(stream),
        "smallest_kernel_s": spread(repeated(lambda: small.add_(1), bench.device, 50)),
    }


def resident(bench: Bench, batch: int, context: int) -> tuple[TorchExecutor, list[Sequence]]:
    """Sequences that have `context` - 1 tokens in the cache and are to decode the next one."""
    each = -(-context // BLOCK_TOKENS)
    config = EngineConfig(
        kv_blocks=batch * each, block_tokens=BLOCK_TOKENS, max_num_seqs=batch, max_model_tokens=context + BLOCK_TOKENS
    )
    executor = TorchExecutor(bench.model, config)
    sequences = []
    draw = random.Random(batch * 1_000_003 + context)
    for number in range(batch):
        prompt = tuple(draw.randrange(bench.model.config.vocab) for _ in range(context))
        spec = RequestSpec(
            request_id=f"s-{number}", arrival_ns=0, prompt_tokens=context, max_output_tokens=2, prompt=prompt
        )
        sequence = Sequence(spec, number)
        sequence.blocks = list(range(number * each, (number + 1) * each))
        sequence.computed_tokens = context - 1
        sequence.target_tokens = context - 1
        sequences.append(sequence)
    return executor, sequences


def judged(bench: Bench, plan: StepPlan, taken: list[float], measured: dict[str, Any]) -> dict[str, object]:
    """A step against the measured peaks, the data sheet's bound and the simulated time law."""
    shape = bench.model.config.as_model(bench.name, bench.dtype)
    precision = Precision(*[bench.model.dtype.itemsize * 8.0] * 3)
    work = step_work(
        shape, precision, [], [sequence.computed_tokens + 1 for sequence in plan.decodes]
    ) if plan.decodes else step_work(shape, precision, _chunks(plan))  # fmt: skip
    median = statistics.median(taken)
    found: dict[str, object] = {
        "s": spread(taken),
        "share_of_stream": work.total.bytes / median / measured["stream_bytes_per_s"]["median"],
        "share_of_matmul": work.total.flops / median / measured["matmul_flops_per_s"]["median"],
    }
    if bench.gpu is not None:
        gpu = bench.rulebook.gpus[bench.gpu]
        roof = gpu.roof(DTYPE[bench.dtype])
        if roof is None or roof.measured:
            return found  # no data sheet says what is impossible
        bound = max(work.total.bytes / roof.bytes_per_s, work.total.flops / roof.flops)
        law = TimeLaw(Deployment(gpu=gpu, model=shape, precision=precision, cuda_graphs=False)).seconds(
            composition(plan)
        )
        found |= {"over_bound": median / bound, "over_law": median / law}
    return found


def _chunks(plan: StepPlan) -> Iterator[Any]:
    from phasewise.rules.counting import Chunk

    return (Chunk(chunk.new_tokens, chunk.past_tokens, chunk.last) for chunk in plan.chunks)


def decode(bench: Bench, until: float, measured: dict[str, Any]) -> list[dict[str, object]]:
    """Batch x context, small ones first; what does not fit into the memory is named and left out."""
    grid = sorted(((b, s) for b in BATCHES for s in CONTEXTS), key=lambda cell: cell[0] * cell[1])
    cells: list[dict[str, object]] = []
    for batch, context in grid:
        if context > bench.model.config.max_context_tokens - BLOCK_TOKENS:
            continue
        if time.monotonic() > until:
            break
        cell: dict[str, object] = {"batch": batch, "context": context}
        try:
            executor, sequences = resident(bench, batch, context)
            plan = StepPlan(0, decodes=sequences)
            cell |= judged(bench, plan, repeated(lambda e=executor, p=plan: e.execute(p), bench.device), measured)  # type: ignore[misc]
        except (RuntimeError, MemoryError) as problem:  # torch's out-of-memory is a RuntimeError
            cell["left_out"] = str(problem).splitlines()[0][:120]
        cells.append(cell)
    return cells


def prefill(bench: Bench, until: float, measured: dict[str, Any]) -> list[dict[str, object]]:
    cells: list[dict[str, object]] = []
    for tokens in PROMPTS:
        if tokens > bench.model.config.max_context_tokens - BLOCK_TOKENS or time.monotonic() > until:
            break
        executor, (sequence,) = resident(bench, 1, tokens)
        plan = StepPlan(0, chunks=[PromptChunk(sequence, 0, tokens, True)])
        taken = repeated(lambda e=executor, p=plan: e.execute(p), bench.device, 3)  # type: ignore[misc]
        cells.append({"prompt": tokens} | judged(bench, plan, taken, measured))
    return cells


class _Nowhere(SpanExporter):
    """Takes spans and forgets them: what is measured is the engine's side, not a network."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def closed_load(bench: Bench, requests: int, telemetry: bool) -> float:
    """Wall seconds for `requests` equal requests, 16 at a time."""
    config = EngineConfig(max_num_seqs=16, kv_blocks=16 * 20, max_model_tokens=256)
    clock = WallClock()
    export = SpanExport(_Nowhere(), ExportSettings(), {"service.name": "bench"}) if telemetry else None
    batch = StepBatch(export, bytes(15) + b"\1", config.kv_blocks) if export else None

    def stepped(plan: StepPlan, outcome: StepOutcome, start_ns: int) -> None:
        if batch is not None:
            batch.add(plan.number, core.recording.telemetry()[-1])
        core.recording.steps.clear()
        core.recording.chunks.clear()

    served = 0

    def finished(sequence: Sequence) -> None:
        nonlocal served
        served += 1
        if export is not None:
            export.request(request_telemetry(sequence, bench.name, instance="bench"))

    core = EngineCore(config, TorchExecutor(bench.model, config), clock, stepped, finished)
    draw = random.Random(7)
    now = clock.now_ns()
    specs = [
        RequestSpec(
            request_id=f"r-{number}",
            arrival_ns=now,
            prompt_tokens=64,
            max_output_tokens=64,
            prompt=tuple(draw.randrange(bench.model.config.vocab) for _ in range(64)),
        )
        for number in range(requests)
    ]
    began = time.perf_counter()
    core.run(specs)
    taken = time.perf_counter() - began
    if served != requests:
        raise SystemExit(f"{served} of {requests} requests were served, {len(core.recording.refused)} refused")
    if export is not None:
        export.close(5.0)
        if export.dropped or export.failed or not export.sent:
            raise SystemExit(f"{export.sent} spans were sent, {export.dropped} dropped, {export.failed} failed")
    return taken


def spans(bench: Bench, until: float) -> dict[str, object]:
    """Pairs of runs, with and without, in turns; the first of each order alternates."""
    requests = 32
    closed_load(bench, requests, False)
    ratios: list[float] = []
    while time.monotonic() < until or not ratios:
        order = (True, False) if len(ratios) % 2 else (False, True)
        seconds = {with_spans: closed_load(bench, requests, with_spans) for with_spans in order}
        ratios.append(seconds[True] / seconds[False])
        if len(ratios) == 30:
            break
    return {"pairs": len(ratios), "wall_ratio": spread(ratios)}


def markdown(found: dict[str, Any]) -> str:
    """The tables of docs/gpu.md, filled as far as it went."""
    lines = []
    if (told := found.get("facts")) is not None:
        lines += [f"{told['device']}, torch {told['torch']}, {told['shape']} in {told['dtype']}, random weights", ""]
    if (peaks := found.get("calibrate")) is not None:
        lines += ["| measured peak | median | least | most |", "|---|---|---|---|"]
        lines += [f"| {name} | " + " | ".join(f"{peaks[name][of]:.4g}" for of in ("median", "least", "most")) + " |"
                  for name in peaks] + [""]  # fmt: skip
    for stage, first in (("decode", "batch x context"), ("prefill", "prompt")):
        if stage in found:
            lines += [
                f"| {first} | ms | share of stream | share of matmul | over bound | over law |",
                "|---|---|---|---|---|---|",
            ]
            lines += [_row(cell) for cell in found[stage]] + [""]
    if (cost := found.get("spans")) is not None:
        ratio = cost["wall_ratio"]
        lines.append(f"Telemetry on over off, wall time: {ratio['median']:.4f} ({ratio['least']:.4f} to "
                     f"{ratio['most']:.4f}, {cost['pairs']} pairs)")  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(cell: dict[str, Any]) -> str:
    name = f"{cell['batch']} x {cell['context']}" if "batch" in cell else str(cell["prompt"])
    if "left_out" in cell:
        return f"| {name} | left out: {cell['left_out']} | | | | |"
    numbers = [f"{cell['s']['median'] * 1e3:.3f}", f"{cell['share_of_stream']:.2f}", f"{cell['share_of_matmul']:.2f}"]
    numbers += [f"{cell[key]:.2f}" if key in cell else "" for key in ("over_bound", "over_law")]
    return f"| {name} | " + " | ".join(numbers) + " |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a model of the rules, or tiny")
    parser.add_argument("--gpu", help="id of the accelerator's rule file; default: found by the device's own name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPE))
    options = parser.parse_args(arguments)
    began = time.monotonic()
    rulebook = load_rulebook()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device is visible (rehearse with --device cpu --shape tiny)", file=sys.stderr)
        return 4
    if options.shape != "tiny" and options.shape not in rulebook.models:
        print(f"--shape: {options.shape!r} is none of tiny, {', '.join(sorted(rulebook.models))}", file=sys.stderr)
        return 2
    shape = TINY if options.shape == "tiny" else LlamaConfig.of(rulebook.models[options.shape])
    gpu = options.gpu
    if gpu is None and options.device.startswith("cuda"):
        known = rulebook.find_gpu(torch.cuda.get_device_name())
        gpu = known.id if known else None
    model = random_llama(shape, 1, dtype=options.dtype, device=options.device)
    bench = Bench(rulebook, model, options.shape, gpu, options.dtype)
    report = Report(options.out)
    report.keep("facts", facts(bench))
    whole: float = options.minutes * 60

    def until(stage: str) -> float:
        end = began + whole
        return min(end, time.monotonic() + PARTS[stage] * whole)

    report.keep("calibrate", calibrate(bench, until("calibrate")))
    measured = report.found["calibrate"]
    report.keep("decode", decode(bench, until("decode"), measured))
    report.keep("prefill", prefill(bench, until("prefill"), measured))
    report.keep("spans", spans(bench, until("spans")))
    print((options.out / "gpu.md").read_text())
    cells = report.found["decode"]
    if cells and not any("s" in cell for cell in cells):
        print(f"decode: no step could be run: {cells[0]['left_out']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
