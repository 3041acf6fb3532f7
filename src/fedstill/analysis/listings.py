"""What there is: methods, settings, presets; and a data partition. As tables, from Python and for the command line."""

from __future__ import annotations

import inspect
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from fedstill.building.config import Config, resolve
from fedstill.building.data import dataset_in, divide, load_data
from fedstill.building.keywords import Settings
from fedstill.building.schema import bounds
from fedstill.building.setup import Setup, prepare
from fedstill.building.suggestions import unknown_setting
from fedstill.core.errors import SettingError
from fedstill.core.table import Table
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.methods import registry
from fedstill.methods.base import NETWORKS, Method
from fedstill.report import bubbles
from fedstill.running.api import configure
from fedstill.studies import presets as known_presets

_SHOWN = 100  # clients in a table of a partition
# So that no method lacks anything.
_EXAMPLE = {"clients": 20, "participation": 1.0, "partition": "iid", "pool": 0.1, "proxy": "pool", "regions": 1}


def list_methods(name: str | None = None, **settings: Any) -> Table:
    """The methods, a line each; or of one, the parts that cross the wire, in bytes for the data and model chosen.

    Examples:
        >>> list_methods().rows[1][0]
        'fedprox'
    """
    if name is None:
        heads = ("id", "what it does", "needs", "paper", "networks")
        shown = Table("Methods", heads, "'fedstill methods NAME' shows one", words=True)
        for each in (*registry.names(), *(f"+{modifier}" for modifier in registry.modifiers())):
            try:
                cls = registry.find_part(each.removeprefix("+"))
            except SettingError as error:  # of one package; the others are there
                shown.add(each, str(error), "", "", "")
            else:
                method = cls()
                words = "; ".join(filter(None, (NETWORKS[method.networks], method.other_networks)))
                shown.add(each, _first_line(cls), ", ".join(_needs(method)), cls.paper, words)
            shown.values.append(dict(zip(("id", "what", "needs", "paper", "networks"), shown.rows[-1], strict=True)))
        return shown
    return wire_table(name, example(name, settings))


def wire_table(name: str, setup: Setup) -> Table:
    """What crosses between the server and one client in a round."""
    wire = setup.method.wire(setup.task)
    shown = Table(name, ("", "part", "what", "bytes"), _first_line(type(setup.method)), words=True)
    for way, parts in (("down", wire.down), ("up", wire.up), ("up, after the last round", wire.last)):
        for sent, part in parts.items():
            shown.add(way, sent, part.what, size_in_words(part.nbytes))
            shown.values.append({"way": way, "part": sent, "what": part.what, "bytes": part.nbytes})
    return shown


def example(name: str, settings: dict[str, Any], dataset: Dataset | None = None) -> Setup:
    """A run of a method with whatever it needs, of which only the declarations are of interest."""
    config = resolve(settings, {"method": name})
    return prepare(config.model_copy(update=_EXAMPLE), data=dataset or dataset_in(load_data(config)))


def _first_line(cls: type[Method]) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


def _needs(method: Method) -> list[str]:
    declared = method.needs()
    return [
        *(["proxy data"] if declared.proxy_data else []),
        *(["labels on the server"] if declared.server_labels else []),
        *(["a changed model"] if declared.changed_model else []),
        *declared.extra_information,
    ]


def needs_of(method: Method) -> str:
    """What a method asks for beyond FedAvg, in words."""
    return ", ".join(_needs(method))


def method_settings(name: str) -> Table:
    """The settings of a method and of what it is composed with."""
    shown = Table(f"Settings of {name} (--set key=value)", ("key", "default", "meaning"), words=True)
    for p in registry.hyper_parameters(name):
        shown.add(p.name, str(p.default), p.meaning)
        shown.values.append({"key": p.name, "default": p.default, "meaning": p.meaning})
    return shown


def list_settings(name: str | None = None) -> Table:
    """Every setting of a run, or one: meaning, default and bounds.

    Examples:
        >>> list_settings("epochs").rows[0][:3]
        ('epochs', '5', 'at least 1')
    """
    if name is not None and name not in Config.model_fields:
        raise unknown_setting(name, Config.model_fields)
    shown = Table(
        "Settings", ("name", "default", "allowed", "meaning"), "a method's own: 'fedstill methods NAME'", words=True
    )
    for each, field in Config.model_fields.items():
        if name in (None, each):
            default = "" if field.default_factory else str(field.default)
            shown.add(each, default, bounds(field), field.description or "")
            shown.values.append(dict(zip(("name", "default", "allowed", "meaning"), shown.rows[-1], strict=True)))
    return shown


def list_presets() -> Table:
    """The papers' tables and figures that can be reproduced."""
    shown = Table("Presets", ("name", "what it shows", "as"), "'fedstill presets NAME' shows one", words=True)
    for each in known_presets.names():
        preset = known_presets.load(each)
        shown.add(each, preset.title, preset.shows)
        shown.values.append({"name": each, "title": preset.title, "shows": preset.shows})
    return shown


@dataclass(frozen=True)
class Partition:
    """Which client holds which samples."""

    federation: Federation
    config: Config

    def __repr__(self) -> str:
        return f"<fedstill.Partition of {self.config.data}: {self.config.partition}, {self.federation.clients} clients>"

    def table(self) -> Table:
        """Each client's samples, classes held, share of the largest class and test samples."""
        rows = bubbles.table(self.federation)
        columns = tuple(name.replace("_", " ") for name in rows[0])
        shown = Table(f"{self.config.data}, {self.config.partition}, {self.federation.clients} clients", columns)
        shown.values = [dict(row) for row in rows]
        for row in rows[:_SHOWN]:
            shown.add(*(f"{v:.0%}" if isinstance(v, float) else str(v) for v in row.values()))
        if len(rows) > _SHOWN:
            shown.caption = f"the first {_SHOWN} of {len(rows)} clients"
        return shown

    def frame(self) -> Any:
        """A row for each client: a pandas DataFrame, or without pandas a dict of NumPy arrays."""
        return self.table().frame()

    def to_markdown(self) -> str:
        """The table in Markdown."""
        return self.table().to_markdown()

    def to_latex(self) -> str:
        r"""The table in LaTeX, for \usepackage{booktabs}."""
        return self.table().to_latex()

    def to_csv(self) -> str:
        """What `frame` has, as CSV."""
        return self.table().to_csv()

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw clients by classes: a matplotlib Figure, saved if a path is given."""
        return bubbles.bubbles(self.federation, Path(path) if path else io.BytesIO())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def partition(data: Any = "fashion-mini", **settings: Unpack[Settings]) -> Partition:
    """The data partition that a run with these settings has; `data` are as in `run`.

    Examples:
        >>> partition(clients=4, alpha=0.5)
        <fedstill.Partition of fashion-mini: dirichlet, 4 clients>
    """
    config, own = configure("fedavg", {"data": data}, dict(settings))
    return partition_of(config, own.get("data"))


def partition_of(config: Config, data: Dataset | Federation | None = None) -> Partition:
    if config.hyper:
        raise SettingError(f"{next(iter(config.hyper))} is a setting of a method, and a partition has none")
    return Partition(divide(config, load_data(config) if data is None else data), config)


def size_in_words(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
