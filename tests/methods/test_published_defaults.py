"""The settings that a method has by default are those of its paper."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.methods import registry

DEFAULTS: dict[str, dict[str, Any]] = {
    "dafkd": {"uniform": True, "variant": "full", "private": False, "conditional": False, "z_dim": 100}
    | {"generator_lr": 1e-3, "server_lr": 1e-3, "batches": 40, "server_batch": 32, "server_epochs": 5},
    "fedhyb": {"uniform": False, "a": 1.0, "eta": 1.0, "nu": 1.0, "M": 2, "min_width": 0.8, "rotation": 15.0}
    | {"beta_per_sample": False, "server_epochs": 1, "server_lr": 1e-3, "server_batch": 64, "variant": "full"},
    "feddf": {"uniform": False, "server_lr": 1e-3, "server_batch": 128},
    "fedgen": {"alpha": 10.0, "beta": 10.0, "decay": 0.98, "hidden": 256, "z_dim": 32, "generator_lr": 3e-4}
    | {"generator_decay": 1e-2, "generator_steps": 50, "generator_batch": 32},
    "fedftg": {"iterations": 10, "student_steps": 5, "lambda_cls": 1.0, "lambda_dis": 1.0, "z_dim": 100}
    | {"generator_lr": 0.01, "server_lr": 0.1},
    "fedbe": {"samples": 10, "spread": 0.1, "sharpen": 0.5, "clients_teach": True, "server_epochs": 20}
    | {"server_lr": 1e-3, "server_batch": 128},
    "fedmd": {"weight": 0.1, "average_weights": True},
    "fedhkd": {"lambda_": 0.05, "gamma": 0.05, "T": 0.5, "noise": 0.0},
    "fedavg+ccvr": {"virtual": 200},
    "creff": {"features": 100, "match_steps": 100, "match_lr": 0.1, "retrain_epochs": 300, "retrain_lr": 0.01}
    | {"draws": 10, "draw_size": 32},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_the_published_ones(name: str) -> None:
    """The tables of hyper-parameters; FedGen's are those for MNIST."""
    method = registry.make(name)
    assert {field: getattr(method, field) for field in DEFAULTS[name]} == DEFAULTS[name]
