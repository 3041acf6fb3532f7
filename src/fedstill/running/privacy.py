"""What a run's models tell of a client: over all of its regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.building.topology import Hierarchy
from fedstill.methods.base import Method, Server
from fedstill.methods.dp import DP
from fedstill.methods.dp_sgd import DPSGD
from fedstill.methods.votes import Votes

# Of a record: measured on clients' own samples, exactly. A simulation may; clients elsewhere are not asked for it.
_NOT_COVERED = ("amp", "fm", "wlp", "validation", "metrics", "clients", "names of those left out", "column statistics")
_NOT_SENT = ("train_loss", "local_accuracy")
SPENT = "spent"  # in run.json: the ledgers as they were when the run went back, one after the other
_LEDGERS = (*DP.server_keys, *Votes.server_keys, *DPSGD.server_keys)


def ledgers(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a checkpoint has of each region's ledger, by its number."""
    regions = {number: own["state"] for number, own in checkpoint.get("regions", {}).items()}
    states = regions or {"0": checkpoint.get("state", {})}
    return {number: {name: state[name] for name in _LEDGERS if name in state} for number, state in states.items()}


def promised(hierarchy: Hierarchy, servers: Mapping[int, Server]) -> dict[str, Any] | None:
    """The guarantee so far, for a record; of several regions, that of the one that spent most.

    Each client is in one region, and what follows from the regions' models, such as distilling them, adds nothing.
    """
    found = [
        region.method.guarantee.report(servers[region.number])
        for region in hierarchy.regions
        if region.method.guarantee and servers[region.number].state
    ]
    if not found:
        return None
    worst = max(found, key=lambda report: float(report["epsilon"]))
    own = worst.get("not covered", ())  # of this method
    not_sent = [name for name in _NOT_SENT if name not in own]
    return worst | {"not sent": not_sent, "not covered": [*_NOT_COVERED, *own]}


def protects_clients(method: Method) -> bool:
    """Whether what others learn of a client is bounded: of its samples, and of all that is measured on them."""
    return method.guarantee is not None and method.guarantee.unit == "client"


def affordable(hierarchy: Hierarchy, servers: Mapping[int, Server], rounds: int) -> bool:
    """Whether no region would spend more than it may in so many further rounds."""
    return all(
        region.method.guarantee.affords(servers[region.number], rounds)
        for region in hierarchy.regions
        if region.method.guarantee
    )
