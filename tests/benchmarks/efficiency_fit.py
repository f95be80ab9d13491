"""Fits the efficiency curves of `rules/gpus/*.toml` and `rules/efficiency.toml` to published kernel measurements.

    python tests/benchmarks/efficiency_fit.py            prints coefficients and errors on held-out rows
    python tests/benchmarks/efficiency_fit.py --write    writes them into the rule files
    python tests/benchmarks/efficiency_fit.py --check    compares whole steps with measured ones, fits nothing

Exit code 4 where the tables are not there. Damped Gauss-Newton on log(time), Huber's loss; ratios stay below 1 and lengths above 0 by change of variable. Deterministic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine_line
from efficiency_check import print_checks
from efficiency_tables import VLLM, Curve, Measured, gpu_of, stated_errors, tables
from shared_data import ROOT, shared_root

Floats = npt.NDArray[np.float64]
DATE = "2026-11-29"
HUBER = 0.3
SHARPEST = 12.0
# Products only. Rows are padded to at most a tile of the tensor cores, and compute overlaps with memory. Without these bounds the
# fit in fp8 is 2 % better and says that a product of one row is half compute, which no such kernel does.
PRODUCTS = ("gemm", "expert_gemm")
TILE_ROWS = 64.0
LEAST_SHARP = 2.0
START = {
    "compute_ratio": 0.7, "memory_ratio": 0.7, "sharpness": 2.5, "floor_s": 3e-6, "half_rows": 30.0, "half_columns": 100.0,
    "half_depth": 100.0, "half_work": 3e3, "half_head_bytes": 7e4,
}  # fmt: skip
FREE = {
    "gemm": ("half_rows", "half_columns", "half_depth"),
    "expert_gemm": ("half_rows", "half_columns", "half_depth"),
    "prefill_attention": ("half_rows", "half_work"),
    "decode_attention": ("half_head_bytes",),
    "elementwise": (),
}
AIC = "https://github.com/ai-dynamo/aiconfigurator"
VIDUR = "https://github.com/microsoft/vidur"
STAND_IN = {"a100-sxm-80gb": "h100-sxm", "h200-sxm": "h100-sxm"}  # whose curve fills what was not measured on this one


# --- the fit ---------------------------------------------------------------------------------------------------------


def gauss_newton(residuals: Callable[[Floats], Floats], start: Floats, rounds: int = 80) -> Floats:
    """Least Huber loss of residuals(x), from `start`; stops when a step gains less than 1e-8."""

    def loss(found: Floats) -> float:
        size = np.abs(found)
        return float(np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)).mean())

    at, damping = start.copy(), 1e-2
    here = residuals(at)
    best = loss(here)
    for _ in range(rounds):
        jacobian = np.stack([(residuals(at + 1e-4 * unit) - here) / 1e-4 for unit in np.eye(len(at))], axis=1)
        weight = HUBER / np.maximum(np.abs(here), HUBER)
        normal, gradient = jacobian.T @ (jacobian * weight[:, None]), jacobian.T @ (weight * here)
        gain = 0.0
        for _ in range(10):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient).clip(-1, 1)
            trial = residuals(at + step)
            value = loss(trial)
            if np.isfinite(value) and value < best:
                gain, at, here, best = best - value, at + step, trial, value
                damping = max(damping / 3, 1e-7)
                break
            damping *= 4
        if gain < 1e-8:
            break
    return at


def _into(name: str, value: float, group: str = "") -> float:
    """A coefficient as a number without bounds."""
    if name.endswith("_ratio"):
        return float(np.log(value / (1 - value)))
    if name == "half_rows" and group in PRODUCTS:
        return float(np.log(value / (TILE_ROWS - value)))
    return float(np.log(value - (LEAST_SHARP if group in PRODUCTS else 1.0)) if name == "sharpness" else np.log(value))


def _out(name: str, at: float, group: str = "") -> float:
    """The inverse of `_into`."""
    at = float(np.clip(at, -40, 40))
    if name.endswith("_ratio"):
        return float(1 / (1 + np.exp(-at)))
    if name == "half_rows" and group in PRODUCTS:
        return float(TILE_ROWS / (1 + np.exp(-at)))
    if name == "sharpness":
        return min(SHARPEST, (LEAST_SHARP if group in PRODUCTS else 1.0) + float(np.exp(at)))
    return float(np.exp(at))


def _residuals(rows: Sequence[Measured], curve: Curve, held_out: bool) -> Floats:
    parts = []
    for table in rows:
        here = table.held_out() == held_out
        parts.append(np.log(table.seconds(curve)[here] / table.time_s[here]))
    return np.concatenate(parts)


def fit_operator(rows: Sequence[Measured]) -> dict[str, float]:
    """Coefficients of one operator over one or more accelerators, rounded to four digits; halves too small to matter left out."""
    operator = rows[0].operator.partition(".")[0]
    names = ["compute_ratio", "memory_ratio", "sharpness", "floor_s", *FREE[operator]]
    if operator == "elementwise":
        names = ["memory_ratio", "floor_s", *FREE[operator]]
    fixed = {name: 0.0 for name in START if name.startswith("half")} | {"compute_ratio": 1.0, "sharpness": 1.0}

    def curve(at: Floats) -> SimpleNamespace:
        return SimpleNamespace(
            **(fixed | {name: _out(name, value, operator) for name, value in zip(names, at, strict=True)})
        )

    at = gauss_newton(
        lambda at: _residuals(rows, curve(at), held_out=False),
        np.array([_into(name, START[name], operator) for name in names]),
    )
    found = vars(curve(at))
    return {name: float(f"{value:.4g}") for name, value in found.items() if not name.startswith("half") or value > 0.05}


def fit_all_reduce(rows: Sequence[Measured]) -> dict[str, float]:
    names = ["sharpness"] + [f"{what}.{n}" for what in ("latency_s", "link_ratio") for n in (2, 4, 8)]
    start = [0.8, 5e-6, 5e-6, 6e-6, 0.6, 0.7, 0.8]

    def key(name: str) -> str:
        part = name.partition(".")[0]
        return "exponent" if part == "sharpness" else part  # here it may lie below 1

    def coefficients(at: Floats) -> dict[str, float]:
        return {name: _out(key(name), value) for name, value in zip(names, at, strict=True)}

    at = gauss_newton(
        lambda at: _residuals(rows, collective(coefficients(at)), held_out=False),
        np.array([_into(key(name), value) for name, value in zip(names, start, strict=True)]),
    )
    return {name: float(f"{value:.4g}") for name, value in coefficients(at).items()}


def collective(found: dict[str, float]) -> SimpleNamespace:
    by_count = {what: {n: found[f"{what}.{n}"] for n in (2, 4, 8)} for what in ("latency_s", "link_ratio")}
    return SimpleNamespace(sharpness=found["sharpness"], **by_count)


# --- as a rule file --------------------------------------------------------------------------------------------------


def block(prefix: str, operator: str, rows: Sequence[Measured]) -> str:
    """One operator of the `efficiency` table, fitted to `rows`."""
    if operator == "all_reduce":
        found = fit_all_reduce(rows)
        count, median, p90 = stated_errors(rows, collective(found))
        lines = [f"sharpness = {found['sharpness']:g}"]
        for what in ("latency_s", "link_ratio"):
            values = ", ".join(f"{n} = {found[f'{what}.{n}']:g}" for n in (2, 4, 8))
            lines.append(f"{what} = {{ {values} }}")
    else:
        found = fit_operator(rows)
        full = dict.fromkeys(START, 0.0) | found
        count, median, p90 = stated_errors(rows, SimpleNamespace(**full))
        lines = [f"{name} = {value:g}" for name, value in found.items()]
    lines.append(f"error = {{ rows = {count}, median_ratio = {median:.3f}, p90_ratio = {p90:.3f} }}")
    gated = sum(table.gated for table in rows)
    print(f"  {operator:24s} held out {count:6d}  median {median:6.1%}  p90 {p90:6.1%}  gated {gated}", file=sys.stderr)
    return f"[{prefix}{operator}]\n" + "\n".join(lines) + "\n"


def sources(prefix: str, gpus: Sequence[str], stands_in: Sequence[str]) -> str:
    """Where the rows came from, and which curves are another accelerator's."""
    texts = [
        (
            "Fitted by tests/benchmarks/efficiency_fit.py to operator tables of AIConfigurator, commit 095f58a: "
            + ", ".join(VLLM[gpu] for gpu in gpus),
            AIC,
        ),
        ("elementwise: mlp.csv of Vidur, commit 7d47513", VIDUR),
    ]
    if stands_in:
        texts.append((f"Not measured here, curve of {STAND_IN[gpus[0]]}: {', '.join(stands_in)}", AIC))
    return "\n".join(f'[[{prefix}source]]\ntext = "{text}"\ndate = "{DATE}"\nurl = "{url}"\n' for text, url in texts)


def document(folder: Path, gpus: Sequence[str], prefix: str) -> str:
    """The `efficiency` table of one accelerator, or with several the generic one."""
    print(", ".join(gpus), file=sys.stderr)
    rows = [table for gpu in gpus for table in tables(folder, gpu)]
    operators = dict.fromkeys(table.operator for table in rows)
    missing: list[str] = []
    if len(gpus) == 1 and (other := STAND_IN.get(gpus[0])):
        borrowed = tables(folder, other)
        missing = [t.operator for t in borrowed if t.operator not in operators and _runs(gpus[0], t.operator)]
        rows += [table for table in borrowed if table.operator in missing]
    blocks = [
        block(prefix, operator, [table for table in rows if table.operator == operator])
        for operator in dict.fromkeys(table.operator for table in rows)
    ]
    return "\n".join([*blocks, sources(prefix, gpus, missing)])


def _runs(gpu: str, operator: str) -> bool:
    """Products in fp8 need the hardware; an fp8 KV cache does not."""
    group, _, dtype = operator.partition(".")
    return not (group.endswith("gemm") and dtype not in gpu_of(gpu).peak_flops)


MARK = "\n# Efficiency: written by tests/benchmarks/efficiency_fit.py --write\n"
GENERIC = """# For accelerators whose kernels nobody published by operator: fitted over those that were measured, as shares of each one's
# own peaks. Written by tests/benchmarks/efficiency_fit.py --write
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    folder = shared_root() / "reference"
    if not folder.exists():
        print(f"no shared data at {folder} (set PHASEWISE_SHARED to the folder that holds it)", file=sys.stderr)
        return 4
    print(machine_line(("phasewise", "numpy")), file=sys.stderr)
    if options.check:
        print_checks(folder)
        return 0
    documents = {f"gpus/{gpu}.toml": document(folder, [gpu], "efficiency.") for gpu in VLLM}
    documents["efficiency.toml"] = document(folder, list(VLLM), "")
    for name, text in documents.items():
        path = ROOT / "rules" / name
        if not options.write:
            print(f"# --- {name}\n{text}")
        elif name.startswith("gpus/"):
            path.write_text(path.read_text("utf-8").split(MARK)[0].rstrip("\n") + "\n" + MARK + text, "utf-8")
        else:
            path.write_text(GENERIC + "\n" + text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
