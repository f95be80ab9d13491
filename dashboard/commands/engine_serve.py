"""`phasewise engine serve`: from options to the settings of the engine's server."""

from __future__ import annotations

import sys
import uuid
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.dashboard.commands.engine import chosen_executor
from phasewise.dashboard.commands.engine_settings import chosen, near
from phasewise.dashboard.commands.ports import is_loopback
from phasewise.rules.errors import InputError
from phasewise.rules.load import load_rulebook

if TYPE_CHECKING:
    from phasewise.instrumented_engine.serving.server_settings import ServerSettings

ONLY_FOR = {  # settings that the other executor would not heed
    **dict.fromkeys(("tensor_parallel_count", "weight_bits", "kv_bits", "time_scale", "output_tokens"), "simulated"),
    **dict.fromkeys(("dtype", "device", "kernel"), "torch"),
}
GPU, MODEL = "h100-sxm", "llama-3.1-8b"  # simulated, where nothing was chosen


def serve_engine(options: Namespace) -> int:
    """Serves until SIGTERM or SIGINT."""
    settings = settings_of(options)
    from phasewise.instrumented_engine.server import serve

    return serve(settings)


def settings_of(options: Namespace) -> ServerSettings:
    """Everything the server is told. Raises InputError naming the option, MachineError where torch cannot be had."""
    from phasewise.instrumented_engine.export import ExportSettings
    from phasewise.instrumented_engine.serving.server_settings import ServerSettings

    if not is_loopback(options.host) and not options.allow_remote:
        raise InputError(
            "--host",
            options.host,
            "can be reached from other machines, and there are no access keys",
            "put a proxy that asks for credentials in front, or say --allow-remote",
        )
    named = {"max_num_seqs": options.max_num_seqs, "step_token_budget": options.step_token_budget}
    asked = chosen(options.set, {name: value for name, value in named.items() if value is not None})
    executor, reason = chosen_executor(_meant(options), options.model)
    if executor == "torch" and options.gpu is not None:
        raise InputError(
            "--gpu", options.gpu, "is for the simulated executor", "say --executor simulated, or leave it out"
        )
    for name in asked.server:
        if name in ONLY_FOR and ONLY_FOR[name] != executor:
            problem = f"is for the executor {ONLY_FOR[name]}, and this one is {executor}"
            raise InputError("--set", name, problem, f"say --executor {ONLY_FOR[name]}, or leave it out")
    if reason:
        print(f"phasewise engine: {reason}", file=sys.stderr)
    shared = {
        "host": options.host,
        "port": options.port,
        "seed": options.seed,
        "switches": asked.switches,
        "export": ExportSettings(endpoint=options.otlp_endpoint),
        **asked.server,
    }
    if executor == "torch":
        return ServerSettings(executor="torch", model=options.model, **shared)
    return _simulated(options, shared)


def _meant(options: Namespace) -> str:
    """auto with an accelerator, or with a model that is known by its shape only, means simulated."""
    known_by_shape = (
        options.model is not None
        and load_rulebook().find_model(options.model) is not None
        and not options.model.lower().startswith("smollm2-135m")
        and not Path(options.model).exists()
    )
    simulated = options.executor == "auto" and (options.gpu is not None or known_by_shape)
    return "simulated" if simulated else str(options.executor)


def _simulated(options: Namespace, shared: dict[str, object]) -> ServerSettings:
    from phasewise.dashboard.commands.engine_scenario import simulated_marks
    from phasewise.dashboard.wording import SIMULATED
    from phasewise.instrumented_engine.serving.server_settings import ServerSettings

    rulebook = load_rulebook()
    gpu = rulebook.find_gpu(options.gpu or GPU)
    model = rulebook.find_model(options.model or MODEL)
    if gpu is None:
        raise InputError("--gpu", options.gpu, "is not in the rules", near(options.gpu, rulebook.gpus))
    if model is None:
        raise InputError("--model", options.model, "is not in the rules", near(options.model, rulebook.models))
    instance = uuid.uuid4().hex[:16]
    marks = simulated_marks(f"{SIMULATED}{instance}", machine=gpu.name, model=model.name, load="live")
    return ServerSettings(
        executor="simulated",
        gpu=gpu.id,
        model=model.id,
        instance=instance,
        marks=marks,
        **shared,  # type: ignore[arg-type]
    )
