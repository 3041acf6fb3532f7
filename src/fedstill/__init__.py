"""fedstill: federated learning on heterogeneous data by knowledge distillation.

>>> import fedstill
>>> result = fedstill.run("fedavg", clients=4, rounds=1, epochs=1, fraction=0.05, engine="inline")
>>> sorted(result.summary)[:2]
['best_accuracy', 'best_amp']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.core.errors import DataError, FedstillError, SettingError
    from fedstill.data import (
        Dataset,
        Split,
        TableSettings,
        from_arrays,
        from_frame,
        from_huggingface,
        from_torch,
        load_dataset,
    )
    from fedstill.data.federation import Federation, federate, from_clients
    from fedstill.inference.predictor import Predictor
    from fedstill.methods.base import Part, Server, Uplink, Wire
    from fedstill.methods.fedavg import FedAvg
    from fedstill.models import Classifier
    from fedstill.running.api import Result, resume, run
    from fedstill.running.loading import load
    from fedstill.train.client import Client
    from fedstill.train.loop import Objective
    from fedstill.train.losses import kl

__version__ = "0.1.0"

# Loaded when first used, so that `import fedstill` and `fedstill --help` do not wait for PyTorch.
_HOMES = {
    "fedstill.core.errors": ("DataError", "FedstillError", "SettingError"),
    "fedstill.data": (
        "Dataset",
        "Split",
        "TableSettings",
        "from_arrays",
        "from_frame",
        "from_huggingface",
        "from_torch",
        "load_dataset",
    ),
    "fedstill.data.federation": ("Federation", "federate", "from_clients"),
    "fedstill.inference.predictor": ("Predictor",),
    "fedstill.running.api": ("Result", "resume", "run"),
    "fedstill.running.loading": ("load",),
    "fedstill.methods.base": ("Part", "Server", "Uplink", "Wire"),
    "fedstill.methods.fedavg": ("FedAvg",),
    "fedstill.models": ("Classifier",),
    "fedstill.train.client": ("Client",),
    "fedstill.train.losses": ("kl",),
    "fedstill.train.loop": ("Objective",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "Classifier",
    "Client",
    "DataError",
    "Dataset",
    "FedAvg",
    "Federation",
    "FedstillError",
    "Objective",
    "Part",
    "Predictor",
    "Result",
    "Server",
    "SettingError",
    "Split",
    "TableSettings",
    "Uplink",
    "Wire",
    "federate",
    "from_arrays",
    "from_clients",
    "from_frame",
    "from_huggingface",
    "from_torch",
    "kl",
    "load",
    "load_dataset",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedstill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
