"""What can be said after `phasewise db`."""

from __future__ import annotations

import argparse
from pathlib import Path


def db_actions(parser: argparse.ArgumentParser) -> tuple[argparse.ArgumentParser, ...]:
    """Adds the actions; each of them still takes the data directory."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="backup|restore|check|purge")
    backup = actions.add_parser("backup", help="copy everything, as it is after one commit, while a server runs or not")
    backup.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for it")
    restore = actions.add_parser("restore", help="put a backup into an empty data directory, every file checked")
    restore.add_argument("backup", type=Path, metavar="FOLDER", help="what db backup wrote")
    check = actions.add_parser("check", help="read every byte and name what is damaged; exit 1 where anything is")
    purge = actions.add_parser("purge", help="delete requests with their whole traces until no byte of them is left")
    purge.add_argument(
        "--where", action="append", default=[], metavar="KEY:OP:VALUE", help="which requests; repeated, all must hold"
    )
    purge.add_argument("--tenant", default="", metavar="NAME", help="those of a tenant")
    purge.add_argument("--before", metavar="T", help="those that finished before; alone, everything of that time")
    return backup, restore, check, purge
