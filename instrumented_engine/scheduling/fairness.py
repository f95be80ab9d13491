"""Who is owed service: a counter of tokens a tenant, and seats that are kept for some.

Order `fair` is the virtual token counter of Sheng et al. 2024 (Fairness in Serving Large Language Models, arXiv 2401.00588),
weighted: the waiting tenant with the least service per weight goes first, and one that comes back from idleness is lifted to the
least of those who wait, so that idle time earns no credit. Two tenants that both always wait never differ by more than about
twice the service of the longest request per weight (its theorem 4.4), whatever the lengths of what they ask.
"""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.instrumented_engine.config import TenantShare
from phasewise.rules.errors import InputError

PROMPT_TOKEN, OUTPUT_TOKEN = 1.0, 2.0  # service of one token, the paper's weights
_ACCOUNTS = 4096  # clients invent tenants: beyond so many, idle ones are forgotten


class Account:
    """One tenant. served: tokens of service over weight. waiting, live: its sequences in the queue and in seats."""

    __slots__ = ("live", "output_cost", "prompt_cost", "reserved", "served", "tenant", "waiting", "weight")

    def __init__(self, tenant: str | None, share: TenantShare) -> None:
        self.tenant = tenant
        self.weight = share.weight
        self.reserved = share.reserved_slots
        self.prompt_cost = PROMPT_TOKEN / share.weight
        self.output_cost = OUTPUT_TOKEN / share.weight
        self.served = 0.0
        self.waiting = 0
        self.live = 0


class Accounts:
    """All tenants seen, those with a share from the start. Raises InputError for shares that cannot be kept."""

    def __init__(self, shares: Mapping[str, TenantShare], slots: int) -> None:
        for tenant, share in shares.items():
            if not share.weight > 0:
                raise InputError(
                    "engine settings", f"tenants.{tenant}.weight", f"{share.weight} is not above 0", "give 1.0"
                )
            if share.reserved_slots < 0:
                raise InputError(
                    "engine settings",
                    f"tenants.{tenant}.reserved_slots",
                    f"{share.reserved_slots} is negative",
                    "0 keeps no seat",
                )
        self.reserved_slots = sum(share.reserved_slots for share in shares.values())
        if self.reserved_slots > slots:
            raise InputError(
                "engine settings",
                "tenants",
                f"{self.reserved_slots} seats are reserved of max_num_seqs {slots}",
                "reserve fewer, or raise max_num_seqs",
            )
        self.unused_reserved_slots = self.reserved_slots
        self.waiting_weight = 0.0  # weights of the tenants that wait
        self.floor = 0.0  # service of the least served tenant that waited when last looked at
        self._shares = shares
        self._default = TenantShare()
        self._accounts: dict[str | None, Account] = {name: Account(name, share) for name, share in shares.items()}

    def of(self, tenant: str | None) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= _ACCOUNTS + len(self._shares):
                self._forget()
            account = self._accounts[tenant] = Account(tenant, self._default)
        return account

    def _forget(self) -> None:
        """Half of the idle tenants, those with the least service: they come back at the floor, where they nearly are."""
        idle = [
            account
            for name, account in self._accounts.items()
            if not account.live and not account.waiting and name not in self._shares
        ]
        idle.sort(key=lambda account: account.served)
        for account in idle[: len(idle) // 2 + 1]:
            del self._accounts[account.tenant]

    def seated(self, account: Account) -> None:
        if account.live < account.reserved:
            self.unused_reserved_slots -= 1
        account.live += 1

    def unseated(self, account: Account) -> None:
        account.live -= 1
        if account.live < account.reserved:
            self.unused_reserved_slots += 1

    def counted(self, account: Account, change: int) -> None:
        """So many more of its sequences wait."""
        before = account.waiting > 0
        account.waiting += change
        self.waiting_weight += account.weight * ((account.waiting > 0) - before)
