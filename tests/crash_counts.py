"""How many crashes the tests make, by marker; docs/reliability.md says the same, which a test compares."""

from __future__ import annotations

KILL_ROUNDS = {"slow": 10, "nightly": 50}
RECEIVE_POINTS = {"slow": 20, "nightly": 100}
# Of what the store does; where a piece of work has fewer sync points, all of them.
STORE_POINTS = {
    "slow": {"index": 20, "seal": 4, "expire": 3, "import": 3},
    "nightly": {"index": 100, "seal": 40, "expire": 20, "import": 25},
}


def in_words(marker: str) -> str:
    """As the page says it."""
    store = STORE_POINTS[marker]
    return (
        f"`{marker}`: {KILL_ROUNDS[marker]} rounds of kills and {RECEIVE_POINTS[marker] + sum(store.values())} crash points, "
        f"{RECEIVE_POINTS[marker]} of the receiver and {sum(store.values())} of the store ({store['index']} of indexing, "
        f"{store['seal']} of sealing, {store['expire']} of retention, {store['import']} of an import)"
    )
