"""Without the extra `engine` everything but the real executor works, and that says in one sentence what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
for name in ("torch", "gguf", "safetensors", "tokenizers", "jinja2"):
    sys.modules[name] = None
"""
REAL = (
    "model",
    "attention",
    "llama.sampling",
    "llama.weights",
    "executors.torch_executor",
    "calibration.torch_device",
)
WITHOUT = (
    "calibration.profile",
    "calibration.numpy_device",
    "llama.llama_config",
    "llama.model_files",
    "llama.gguf_file",
    "llama.gguf_tokenizer",
    "llama.tokenizer",
    "llama.chat_template",
    "core",
    "scheduler",
)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_what_computes_names_the_extra() -> None:
    out = run(
        "import importlib\n"
        "from phasewise.rules.errors import MachineError\n"
        f"for name in {REAL!r}:\n"
        "    try:\n"
        "        importlib.import_module('phasewise.instrumented_engine.' + name)\n"
        "        print(name, 'imported')\n"
        "    except MachineError as problem:\n"
        "        print(problem)\n"
    )
    assert out.splitlines() == [
        "real models need PyTorch, and torch is not installed (pip install 'phasewise[engine]')"
    ] * len(REAL)


def test_everything_else_imports_without_it() -> None:
    run(
        f"import importlib\nfor name in {WITHOUT!r}:\n    importlib.import_module('phasewise.instrumented_engine.' + name)"
    )


@pytest.mark.parametrize("module", WITHOUT)
def test_nothing_else_loads_torch(module: str) -> None:
    code = f"import sys, phasewise.instrumented_engine.{module}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
