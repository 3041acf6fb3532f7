"""What a run came to, to be read, drawn and written about."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedstill.building.config import Config
from fedstill.core.errors import SettingError
from fedstill.core.files import write_atomic
from fedstill.core.table import frame, from_columns
from fedstill.inference.predictor import Predictor
from fedstill.metrics.records import RoundRecord, Summary, scalars, value_of

_SHOWN = {"best_accuracy": "best", "final_accuracy": "final", "final_amp": "AMP", "final_wlp": "WLP"}


@dataclass(frozen=True, repr=False)
class Result:
    """What a run came to."""

    summary: Summary  # as in summary.json
    records: list[RoundRecord]  # as in metrics.jsonl
    model: nn.Module  # the trained network: yours, if you brought one; untrained if the method has no global model
    path: Path | None  # the run directory, if it was kept
    config: Config = field(default_factory=Config)  # every setting
    client_columns: Mapping[str, Any] = field(default_factory=dict)  # as in clients.csv, an array each
    _predictor: Predictor | None = None

    @property
    def predictor(self) -> Predictor:
        """The trained model with its preprocessing, as `fedstill.load` gives it."""
        if self._predictor is None:
            raise SettingError(
                f"{self.summary['method']} has no global model, every client keeps its own: run it with out=DIR, and "
                "fedstill.load(DIR, client=0) gives that of a client"
            )
        return self._predictor

    def predict(self, raw: Any) -> npt.NDArray[np.str_]:
        """The class of each raw input, such as an image or a row of a table."""
        return self.predictor.predict(raw)

    def predict_proba(self, raw: Any) -> npt.NDArray[np.float64]:
        """The probability of each class for each raw input, (N, classes)."""
        return self.predictor.predict_proba(raw)

    def __repr__(self) -> str:
        s, numbers = self.summary, [f"{k} {100 * v:.2f} %" for k, v in self._scores().items()]
        stopped = f", stopped by {s['stopped_by']}" if "stopped_by" in s else ""
        where = f", {self.path}" if self.path else ""
        what = f"{s['method']}, seed {s['seed']}: {s['rounds']} rounds{stopped}"
        return f"<fedstill.Result {what}, {', '.join(numbers)}{where}>"

    def _repr_html_(self) -> str:
        cells = {"method": self.summary["method"], "rounds": str(self.summary["rounds"])}
        cells |= {name: f"{100 * value:.2f} %" for name, value in self._scores().items()}
        head = "".join(f"<th>{escape(name)}</th>" for name in cells)
        row = "".join(f"<td>{escape(text)}</td>" for text in cells.values())
        return f"<table><tr>{head}</tr><tr>{row}</tr></table>"

    def _scores(self) -> dict[str, float]:
        found = {shown: value_of(self.summary, name) for name, shown in _SHOWN.items()}
        return {name: value for name, value in found.items() if value is not None}

    def frame(self) -> Any:
        """The numbers of every round, a row each: a pandas DataFrame, or without pandas a dict of NumPy arrays.

        Names of numbers inside others are joined by dots, as in "also.without T1.accuracy".
        """
        return frame([{"round": record["round"], **dict(scalars(record, "."))} for record in self.records])

    def clients(self) -> Any:
        """Each client's samples and its accuracy under the final model, as `frame` gives the rounds."""
        return from_columns(self.client_columns)

    def plot(self, *metrics: str, path: str | Path | None = None, title: str = "") -> Any:
        """Draw metrics by round, accuracy and FM if none is named: a matplotlib Figure, saved if a path is given."""
        from fedstill.report.curves import curves

        names = metrics or ("accuracy", "fm")
        for name in names:
            if all(value_of(record, name) is None for record in self.records):
                raise SettingError(f"plot: no round has {name!r}; frame() shows the names of all numbers")
        return curves(
            {self.summary["method"]: self.records}, Path(path) if path else io.BytesIO(), metrics=names, title=title
        )

    def report(self, path: str | Path = "report.html", title: str = "") -> Path:
        """Write a page about the run: results, figures, settings. `fedstill report` writes one about several."""
        from fedstill.report.charts import Chart, client_data, curve_data
        from fedstill.report.page import page
        from fedstill.report.runs import Group, RunData, flat

        columns = (self.client_columns[name].tolist() for name in ("test_samples", "accuracy", "client"))
        rows = [row for row in zip(*columns, strict=True) if not math.isnan(row[1])]
        tested, names = [(samples, accuracy) for samples, accuracy, _ in rows], [str(client) for *_, client in rows]
        place, settings = self.path or Path("not kept"), flat(self.config.model_dump())
        run = RunData(place, settings, self.records, self.summary, tested, self.config.toml(), names)
        name = self.summary["method"]
        groups = [Group(name, (run,))]
        charts = [Chart("curves", "Numbers by round", curve_data(groups))]
        if tested:
            caption = "Each client's accuracy under the final model, from the worst served to the best"
            charts.append(Chart("clients", caption, client_data({name: [tested]})))
        write_atomic(path, page(groups, charts, title=title or f"{name}: fedstill report"))
        return Path(path)
