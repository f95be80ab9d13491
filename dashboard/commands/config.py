"""`phasewise config show`: what serve, doctor and analyze would be told by file and environment, with secrets as `***`."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from phasewise.dashboard.commands.configuration import read_configuration
from phasewise.rules.secret_text import HIDDEN, without_secrets

# Environment variables that are read, and whether what they hold is a secret.
VARIABLES = {
    "PHASEWISE_DATA": False,
    "PHASEWISE_RULES": False,
    "PHASEWISE_KEEP_CONTENT": False,
    "PHASEWISE_API_KEY": True,
    "PHASEWISE_API_KEY_FILE": False,
    "PHASEWISE_CA_FILE": False,
    "PHASEWISE_CLIENT_CERT": False,
}


def run(options: Namespace) -> int:
    found = read_configuration()
    told: dict[str, Any] = {
        "file": str(found.path) if found.path else None,
        "serve": without_secrets(found.serve),
        "hardware": without_secrets(found.hardware),
        "retention": dict(found.retention),
        "scrape": without_secrets(list(found.scrape_jobs)),
        "slo": found.slo or None,
        "environment": environment(os.environ),
    }
    if options.json:
        print(json.dumps(told, indent=2, default=str))
        return 0
    print(f"file: {told['file'] or 'none found'}")
    for section in ("serve", "hardware", "retention", "environment"):
        values = told[section]
        for name, value in values.items():
            print(f"{section}.{name} = {value}")
    for number, job in enumerate(told["scrape"]):
        for name, value in job.items():
            print(f"scrape[{number}].{name} = {value}")
    if found.slo:
        print(f"slo = {found.slo}")
    return 0


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ours that are set."""
    told = {name: HIDDEN if secret else variables[name] for name, secret in VARIABLES.items() if variables.get(name)}
    return {name: str(without_secrets(value)) for name, value in told.items()}
