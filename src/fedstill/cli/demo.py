"""What `fedstill demo` does: averaging beside distillation, where the clients' data differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.analysis.comparing import plan, run_comparison
from fedstill.analysis.pages import write_page
from fedstill.analysis.tables import percent
from fedstill.building.config import Config, resolve
from fedstill.cli.commands import console, print_table, say
from fedstill.cli.failure import Halted
from fedstill.core.table import Table
from fedstill.report.curves import curves
from fedstill.running import files
from fedstill.studies import presets
from fedstill.studies.comparison import Row
from fedstill.studies.reproduce import number

# How these were chosen: docs/demo.md.
SETTINGS: dict[str, Any] = {
    "data": "fashion-mini",
    "model": "lenet5",
    "partition": "dir_fedkf",
    "alpha": 0.3,
    "clients": 20,
    "participation": 0.2,
    "rounds": 30,
    "epochs": 5,
    "lr": 0.05,
    "seed": 0,
}
METHODS: dict[str, dict[str, Any]] = {  # each with settings of its own
    "fedavg": {},
    "fedgkd": {"gamma": 10.0},
    "fedavg+t1": {},
    "fedkf": {"gamma": 0.2},
}
# Numbers of the table by the names that presets know them by, and what they tell.
COLUMNS = {
    "accuracy": ("final_top1", "of the model on the test images, mean of the last five rounds: larger is better"),
    "AMP": ("AMP", "the same on the clients' own test images, all of them together: larger is better"),
    "FM": ("FM", "variance of the accuracy over the clients: smaller is fairer"),
    "WLP": ("WLP", "accuracy at the client that is served worst: larger is fairer"),
    "roughness": ("roughness", "how far accuracy jumps from one round to the next: smaller is smoother"),
}
ABOUT = """\
Twenty clients hold 4,800 images of clothes, each of them mostly of a few kinds (alpha 0.3); four train in a round.
fedavg averages their models. fedgkd: the mean of the last global models teaches every client. fedavg+t1: the model is
the mean of every client's latest, active or not. fedkf: that mean teaches, on images that a generator makes."""
SEED = """\
One seed, for speed: small differences are chance. Five, with intervals: fedstill compare METHODS --seeds 5.
Alpha, learning rate and gamma were chosen on other seeds, with training images that were held out: docs/demo.md."""


def demo(out: Path, rounds: int | None, *, force: bool) -> None:
    say(ABOUT)
    own = {"rounds": rounds} if rounds else {}

    def configure(method: str, _point: Mapping[str, Any], _seed: int) -> tuple[Config, dict[str, Any]]:
        return resolve({"method": method} | SETTINGS | own, {"hyper": METHODS[method]}), {}

    cells = plan(list(METHODS), configure, [{}], 1, out)
    longest_first = dict(reversed(cells.items()))  # so that no core waits for the last run
    try:
        found = run_comparison(longest_first, list(METHODS), [{}], 1, out, jobs=0, force=force, console=console)
    except KeyboardInterrupt as error:
        raise Halted(error, out, "the same command, without --force" if force else "the same command") from error
    rows = [row for row in found.rows[0] if not row.variant]
    table, verdicts = summary_of(rows)
    print_table(table)
    say("\n".join(f"{name:10} {what}" for name, (_, what) in COLUMNS.items()))
    say("\n".join(["", *verdicts, "", SEED]))
    picture, page = out / files.CURVES, out / "report.html"
    records = {row.method: row.cells[0].records() for row in rows}
    curves(
        records, picture, metrics=["accuracy", "fm"], title="Where the clients' data differ: fashion-mini, alpha 0.3"
    )
    write_page([out], page, "fedstill demo", "fedavg")
    say(f"\npicture: {picture}\npage: {page}\nall of it: {out}")


def summary_of(rows: list[Row]) -> tuple[Table, list[str]]:
    """The table, and in which columns each method is better than the first, in words."""
    table = Table("The same clients, schedule and initial weights for each", ("", *COLUMNS))
    values = {
        row.method: {name: number(row.cells[0], "", known, {}) for name, (known, _) in COLUMNS.items()} for row in rows
    }
    first, *others = values
    for method, found in values.items():
        table.add(method, *(_written(name, value) for name, value in found.items()))
    verdicts = []
    for method in others:
        better: dict[bool, list[str]] = {True: [], False: []}
        for name, (known, _) in COLUMNS.items():
            ours, theirs, larger = values[method][name], values[first][name], presets.METRICS[known][1]
            if ours is not None and theirs is not None and ours != theirs:
                better[(ours > theirs) == larger].append(name)
        parts = [
            f"{word} in {', '.join(names)}"
            for word, names in (("better", better[True]), ("worse", better[False]))
            if names
        ]
        verdicts.append(f"{method} against {first}: {'; '.join(parts) or 'the same'}")
    return table, verdicts


def _written(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if name in ("FM", "roughness") else percent(value)
