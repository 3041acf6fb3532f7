"""Settings with which every method is quick."""

from __future__ import annotations

from typing import Any

from fedstill.methods import registry
from support.runs import SMALL

TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "fraction": 0.1, "rounds": 3}
QUICK: dict[str, dict[str, Any]] = {
    "fedkf": {"width": 2, "z_dim": 3},
    "feddf": {"server_steps": 2},
    "dafkd": {"z_dim": 3, "batches": 1, "server_batch": 8, "server_epochs": 1},
    "fedavg+krum": {"byzantine": 0},
    "fedavg+multi-krum": {"byzantine": 0},
    "fedavg+bulyan": {"byzantine": 0},
    "fedtgp": {"server_epochs": 2},
    "fml": {"shared": "mlp"},
    "fedkd": {"shared": "mlp"},
    "fedftg": {"z_dim": 3, "iterations": 1, "student_steps": 1, "server_batch": 4},
}
QUICKER = QUICK | {"creff": {"features": 4, "match_steps": 2, "retrain_epochs": 2, "draws": 2, "draw_size": 4}}
SHOWS_MORE: dict[str, dict[str, Any]] = {"fedgkd-vote": {"buffer": 2}, "moon": {"buffer": 2}}


def needed(method: str, pool: float = 0.2) -> dict[str, Any]:
    """The data on the server without which the method does not run."""
    needs = registry.make(method).needs()
    settings = {"pool": pool} if needs.server_labels or needs.proxy_data else {}
    return settings | ({"proxy": "pool"} if needs.proxy_data else {})


def quick(name: str) -> dict[str, Any]:
    """A quick run's, with whatever the method says it needs."""
    plain = name.removesuffix("+t1")
    own = QUICK.get(plain, {}) | SHOWS_MORE.get(plain, {})
    return TINY | {"regions": 1} | own | needed(plain, pool=0.1)  # between regions, models cross and nothing else
