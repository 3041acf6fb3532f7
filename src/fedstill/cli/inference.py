"""`fedstill predict`, `evaluate` and `export`: what a trained model is for. Light at the top, as `--help` reads it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstill.cli.consent import TrustCode
from fedstill.core.errors import SettingError

if TYPE_CHECKING:
    from fedstill.inference import Predictor
    from fedstill.inference.inputs import RawInputs

WHICH = "Which model"
_MOST_COLUMNS = 30  # classes of a confusion table that a terminal can show

Directory = Annotated[Path, typer.Argument(help="A run directory, a site's folder, or a model.safetensors alone.")]
Data = Annotated[
    Path,
    typer.Option(
        help="A folder of images (or of a folder for each class), an image, an .npz with x; of texts or rows of "
        "a table a .csv, .tsv, .jsonl or .parquet; or the name of a dataset of images, for its test images."
    ),
]
TextColumn = Annotated[
    str, typer.Option(help=r"Of texts: the column that holds them. \[as in training]", show_default=False)
]
Which = Annotated[
    str | None, typer.Option(help="Another model of the run, such as 'without T1'.", rich_help_panel=WHICH)
]
Client = Annotated[
    str | None,
    typer.Option(help="The model that this client, by number or name, keeps for itself.", rich_help_panel=WHICH),
]
Model = Annotated[
    str | None, typer.Option(help="file.py:function, where the network is one of your own.", rich_help_panel=WHICH)
]


def predict(
    directory: Directory,
    data: Data,
    out: Annotated[Path, typer.Option(help="The table: a row for each input.")] = Path("predictions.csv"),
    text_column: TextColumn = "",
    which: Which = None,
    client: Client = None,
    model: Model = None,
    trust_code: TrustCode = False,
) -> None:
    """Predict classes of new inputs with a trained model.

    \b
    fedstill predict runs/fedavg-… --data ./scans --out predictions.csv
    fedstill predict site-north --data patients.csv

    The table has the file (or row, from 1), the predicted class, and the probability of each class.
    """
    from fedstill.cli import commands
    from fedstill.core.files import write_atomic
    from fedstill.inference.inputs import read_inputs

    predictor = _loaded(directory, which, client, model)
    inputs = read_inputs(data, predictor.description, text_column=text_column)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([inputs.unit, "predicted", *(f"p_{name}" for name in predictor.classes)])
    for start, probabilities in _predicted(predictor, inputs, "predicting"):
        for name, row in zip(inputs.names[start:], probabilities, strict=False):
            table.writerow([name, predictor.classes[row.argmax()], *(f"{p:.6g}" for p in row)])
    write_atomic(out, text.getvalue())
    commands.say(f"{len(inputs):,} predictions: {out}")


def evaluate(
    directory: Directory,
    data: Data,
    label_column: Annotated[
        str,
        typer.Option(
            "--label-column",
            "--target",
            help=r"Of texts and tables: the column with the true class. \[as in training]",
            show_default=False,
        ),
    ] = "",
    text_column: TextColumn = "",
    metrics: Annotated[str, typer.Option(help="Further metrics: auroc,ece or file.py:function.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    which: Which = None,
    client: Client = None,
    model: Model = None,
    trust_code: TrustCode = False,
) -> None:
    """Test a trained model on labelled inputs: accuracy, recall of each class, confusion.

    \b
    fedstill evaluate runs/fedavg-… --data ./labelled-scans
    fedstill evaluate runs/fedavg-… --data patients.csv --metrics auroc,ece
    fedstill evaluate site-north --data patients.csv --target outcome --json

    Labels are the folders of images, y of an .npz, or a column. Of data with a test part (a folder test, x_test, the
    split_column of training), that is used.
    """
    import numpy as np

    from fedstill.inference.evaluation import Evaluation
    from fedstill.inference.inputs import read_inputs
    from fedstill.metrics.scores import find

    predictor = _loaded(directory, which, client, model)
    chosen = find(list(filter(None, metrics.split(","))), (), len(predictor.classes))
    inputs = read_inputs(data, predictor.description, text_column=text_column, label_column=label_column, tests=True)
    if inputs.labels is None:
        column = label_column or predictor.description.label_column or "label"
        rows = "no y" if data.suffix == ".npz" else f"no column {column!r}; --label-column names it"
        hint = rows if inputs.unit == "row" else "no class folders"
        raise SettingError(f"{data}: there are no labels to compare with ({hint}); 'fedstill predict' needs none")
    parts = [rows for _, rows in _predicted(predictor, inputs, "evaluating", quiet=as_json)]
    result = Evaluation.of(inputs.labels, np.concatenate(parts), predictor.classes, chosen)
    if not inputs.held_out and _trained_on(directory, data):
        typer.echo("the run trained on most of these; summary.json has how it did on those it held out", err=True)
    if as_json:
        print(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    else:
        _show(result)


def export(
    directory: Directory,
    format: Annotated[str, typer.Option("--format", help="onnx, or torch: a .pt2 for torch.export.load.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help=r"The file. \[model.onnx or model.pt2]", show_default=False)] = None,
    which: Which = None,
    client: Client = None,
    model: Model = None,
    trust_code: TrustCode = False,
) -> None:
    """Write a trained model for other programs: batches of any size in, probabilities out, preprocessing inside.

    \b
    fedstill export runs/fedavg-… --format onnx --out model.onnx      (pip install 'fedstill\\[export]')
    fedstill export runs/fedavg-… --format torch --out model.pt2

    Inputs are images as uint8 (N, C, H, W) at the model's size, rows as float64 (a category by its number, NaN where a
    value is missing), texts as token numbers; classes and all of model.json are in the file's metadata.
    """
    from fedstill.cli import commands
    from fedstill.inference.export import SUFFIX, check_format
    from fedstill.inference.export import export as write

    check_format(format, out)
    path = out or Path(f"model{SUFFIX[format]}")
    predictor = _loaded(directory, which, client, model)
    write(predictor, path, format)
    commands.say(f"model: {path}, {predictor}")


def _loaded(directory: Path, which: str | None, client: str | None, model: str | None) -> Predictor:
    from fedstill.running.loading import load

    number = int(client) if client is not None and client.isdecimal() else client
    return load(directory, which=which, client=number, model=model)


def _trained_on(directory: Path, data: Path) -> bool:
    """Whether these are the data that the run itself trained on; a server's only test."""
    from fedstill.building.config import read_toml
    from fedstill.core.files import home_path
    from fedstill.running import files

    config = directory / files.CONFIG
    if not config.is_file() or (directory / files.SERVED).is_file():
        return False
    return home_path(str(read_toml(config).get("data", ""))).resolve() == data.resolve()


def _predicted(predictor: Predictor, inputs: RawInputs, what: str, *, quiet: bool = False) -> Any:
    """Probabilities, part by part, and the number of the first input of each."""
    from rich.progress import track

    from fedstill.cli import commands
    from fedstill.train.evaluate import evaluation_bounds

    bounds = evaluation_bounds(len(inputs))
    shown = not quiet and commands.console.is_terminal
    for start, stop in track(bounds, what, console=commands.console, transient=True, disable=not shown):
        yield start, predictor.predict_proba(inputs.part(start, stop))


def _show(result: Any) -> None:
    from rich.table import Table

    from fedstill.analysis.tables import percent
    from fedstill.cli import commands
    from fedstill.metrics.shown import title

    shares = {"accuracy": result.accuracy, "balanced_accuracy": result.metrics["balanced_accuracy"]}
    found = [f"{title(name)} {percent(value)}" for name, value in shares.items()]
    for name, value in result.metrics.items():
        if name not in shares:
            reason = f" ({result.reasons[name]})" if name in result.reasons else ""
            found.append(f"{title(name)} " + (f"–{reason}" if math.isnan(value) else f"{value:.3f}"))
    commands.say(f"{result.samples:,} samples: {', '.join(found)}")
    shown = Table(title="Recall, and what each class was taken for")
    for column in ("true class", "samples", "recall"):
        shown.add_column(column, justify="left" if column == "true class" else "right", no_wrap=True)
    wide = len(result.classes) <= _MOST_COLUMNS
    for name in result.classes if wide else ():
        shown.add_column(name, justify="right", overflow="fold")
    for (name, recall), row in zip(result.recall.items(), result.confusion, strict=True):
        counts = [str(count) if count else "·" for count in row] if wide else []
        shown.add_row(name, str(row.sum()), "–" if math.isnan(recall) else percent(recall), *counts)
    commands.console.print(shown)
    if not wide:
        commands.say(f"the confusion of {len(result.classes)} classes is too wide to show; --json has it")
