"""A run's numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.metrics.records import RoundRecord, scalars
from fedstill.running import files
from fedstill.running.callbacks import RunView
from fedstill.running.trackers import Tracker, by_class


class TensorBoard(Tracker):
    """Write every number of a round's record as a scalar, by default to tensorboard/ in the run directory."""

    needs = ("torch.utils.tensorboard", "tensorboard")

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.given = None if path is None else Path(path)
        self._writer: Any = None

    def begin(self, run: RunView, settings: Mapping[str, Any]) -> None:
        folder = self.given or run.path / files.TENSORBOARD
        # Of a run that goes on, what was written after its checkpoint does not count.
        self._writer = self.library.SummaryWriter(str(folder), purge_step=run.round + 1)
        self._writer.add_text("config", f"```toml\n{run.config.toml()}```", run.round)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        numbers = dict(scalars(by_class(record, run.federation.dataset.classes)))
        self._safely(self.write, run, record["round"], numbers)

    def write(self, run: RunView, round_: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, round_)

    def end(self, run: RunView, artefacts: Sequence[Path], *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
