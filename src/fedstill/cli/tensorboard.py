"""A run's numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.building.setup import Setup
from fedstill.core.errors import SettingError
from fedstill.core.files import naming
from fedstill.metrics.records import RoundRecord
from fedstill.running import files
from fedstill.running.loop import Listener


class TensorBoard(Listener):
    """Writes every number of a round's record as a scalar, and passes on to another listener what it hears."""

    def __init__(self, path: Path, then: Listener) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError("--tensorboard needs a package: pip install 'fedstill[tensorboard]'") from error
        self._make: Any = SummaryWriter
        self._folder, self._then = path / files.TENSORBOARD, then
        self._writer: Any = None
        self._classes: Sequence[str] = ()

    def started(self, setup: Setup, done: int) -> None:
        self._classes = setup.federation.dataset.classes
        # Of a run that goes on, what was written after its checkpoint does not count.
        with naming(self._folder):
            self._writer = self._make(str(self._folder), purge_step=done + 1)
            self._writer.add_text("config", f"```toml\n{setup.config.toml()}```", done)
        self._then.started(setup, done)

    def round_started(self, round_: int, clients: int) -> None:
        self._then.round_started(round_, clients)

    def client_done(self) -> None:
        self._then.client_done()

    def round_failed(self, text: str) -> None:
        self._then.round_failed(text)

    def round_done(self, record: RoundRecord) -> None:
        with naming(self._folder):
            for name, number in scalars(record, classes=self._classes):
                self._writer.add_scalar(name, number, record["round"])
        self._then.round_done(record)

    def ended(self) -> None:
        if self._writer is not None:
            with naming(self._folder):
                self._writer.close()
        self._then.ended()


def scalars(record: Mapping[str, Any], before: str = "", *, classes: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, those inside others and of each class too; matrices are left out.

    >>> record = {"round": 1, "loss": 0.5, "fm": None, "per_class": [0.1, 0.2], "also": {"mean": {"loss": 1.0}}}
    >>> dict(scalars(record, classes=("cat", "dog")))
    {'loss': 0.5, 'per_class/cat': 0.1, 'per_class/dog': 0.2, 'also/mean/loss': 1.0}
    """
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{before}{name}/", classes=classes)
        elif isinstance(value, list):
            names = classes if name == "per_class" and len(classes) == len(value) else list(map(str, range(len(value))))
            named = {each: v for each, v in zip(names, value, strict=True) if isinstance(v, float)}
            yield from scalars(named, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "round":
            yield f"{before}{name}", float(value)
