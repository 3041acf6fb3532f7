"""A run's numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import SettingError
from fedstill.core.files import naming
from fedstill.metrics.records import RoundRecord, Summary, scalars
from fedstill.running import files
from fedstill.running.callbacks import Callback, RunView


class TensorBoard(Callback):
    """Write every number of a round's record as a scalar, by default to tensorboard/ in the run directory."""

    def __init__(self, path: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError("TensorBoard needs a package: pip install 'fedstill[tensorboard]'") from error
        self._make: Any = SummaryWriter
        self.given = None if path is None else Path(path)
        self._folder = Path(files.TENSORBOARD)
        self._writer: Any = None

    def on_run_start(self, run: RunView) -> None:
        self._folder = self.given or run.path / files.TENSORBOARD
        # Of a run that goes on, what was written after its checkpoint does not count.
        with naming(self._folder):
            self._writer = self._make(str(self._folder), purge_step=run.round + 1)
            self._writer.add_text("config", f"```toml\n{run.config.toml()}```", run.round)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        with naming(self._folder):
            for name, number in scalars(by_class(record, run.federation.dataset.classes)):
                self._writer.add_scalar(name, number, record["round"])

    def on_run_end(self, run: RunView, summary: Summary) -> None:
        self._close()

    def on_run_failed(self, run: RunView, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            with naming(self._folder):
                self._writer.close()


def by_class(record: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """A record whose numbers of each class have the names of the classes, also inside others.

    >>> by_class({"loss": 0.5, "also": {"mean": {"per_class": [0.1, 0.2]}}}, ("cat", "dog"))
    {'loss': 0.5, 'also': {'mean': {'per_class': {'cat': 0.1, 'dog': 0.2}}}}
    """
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found[name] = by_class(value, classes)
        elif name == "per_class" and isinstance(value, list) and len(value) == len(classes):
            found[name] = dict(zip(classes, value, strict=True))
        else:
            found[name] = value
    return found
