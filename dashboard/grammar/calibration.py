"""The verb `calibrate`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from phasewise.dashboard.grammar.options import json_option
from phasewise.rules.schema import DTYPES

LEAST_S, MOST_S = 0.1, 3600.0


def device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:N")
    return text


def dtypes(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for one in found:
        if one not in DTYPES:
            raise argparse.ArgumentTypeError(
                f"{one!r} is no data type: some of {', '.join(DTYPES)}, with commas between"
            )
    return found


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_S <= value <= MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no such time: {LEAST_S:g} to {MOST_S:g} seconds")
    return value


def identity(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,79}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no id: small letters, digits, points and dashes")
    return text


def calibrate_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=device, metavar="DEVICE", help="cpu, cuda or cuda:N (default: CUDA where there is one)"
    )
    parser.add_argument(
        "--dtypes", type=dtypes, metavar="LIST", help="e.g. bf16,fp8 (default: all that the device may have)"
    )
    parser.add_argument("--seconds", type=seconds, default=20.0, metavar="S", help="about so long (%(default)g)")
    parser.add_argument("--id", type=identity, metavar="NAME", help="of the profile (default: from the device's name)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the profile (default: gpus/ID.toml in PHASEWISE_RULES, else in phasewise-rules)",
    )
    json_option(parser)
