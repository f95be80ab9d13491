"""`phasewise config show`: what serve, doctor and analyze would be told by file and environment, with secrets as `***`."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping

from phasewise.dashboard.commands.configuration import read_configuration
from phasewise.rules.secret_text import HIDDEN, without_secrets

# Environment variables that are read, and whether what they hold is a secret.
VARIABLES = {
    "PHASEWISE_DATA": False,
    "PHASEWISE_KEEP_CONTENT": False,
    "PHASEWISE_API_KEY": True,
    "PHASEWISE_API_KEY_FILE": False,
    "PHASEWISE_CA_FILE": False,
    "PHASEWISE_CLIENT_CERT": False,
}


def run(options: Namespace) -> int:
    found = read_configuration()
    told = {
        "file": str(found.path) if found.path else None,
        "serve": without_secrets(found.serve),
        "hardware": without_secrets(found.hardware),
        "slo": found.slo or None,
        "environment": environment(os.environ),
    }
    if options.json:
        print(json.dumps(told, indent=2, default=str))
        return 0
    print(f"file: {told['file'] or 'none found'}")
    for section in ("serve", "hardware", "environment"):
        values = told[section]
        assert isinstance(values, Mapping)
        for name, value in values.items():
            print(f"{section}.{name} = {value}")
    if found.slo:
        print(f"slo = {found.slo}")
    return 0


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ours that are set."""
    told = {name: HIDDEN if secret else variables[name] for name, secret in VARIABLES.items() if variables.get(name)}
    return {name: str(without_secrets(value)) for name, value in told.items()}
