"""What tests of server-side methods share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.building.config import resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core.store import Store
from fedstill.distill import stage
from fedstill.methods.base import Server, Uplink
from fedstill.train.loop import Loss
from support.runs import SMALL

POOL = {"pool": 0.2, "proxy": "pool"}

SHORT: dict[str, dict[str, Any]] = {
    "feddf": {"server_steps": 3},
    "dafkd": {"batches": 2, "server_batch": 8, "z_dim": 4},
    "fedhyb": {},
    "fedgen": {"generator_steps": 3},
    "fedftg": {"iterations": 1, "server_batch": 4},
    "fedbe": {"server_epochs": 1, "samples": 2},
    "fedmd": {},
    "fedhkd": {},
    "creff": {"match_steps": 2, "retrain_epochs": 5, "features": 4, "draws": 2},
}


def small_setup(method: str, **settings: Any) -> Setup:
    return prepare(resolve({**SMALL, **POOL, "method": method, **settings}))


def fed(setup: Setup, tmp_path: Path, clients: int = 3) -> tuple[Server, list[Uplink]]:
    """A server in round 2, and what some clients answer to what it sends."""
    server = Server(setup.task, setup.federation.sizes, Store(tmp_path / "server"), setup.pool())
    setup.method.start(server)
    server.round = 2
    g = torch.Generator().manual_seed(5)
    wire = setup.method.wire(setup.task)
    ups = []
    for k in range(clients):
        message = {name: torch.rand(part.shape, generator=g).to(part.dtype) for name, part in wire.up.items()}
        message["model"] = server.model + 0.05 * torch.randn(len(server.model), generator=g)
        ups.append(Uplink(k, 10 + k, message))
    return server, ups


def targets_of(monkeypatch: pytest.MonkeyPatch, method: str) -> list[torch.Tensor]:
    """The soft targets that a method's server stage is about to match."""
    seen: list[torch.Tensor] = []

    def noting(targets: torch.Tensor, temperature: float = 1.0) -> Loss:
        seen.append(targets)
        return stage.match_probabilities(targets, temperature)

    monkeypatch.setattr(f"fedstill.methods.{method}.match_probabilities", noting)
    return seen
