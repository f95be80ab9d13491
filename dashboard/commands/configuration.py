"""`phasewise.toml`: what a deployment always says. An option on the command line wins over it.

Looked for in the working directory, then in the user's and the system's configuration directories (XDG); the first one found
is the one that is read.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.collector.scraping.jobs import read_jobs
from phasewise.rules.engine_settings import MEASURE_IT
from phasewise.rules.errors import InputError

if TYPE_CHECKING:
    from phasewise.rules.load import Rulebook

NAME = "phasewise.toml"
JOBS = "scrape"  # the one section that is a list: [[scrape]]


def _text(value: object) -> bool:
    return isinstance(value, str)


def _port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _truth(value: object) -> bool:
    return isinstance(value, bool)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _at_least_one(value: object) -> bool:
    return _positive(value) and isinstance(value, int | float) and value >= 1


def _ratio(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


# Key to (what it must be, in words; how that is told). In [slo] every metric is a key.
_SECTIONS: Mapping[str, Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "serve": {
        "data": ("a directory", _text),
        "host": ("an address", _text),
        "port": ("a port, 0 to 65535", _port),
        "otlp_grpc_port": ("a port, 0 to 65535", _port),
        "otlp_http_port": ("a port, 0 to 65535", _port),
        "scrape": ("a list of URLs", _texts),
        "tls_cert": ("a PEM file", _text),
        "tls_key": ("a PEM file", _text),
        "tls_client_ca": ("a PEM file", _text),
        "content": ("true or false", _truth),
    },
    "hardware": {
        "accelerator": ("a name that phasewise rules list gpus shows", _text),
        "model": ("a name that phasewise rules list models shows", _text),
        "tensor_parallel": ("a count of devices", _count),
        "weight_dtype": ("a data type such as bf16", _text),
        "kv_dtype": ("a data type such as fp8", _text),
        "quantization": ("a method such as awq or fp8", _text),
    },
    "retention": {
        "seal_after_h": ("hours, at least 1", _at_least_one),
        "raw_days": ("days, above 0", _positive),
        "rollup_months": ("months, above 0", _positive),
        "max_volume_ratio": ("a share, above 0 and up to 1", _ratio),
    },
    "slo": {
        f"{boundary}{metric}": ('a limit such as "2s" or "80ms"', _text)
        for boundary in ("", "engine.", "client.")
        for metric in ("ttft", "tpot", "itl", "e2e", "queue")
    },
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """path: where it was read, None for none; serve: defaults of `serve`; slo: in the form of --slo.

    hardware: settings that hold for every engine whose telemetry does not tell them. scrape_jobs: tables of [[scrape]], checked.
    retention: see collector/retention.py.
    """

    path: Path | None = None
    serve: Mapping[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    slo: str = ""
    scrape_jobs: Sequence[Mapping[str, Any]] = ()
    retention: Mapping[str, float] = field(default_factory=dict)


def places(environment: Mapping[str, str], working: Path) -> Iterator[Path]:
    """Where the file may be, the most specific first."""
    yield working / NAME
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    for folder in (home, *(environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")):
        yield Path(folder) / "phasewise" / NAME


def read_configuration(found: Sequence[Path] | None = None) -> Configuration:
    """The first file that exists; InputError naming file, key and remedy where it is wrong."""
    for path in found if found is not None else places(os.environ, Path.cwd()):
        if path.is_file():
            return _parsed(path)
    return Configuration()


def _parsed(path: Path) -> Configuration:
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(path, "", f"is not TOML: {error}") from None
    except OSError as error:
        raise InputError(path, "", (error.strerror or str(error)).lower()) from None
    jobs = told.pop(JOBS, [])
    read_jobs(path, jobs)
    for section, keys in told.items():
        known = _SECTIONS.get(section)
        if known is None or not isinstance(keys, dict):
            raise InputError(path, section, "is no section", _near(section, [*_SECTIONS, JOBS]))
        for key, value in _flat(keys):
            if key not in known:
                raise InputError(path, f"{section}.{key}", "is unknown", _near(key, known))
            words, fits = known[key]
            if not fits(value):
                raise InputError(path, f"{section}.{key}", f"{value!r} is not right", f"give {words}")
    slo = ",".join(f"{key}:{value}" for key, value in _flat(told.get("slo", {})))
    return Configuration(
        path, told.get("serve", {}), told.get("hardware", {}), slo, tuple(jobs), told.get("retention", {})
    )


def require_known(hardware: Mapping[str, Any], rulebook: Rulebook) -> None:
    """Refuses an accelerator or model that the rules do not hold: the figures that depend on it would silently stay away."""
    for key, find, rules in (
        ("accelerator", rulebook.find_gpu, rulebook.gpus),
        ("model", rulebook.find_model, rulebook.models),
    ):
        name = hardware.get(key)
        if name is not None and find(name) is None:
            remedy = _near(name, rules) + (f"; or {MEASURE_IT}" if key == "accelerator" else "")
            raise InputError(NAME, f"hardware.{key}", f"{name!r} is not in the rules", remedy)


def _flat(keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`client.ttft = "3s"` is a table in TOML, and one key here."""
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
