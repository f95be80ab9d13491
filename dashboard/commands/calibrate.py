"""`phasewise calibrate`: what this machine reaches, as a hardware profile that the roofline is then judged with."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.dashboard.commands.rules import plain
from phasewise.rules.errors import InputError, MachineError, RuleError
from phasewise.rules.hardware_file import read_gpu
from phasewise.rules.hardware_text import gpu_text
from phasewise.rules.load import PACKAGED, load_rulebook, own_folder
from phasewise.rules.measured import Rate
from phasewise.rules.toml_table import TomlTable

if TYPE_CHECKING:
    from phasewise.instrumented_engine.calibration.profile import Machine
    from phasewise.rules.load import Rulebook
    from phasewise.rules.schema import Gpu

INSTALL = "pip install 'phasewise[engine]'"


def run(options: Namespace) -> int:
    """Measures, prints a table, writes the profile."""
    from phasewise.instrumented_engine.calibration.profile import identity_of, measure, profile

    device = _device(options.device)
    dtypes = options.dtypes or device.dtypes
    for dtype in dtypes:
        if dtype not in device.dtypes:
            raise InputError(
                "--dtypes",
                dtype,
                f"cannot be measured on {device.name}",
                f"some of {', '.join(device.dtypes)}{_hint()}",
            )
    path = _path(options, identity_of(f"{device.name} measured"))
    rulebook = _rulebook(make_own=options.output is None)
    figures = measure(
        device,
        dtypes,
        options.seconds,
        datetime.now(UTC).date().isoformat(),
        {"phasewise": version("phasewise")},
        lambda what: print(f"measuring {what}", file=sys.stderr),
    )
    found = profile(
        figures,
        path.stem,
        _free(rulebook, path.stem, f"{device.name} (measured)") or f"{device.name} ({path.stem})",
        _with_data_sheet(rulebook.find_gpu(device.name)),
        tuple(filter(None, [_free(rulebook, path.stem, device.name)])),
    )
    _write(path, gpu_text(found))
    if options.json:
        print(json.dumps({"id": found.id, "file": str(path), **plain(found)}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(table(found)))
    print(f"wrote {path}; {_next(path, found.id)}", file=sys.stderr)
    return 0


def _device(name: str | None) -> Machine:
    """MachineError where the device or what measures it is not there."""
    if importlib.util.find_spec("torch") is None:
        from phasewise.instrumented_engine.calibration.numpy_device import NumpyDevice

        if name not in (None, "cpu"):
            raise MachineError(f"{name} is measured with PyTorch, and torch is not installed ({INSTALL})")
        return NumpyDevice()
    from phasewise.instrumented_engine.calibration.torch_device import TorchDevice, has_cuda

    return TorchDevice(name or ("cuda" if has_cuda() else "cpu"))


def _hint() -> str:
    return "" if importlib.util.find_spec("torch") else f"; more with PyTorch: {INSTALL}"


def _rulebook(*, make_own: bool) -> Rulebook:
    """make_own: the profile goes into the user's own folder, which may not be there yet."""
    if make_own:
        with _writing(own_folder()):
            (own_folder() / "gpus").mkdir(parents=True, exist_ok=True)
    return load_rulebook()


def _with_data_sheet(known: Gpu | None) -> Gpu | None:
    return known if known is not None and known.peak_flops else None


def _free(rulebook: Rulebook, identity: str, name: str) -> str | None:
    """The name, unless another accelerator has it: two files that claim one name stop the start."""
    other = rulebook.find_gpu(name)
    return name if other is None or other.id == identity else None


def _path(options: Namespace, identity: str) -> Path:
    """Where the profile goes; nothing but an earlier profile is replaced there. Its name is its id."""
    named: Path | None = options.output
    if named is not None and named.suffix != ".toml":
        raise InputError("--output", str(named), "is no rule file", "let its name end in .toml")
    if named is not None and options.id not in (None, named.stem):
        raise InputError("--id", options.id, f"is not the name of {named}", "the id of a rule is the name of its file")
    path = named or own_folder() / "gpus" / f"{options.id or identity}.toml"
    if (PACKAGED / "gpus" / path.name).exists():
        raise InputError("--id", path.stem, "is a rule of the package", "choose another")
    if path.exists() and not _is_profile(path):
        raise InputError("--output", str(path), "exists, and is no profile that calibrate wrote", "choose another")
    return path


def _is_profile(path: Path) -> bool:
    try:
        return read_gpu(path.stem, TomlTable.parse(path, path.read_text(encoding="utf-8"))).measured is not None
    except (RuleError, OSError, UnicodeDecodeError):
        return False


def _write(path: Path, text: str) -> None:
    """Whole or not at all: half a rule file would stop every start."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(f"cannot write {path}: {reason} (choose another with --output)") from None


def _next(path: Path, identity: str) -> str:
    """How the profile comes into force."""
    name = f'name it in phasewise.toml: [hardware] accelerator = "{identity}"'
    if path.parent.resolve() == (own_folder() / "gpus").resolve():
        return name
    return f"put it into {own_folder() / 'gpus'}, then {name}"


def table(gpu: Gpu) -> Iterator[str]:
    """The figures as people read them: sustained (the median), the middle of the repeats, the fastest, how many, of what."""
    assert gpu.measured is not None
    told = gpu.measured
    threads = "" if told.threads is None else f", {told.threads} threads"
    yield f"{told.device}{threads}, {gpu.memory_bytes / 2**30:.1f} GiB"
    yield f"{', '.join(f'{name} {number}' for name, number in told.versions.items())}, {told.date}"
    yield ""
    yield f"{'':8}{'median':>10}  {'p10 to p90':>19}  {'fastest':>10}  {'n':>4}  of"
    tera = max((rate.median for rate in told.products.values()), default=0.0) >= 1e12
    for rates, scale, unit in (
        (told.products, 1e12 if tera else 1e9, "TFLOP/s" if tera else "GFLOP/s"),
        (told.streams, 1e9, "GB/s"),
    ):
        for name, rate in rates.items():
            yield _row(name, rate, scale, unit)
    yield from (f"note: {note}" for note in told.notes)


def _row(name: str, rate: Rate, scale: float, unit: str) -> str:
    low, middle, high, most = (f"{value / scale:.4g}" for value in (rate.p10, rate.median, rate.p90, rate.most))
    return f"{name:8}{middle:>10}  {f'{low} to {high}':>19}  {most:>10}  {rate.repeats:>4}  {unit}, {rate.shape}"
