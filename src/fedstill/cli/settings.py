"""Flags for the settings of a run, made from `Config`: its names, types, defaults, bounds and descriptions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from fedstill.building.schema import Config, meaning

Settings = dict[str, Any]  # the settings that were given as flags, by name
# Panels of the help.
PARTITION, TRAINING, CHOOSING, RUNNING = "Data partition", "Training", "Choosing a model", "Running"
_PANELS = {
    PARTITION: (
        *("data", "target", "text_column", "label_column", "client_column", "data_dir"),
        *("partition", "alpha", "clients", "regions"),
    ),
    CHOOSING: ("validation", "select", "restore_best", "patience"),
    TRAINING: ("rounds", "participation", "epochs", "batch_size", "lr", "model", "models"),
}
_PARAMETER = "settings"


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings; its parameter `settings` holds those that are used.

    The flags do not check bounds themselves: a value is checked in one place, wherever it comes from.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_flags(**arguments: Any) -> None:
            given = {name: value for name in names if (value := arguments.pop(name)) is not None}
            command(**arguments, **{_PARAMETER: given})

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += [_flag(name) for name in names] if parameter.name == _PARAMETER else [parameter]
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return with_flags

    return decorate


def option(name: str) -> Any:
    """The option of one setting, for `Annotated`."""
    field = Config.model_fields[name]
    panel = next((panel for panel, names in _PANELS.items() if name in names), RUNNING)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    metavar = f"[{'|'.join(choices)}]" if choices else None
    return typer.Option(help=help_text(field), rich_help_panel=panel, show_default=False, metavar=metavar)


def help_text(field: FieldInfo) -> str:
    """What a setting means, with its default and its bounds.

    >>> help_text(Config.model_fields["epochs"])
    'Local epochs a round. \\\\[default: 5; at least 1]'
    """
    return meaning(field).replace("[", r"\[")  # no markup


def _flag(name: str) -> inspect.Parameter:
    annotation = Config.model_fields[name].annotation
    kind: Any = str if get_origin(annotation) in (Literal, list) else annotation  # a list: with commas
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[kind | None, option(name)],
    )
