"""fedstill: federated learning on heterogeneous data by knowledge distillation.

>>> import fedstill
>>> result = fedstill.run("fedavg", clients=4, rounds=1, epochs=1, fraction=0.05, engine="inline")
>>> sorted(result.summary)[:2]
['best_accuracy', 'best_amp']
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.aggregate.mean import weighted_mean
    from fedstill.analysis.comparing import Comparison, compare
    from fedstill.analysis.listings import Partition, list_methods, list_presets, list_settings, partition
    from fedstill.analysis.reproducing import Reproduction, reproduce
    from fedstill.analysis.tuned import Tuning
    from fedstill.analysis.tuning import tune
    from fedstill.building.schema import Config
    from fedstill.core.errors import DataError, FedstillError, SettingError
    from fedstill.core.table import Table
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
    from fedstill.distill.stage import match_probabilities, mean_logits
    from fedstill.inference.predictor import Predictor
    from fedstill.methods.base import Method, Part, Server, Uplink, Wire
    from fedstill.methods.fedavg import FedAvg
    from fedstill.methods.kinds import Kind
    from fedstill.methods.modifier import Modifier
    from fedstill.methods.registry import compose
    from fedstill.methods.server_side import Distilling, ServerSide
    from fedstill.metrics.records import EpisodeRecord, RoundRecord, Scores, Summary
    from fedstill.models import Classifier
    from fedstill.running.api import resume, run
    from fedstill.running.callbacks import Callback, CallbackError, RunView
    from fedstill.running.loading import load
    from fedstill.running.monitors import Budget, CSVLog, EarlyStopping, SaveBest
    from fedstill.running.progress import Progress
    from fedstill.running.result import Result
    from fedstill.running.tensorboard import TensorBoard
    from fedstill.running.trackers import MLflow, Tracker, Trackio, WandB
    from fedstill.studies.audit import Audit, audit
    from fedstill.train.client import Client
    from fedstill.train.loop import Objective
    from fedstill.train.losses import kl
    from fedstill.train.task import LocalTraining, Samples, Task

__version__ = "0.1.0"

# Loaded when first used, so that `import fedstill` and `fedstill --help` do not wait for PyTorch.
_HOMES = {
    "fedstill.aggregate.mean": ("weighted_mean",),
    "fedstill.analysis.comparing": ("Comparison", "compare"),
    "fedstill.analysis.tuned": ("Tuning",),
    "fedstill.analysis.tuning": ("tune",),
    "fedstill.analysis.listings": ("Partition", "list_methods", "list_presets", "list_settings", "partition"),
    "fedstill.analysis.reproducing": ("Reproduction", "reproduce"),
    "fedstill.building.schema": ("Config",),
    "fedstill.core.errors": ("DataError", "FedstillError", "SettingError"),
    "fedstill.core.table": ("Table",),
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
    "fedstill.distill.stage": ("match_probabilities", "mean_logits"),
    "fedstill.inference.predictor": ("Predictor",),
    "fedstill.running.loading": ("load",),
    "fedstill.methods.base": ("Method", "Part", "Server", "Uplink", "Wire"),
    "fedstill.methods.fedavg": ("FedAvg",),
    "fedstill.methods.kinds": ("Kind",),
    "fedstill.methods.modifier": ("Modifier",),
    "fedstill.methods.registry": ("compose",),
    "fedstill.methods.server_side": ("Distilling", "ServerSide"),
    "fedstill.metrics.records": ("EpisodeRecord", "RoundRecord", "Scores", "Summary"),
    "fedstill.models": ("Classifier",),
    "fedstill.running.api": ("resume", "run"),
    "fedstill.running.callbacks": ("Callback", "CallbackError", "RunView"),
    "fedstill.running.monitors": ("Budget", "CSVLog", "EarlyStopping", "SaveBest"),
    "fedstill.running.progress": ("Progress",),
    "fedstill.running.result": ("Result",),
    "fedstill.running.tensorboard": ("TensorBoard",),
    "fedstill.running.trackers": ("MLflow", "Tracker", "Trackio", "WandB"),
    "fedstill.studies.audit": ("Audit", "audit"),
    "fedstill.train.client": ("Client",),
    "fedstill.train.loop": ("Objective",),
    "fedstill.train.losses": ("kl",),
    "fedstill.train.task": ("LocalTraining", "Samples", "Task"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "Audit",
    "Budget",
    "CSVLog",
    "Callback",
    "CallbackError",
    "Classifier",
    "Client",
    "Comparison",
    "Config",
    "DataError",
    "Dataset",
    "Distilling",
    "EarlyStopping",
    "EpisodeRecord",
    "FedAvg",
    "Federation",
    "FedstillError",
    "Kind",
    "LocalTraining",
    "MLflow",
    "Method",
    "Modifier",
    "Objective",
    "Part",
    "Partition",
    "Predictor",
    "Progress",
    "Reproduction",
    "Result",
    "RoundRecord",
    "RunView",
    "Samples",
    "SaveBest",
    "Scores",
    "Server",
    "ServerSide",
    "SettingError",
    "Split",
    "Summary",
    "Table",
    "TableSettings",
    "Task",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "Tuning",
    "Uplink",
    "WandB",
    "Wire",
    "audit",
    "compare",
    "compose",
    "federate",
    "from_arrays",
    "from_clients",
    "from_frame",
    "from_huggingface",
    "from_torch",
    "kl",
    "list_methods",
    "list_presets",
    "list_settings",
    "load",
    "load_dataset",
    "match_probabilities",
    "mean_logits",
    "partition",
    "reproduce",
    "resume",
    "run",
    "tune",
    "weighted_mean",
]


if not TYPE_CHECKING:  # type checkers see the imports above, and a name that is not among them

    def __getattr__(name: str) -> Any:
        if name == "methods":  # a package; called, it lists them
            return importlib.import_module("fedstill.methods")
        if name not in _HOME:
            listed = f"; fedstill.list_{name}() lists them" if f"list_{name}" in _HOME else ""
            raise AttributeError(
                f"module 'fedstill' has no attribute {name!r}{listed}", name=name, obj=sys.modules[__name__]
            )
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
