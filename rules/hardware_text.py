"""Writing an accelerator as the TOML that `rules/hardware_file.py` reads; fitted efficiency curves are not written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from phasewise.rules.hardware_file import NUMBERS, read_gpu
from phasewise.rules.measured import Measured, Rate
from phasewise.rules.schema import Gpu, Source
from phasewise.rules.toml_table import TomlTable


def gpu_text(gpu: Gpu) -> str:
    """The whole file. What it says is read back first, so that no file is written that stops the next start."""
    assert gpu.efficiency is None
    lines = [f"name = {_text(gpu.name)}"]
    if gpu.aliases:
        lines.append(f"aliases = {_texts(gpu.aliases)}")
    lines.append(f"kind = {_text(gpu.kind)}")
    lines += [f"{name} = {_number(value)}" for name in NUMBERS if (value := getattr(gpu, name)) is not None]
    lines += [f"{name} = {_text(value)}" for name in ("sparse_note", "note") if (value := getattr(gpu, name))]
    for part in ("peak_flops", "achieved_flops"):
        values: Mapping[str, float] = getattr(gpu, part)
        if values:
            lines += ["", f"[{part}]", *(f"{dtype} = {_number(value)}" for dtype, value in values.items())]
    if gpu.measured is not None:
        lines += ["", *_measured(gpu.measured)]
    lines += ["", "[sources]", *(f"{_key(name)} = {_source(source)}" for name, source in gpu.sources.items())]
    text = "\n".join(lines) + "\n"
    assert read_gpu(gpu.id, TomlTable.parse(gpu.id, text)) == gpu
    return text


def _measured(told: Measured) -> Iterator[str]:
    yield "[measured]"
    yield f"date = {told.date}"
    yield f"device = {_text(told.device)}"
    if told.threads is not None:
        yield f"threads = {told.threads}"
    if told.notes:
        yield f"notes = {_texts(told.notes)}"
    versions = ", ".join(f"{_key(name)} = {_text(version)}" for name, version in told.versions.items())
    yield f"versions = {{ {versions} }}"
    for kind, rates in (("product", told.products), ("stream", told.streams)):
        if not rates:
            yield f"{kind} = {{}}"
    for kind, rates in (("product", told.products), ("stream", told.streams)):
        for name, rate in rates.items():
            yield ""
            yield f"[measured.{kind}.{name}]"
            yield from _rate(rate)


def _rate(rate: Rate) -> Iterator[str]:
    for name in ("median", "p10", "p90", "least", "most"):
        yield f"{name} = {_number(getattr(rate, name))}"
    yield f"repeats = {rate.repeats}"
    yield f"shape = {_text(rate.shape)}"


def _source(source: Source) -> str:
    url = "" if source.url is None else f", url = {_text(source.url)}"
    return f"{{ text = {_text(source.text)}, date = {_text(source.date)}{url} }}"


def _number(value: float) -> str:
    """Six digits where they are all there is, else every one: what is read back is what was written."""
    short = f"{value:.6g}"
    return short if float(short) == value else repr(float(value))


def _text(value: str) -> str:
    """A basic string of TOML, whose escapes are those of JSON, but for pairs of surrogates; DEL must be one."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(values: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _text(name)
