"""The verb `engine`, with what the instrumented engine's server can be told."""

from __future__ import annotations

import argparse

from phasewise.dashboard.grammar.options import (
    count,
    json_option,
    port,
    seed,
    source_options,
    url,
)


def engine_verb(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="serve|simulate|truth")
    text = "start the OpenAI-compatible server of the instrumented engine"
    _engine_serve(actions.add_parser("serve", help=text, description=f"{text[0].upper()}{text[1:]}."))
    for name, text in (
        ("simulate", "run a scenario on a virtual clock and store what the engine would have sent"),
        ("truth", "what truly bounds the requests of a scenario, by taking each resource away"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("scenario", metavar="SCENARIO", help="a scenario family; list names them all")
        action.add_argument("--seed", type=seed, default=0, metavar="N", help="draws another one (%(default)s)")
        action.add_argument(
            "--requests", type=count, default=1000, metavar="N", help="how many requests to run (%(default)s)"
        )
        if name == "simulate":
            source_options(action)
        json_option(action)


def _engine_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        choices=("auto", "torch", "simulated"),
        default="auto",
        help="what computes: auto takes torch where the extra 'engine' is installed (%(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="torch: smollm2-135m, a folder of safetensors or a GGUF file; simulated: a name of rules list models",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="accelerator to simulate: a name of rules list gpus (default: h100-sxm)"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=port, default=8000, metavar="N", help="OpenAI API and /metrics (%(default)s; 0: any free port)"
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="listen beyond this machine: whoever reaches the port can use it"
    )
    parser.add_argument(
        "--otlp-endpoint",
        type=url,
        metavar="URL",
        help="where spans go: OTLP over gRPC, or over HTTP where it ends in /v1/traces or at port 4318, e.g. http://localhost:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere)",
    )
    parser.add_argument("--max-num-seqs", type=count, metavar="N", help="slots: sequences that run at once")
    parser.add_argument("--step-token-budget", type=count, metavar="N", help="tokens of one step, prompts and decode")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting of scheduler, memory and server (docs/cli.md lists them); may be repeated",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the simulated noise (%(default)s)")
