"""Flags for trackers. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fedstill.cli.settings import RUNNING

Trackers = Sequence[str]  # those that were asked for, by the names of their flags
_KNOWN = {
    "tensorboard": ("running.tensorboard:TensorBoard", "Also write events for TensorBoard."),
    "mlflow": ("running.trackers:MLflow", "Also track with MLflow: MLFLOW_TRACKING_URI, else files in mlruns/."),
    "wandb": ("running.trackers:WandB", "Also track with Weights & Biases, offline unless WANDB_MODE says otherwise."),
    "trackio": ("running.trackers:Trackio", "Also track with Trackio, on this machine."),
}
_PARAMETER = "trackers"


def with_trackers(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each tracker; its parameter `trackers` names those that are used."""

    @functools.wraps(command)
    def with_flags(**arguments: Any) -> None:
        wanted = [name for name in _KNOWN if arguments.pop(name)]
        command(**arguments, **{_PARAMETER: wanted})

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += list(map(_flag, _KNOWN)) if parameter.name == _PARAMETER else [parameter]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def make(trackers: Trackers) -> list[Any]:
    """The callbacks of some trackers; a library that is not there is named before anything is run."""
    found = []
    for tracker in trackers:
        module, _, name = _KNOWN[tracker][0].partition(":")
        found.append(getattr(importlib.import_module(f"fedstill.{module}"), name)())
    return found


def _flag(name: str) -> inspect.Parameter:
    option = typer.Option(f"--{name}", help=_KNOWN[name][1], rich_help_panel=RUNNING)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=False, annotation=Annotated[bool, option])
