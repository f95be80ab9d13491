"""From settings to an engine that can be started: executor, memory, tokenizer, and what is told of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.llama.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from phasewise.instrumented_engine.plan import Executor
from phasewise.instrumented_engine.recording import StepComposition
from phasewise.instrumented_engine.serving.server_settings import RANDOM, ServerSettings
from phasewise.instrumented_engine.serving.service import EngineService
from phasewise.instrumented_engine.serving.synthetic_text import WordTokenizer
from phasewise.instrumented_engine.serving.wall_clock import PacedExecutor, WallClock
from phasewise.rules.counting import Precision
from phasewise.rules.errors import InputError
from phasewise.rules.load import Rulebook, load_rulebook
from phasewise.rules.schema import Gpu, Model

TINY = LlamaConfig(
    vocab=512, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, max_context_tokens=2048, tied=True
)
SMALL = ("smollm2", "smollm2-135m")
BLOCK_TOKENS = 16  # where nobody chose
_ANY_STEP = StepComposition(
    number=0, prefill_tokens=16, prefill_pairs=136, prefill_past_tokens=0, chunks=1, last_chunks=1, decode_sequences=1,
    context_tokens=17,
)  # fmt: skip
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
POOL_BYTES = 1 << 30  # of a torch engine nobody configured


@dataclass(frozen=True, slots=True)
class Launched:
    """facts: executor, accelerator and precision, as /health and the resource attributes tell them."""

    service: EngineService
    tokenizer: Tokenizer
    model: str
    facts: Mapping[str, str | int | float]


def launch(settings: ServerSettings, clock: WallClock, rulebook: Rulebook | None = None) -> Launched:
    """Loads what is needed; starts nothing. Raises InputError or MachineError saying what is missing."""
    if settings.executor == "simulated":
        return _simulated(settings, clock, rulebook or load_rulebook())
    return _torch(settings, clock, rulebook)


def _simulated(settings: ServerSettings, clock: WallClock, rulebook: Rulebook) -> Launched:
    from phasewise.instrumented_engine.executors.simulated import SimulatedExecutor
    from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw, kv_blocks_for

    model = _model(rulebook, settings.model or "llama-3.1-8b")
    gpu = _gpu(rulebook, settings.gpu)
    deployment = Deployment(
        gpu=gpu,
        model=model,
        precision=Precision(weight_bits=settings.weight_bits, kv_bits=settings.kv_bits),
        tensor_parallel_count=settings.tensor_parallel_count,
    )
    config = settings.config or EngineConfig(
        **{
            "kv_blocks": kv_blocks_for(deployment, settings.switches.get("block_tokens", BLOCK_TOKENS)),
            "max_model_tokens": model.max_context_tokens or 8192,
            **settings.switches,
        }
    )
    tokenizer = WordTokenizer(model.vocab)
    law = TimeLaw(deployment)
    law.seconds(_ANY_STEP)  # what is computed once is not to make the first step late
    executor = PacedExecutor(SimulatedExecutor(law, settings.seed), clock, time_scale=settings.time_scale)
    name = settings.name or model.id
    service = EngineService(config, executor, clock, model=name, utter=tokenizer.uttered)
    facts: dict[str, str | int | float] = {
        "executor": "simulated", "gpu": gpu.id, "tensor_parallel_count": settings.tensor_parallel_count,
        "weight_bits": settings.weight_bits, "kv_bits": settings.kv_bits, "time_scale": settings.time_scale,
    }  # fmt: skip
    return Launched(service, tokenizer, name, facts)


def _torch(settings: ServerSettings, clock: WallClock, rulebook: Rulebook | None) -> Launched:
    from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
    from phasewise.instrumented_engine.llama.weights import load_llama, random_llama
    from phasewise.instrumented_engine.torch_import import torch

    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not _DEVICE.fullmatch(device):
        raise InputError("device", device, "is no device of this engine", "give cpu or cuda")
    dtype = settings.dtype or ("float32" if device == "cpu" else "bfloat16")
    asked = settings.model or SMALL[1]
    tokenizer: Tokenizer
    if asked == RANDOM or asked.startswith(f"{RANDOM}:"):
        shape = asked.partition(":")[2]
        llama = LlamaConfig.of(_model(rulebook or load_rulebook(), shape)) if shape else TINY
        model, tokenizer, name = (
            random_llama(llama, settings.seed, dtype=dtype, device=device),
            ByteTokenizer(llama.vocab),
            asked,
        )
    else:
        from phasewise.instrumented_engine.llama.model_files import SMOLLM2, model_folder

        folder = model_folder(SMOLLM2 if asked.lower() in SMALL else asked)
        model, tokenizer = load_llama(folder, dtype=dtype, device=device), load_tokenizer(folder)
        name = SMALL[1] if asked.lower() in SMALL else asked.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    block_tokens = settings.switches.get("block_tokens", BLOCK_TOKENS)
    fitting = _fitting(model.config, model.dtype.itemsize, block_tokens)
    config = settings.config or replace(fitting, **settings.switches)
    executor: Executor = TorchExecutor(model, config, kernel=settings.kernel, seed=settings.seed)
    name = settings.name or name
    service = EngineService(config, executor, clock, model=name, kv_dtype=dtype)
    facts: dict[str, str | int | float] = {
        "executor": "torch", "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu", "device": device,
        "dtype": dtype, "kernel": settings.kernel,
    }  # fmt: skip
    return Launched(service, tokenizer, name, facts)


def _fitting(model: LlamaConfig, value_bytes: int, block_tokens: int) -> EngineConfig:
    """A pool of POOL_BYTES, at least as large as one sequence of the longest kind."""
    longest = model.max_context_tokens
    blocks = max(POOL_BYTES // (model.kv_bytes_per_token(value_bytes) * block_tokens), -(-longest // block_tokens))
    most = 64 * -(-longest // block_tokens)  # beyond 64 whole sequences a small model only fills memory
    return EngineConfig(
        kv_blocks=min(blocks, most), block_tokens=block_tokens, max_model_tokens=longest, max_num_seqs=64
    )


def _model(rulebook: Rulebook, name: str) -> Model:
    found = rulebook.find_model(name)
    if found is None:
        raise InputError("model", name, "is not in the rules", "phasewise rules list models names them")
    return found


def _gpu(rulebook: Rulebook, name: str) -> Gpu:
    found = rulebook.find_gpu(name)
    if found is None:
        raise InputError("gpu", name, "is not in the rules", "phasewise rules list gpus names them")
    return found
