"""Which methods to try first on some data, and why. The rules are in presets/advice.toml."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from fedstill.analysis.listings import example, size_in_words
from fedstill.building.config import Config
from fedstill.building.data import divide, load_data
from fedstill.core.errors import SettingError
from fedstill.core.table import Table
from fedstill.data.federation import Federation
from fedstill.methods import registry

FIRST = 3  # methods that are named
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}
UNKNOWN = (
    "how your network learns: learning rate and local epochs move results by more than most methods; 'fedstill tune' "
    "searches them by validation data",
    "whether labels are right, and whether clients can be trusted: docs/robustness.md",
    "how slow your network connection is: bytes are given, not seconds",
)


@dataclass(frozen=True)
class Rule:
    """When it holds, which methods it speaks for."""

    name: str
    when: Mapping[str, str]
    methods: Mapping[str, int]  # points
    why: str
    evidence: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # without which it would not be true of the methods

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether the data are as the rule says."""
        return all(_holds(facts[name], condition) for name, condition in self.when.items())

    @property
    def shown(self) -> str:
        """What our runs say of it; empty if they say nothing."""
        if self.evidence is None:
            return ""
        low, mean, high = (100 * self.evidence[name] for name in ("low", "mean", "high"))
        at = f" at alpha {self.evidence['alpha']:g}" if "alpha" in self.evidence else ""
        metric, than, data, preset = (self.evidence[name] for name in ("metric", "than", "data", "preset"))
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] points of {metric} over {than} on {data}{at} ({preset})"


def _holds(fact: Any, condition: str) -> bool:
    """Whether a fact is as a rule says.

    >>> _holds(0.7, ">= 0.5"), _holds("text", "= image"), _holds(True, "= true")
    (True, False, True)
    """
    sign, _, text = condition.partition(" ")
    wanted: Any = {"true": True, "false": False}.get(text, text)
    if not isinstance(fact, bool | str):
        wanted = float(text)
    return _COMPARED[sign](fact, wanted)


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in the order of the file."""
    return tuple(Rule(**rule) for rule in _file()["rule"])


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(resources.files("fedstill.presets").joinpath("advice.toml").read_text(encoding="utf-8"))


def facts_of(federation: Federation, config: Config, *, weights: bool = True) -> dict[str, Any]:
    """What the rules go by."""
    counts = federation.class_counts().astype(float)
    sizes = federation.sizes[federation.sizes > 0]
    whole = counts.sum(0)
    kept = whole[whole > 0]
    dataset = federation.dataset
    kinds = {"text": bool(dataset.tokenizer), "table": dataset.table is not None or len(dataset.shape) == 1}
    return {
        "skew": _skew(counts),
        "participation": config.participation,
        "clients": federation.clients,
        "active": max(1, round(config.participation * federation.clients)),
        "samples": float(np.median(sizes)) if len(sizes) else 0.0,
        "size_ratio": float(sizes.max() / np.median(sizes)) if len(sizes) else 1.0,
        "imbalance": float(kept.max() / kept.min()) if len(kept) else 1.0,
        "kind": next((kind for kind, is_it in kinds.items() if is_it), "image"),
        "regions": max(config.regions, len(config.region)),
        "proxy": bool(config.proxy),
        "labels": len(federation.pool_index) > 0,
        "weights": weights,
    }


def _skew(counts: Any) -> float:
    """How far clients' classes are from those of all: total variation, by samples, of the most that it could be.

    >>> _skew(np.array([[5.0, 5.0], [5.0, 5.0]])), _skew(np.array([[10.0, 0.0], [0.0, 10.0]]))
    (0.0, 1.0)
    """
    sizes, whole = counts.sum(1), counts.sum(0) / max(1.0, counts.sum())
    shares = counts / np.maximum(sizes, 1)[:, None]
    distance = float((np.abs(shares - whole).sum(1) / 2 * sizes).sum() / max(1.0, sizes.sum()))
    most = float(1 - (whole**2).sum())  # where each client has one class
    return round(min(1.0, distance / most), 4) if most > 0 else 0.0


@dataclass(frozen=True)
class Suggestion:
    """A method to try, and why."""

    method: str
    points: int
    because: tuple[Rule, ...]
    settings: dict[str, Any]  # that it needs
    bytes_down: int  # to one client in a round
    bytes_up: int
    time: float  # of a round, FedAvg's is 1
    reveals: tuple[str, ...]  # what leaves a client beside weights


@dataclass(frozen=True)
class Advice:
    """What to try first on some data, after FedAvg."""

    facts: dict[str, Any]
    suggestions: tuple[Suggestion, ...]
    left_out: dict[str, str]  # methods that rules speak for, and what they lack

    def tables(self) -> list[Table]:
        """What was seen, and what to try."""
        seen = Table("The data", ("fact", "value"), words=True)
        for name, value in self.facts.items():
            seen.add(name, f"{value:.3g}" if isinstance(value, float) else str(value).lower())
            seen.values.append({"fact": name, "value": value})
        shown = Table(
            "Try first, beside fedavg",
            ("method", "why", "what our runs show", "down / up a round", "time", "leaves a client beside weights"),
            "not known: " + "; ".join(UNKNOWN),
            words=True,
        )
        for each in self.suggestions:
            words = [f"--set {name}={str(value).lower()}" for name, value in each.settings.items()]
            shown.add(
                " ".join([each.method, *words]),
                "; ".join(f"{rule.name}: {rule.why}" for rule in each.because),
                "; ".join(rule.shown for rule in each.because if rule.shown) or "no run of ours shows it",
                f"{size_in_words(each.bytes_down)} / {size_in_words(each.bytes_up)}",
                f"{each.time:g}",
                ", ".join(each.reveals) or "nothing",
            )
            shown.values.append({"method": each.method, "points": each.points, "why": shown.rows[-1][1]})
        if len(self.suggestions) < FIRST:
            shown.caption = f"no rule speaks for another method here · {shown.caption}"
        if self.left_out:
            lacking = "; ".join(f"{method} ({why})" for method, why in self.left_out.items())
            shown.caption = f"left out: {lacking} · {shown.caption}"
        return [seen, shown]

    def frame(self) -> Any:
        """The suggestions: a pandas DataFrame, or without pandas a dict of NumPy arrays."""
        return self.tables()[1].frame()

    def to_markdown(self) -> str:
        """The tables in Markdown."""
        return "\n".join(map(str, self.tables()))


def ranked(facts: Mapping[str, Any]) -> dict[str, list[Rule]]:
    """The methods that rules speak for, the most points first, with those rules."""
    found: dict[str, list[Rule]] = {}
    for rule in rules():
        for method in rule.methods if rule.holds(facts) else ():
            found.setdefault(method, []).append(rule)
    return dict(sorted(found.items(), key=lambda pair: -_points(*pair)))


def _points(method: str, because: Sequence[Rule]) -> int:
    return sum(rule.methods[method] for rule in because)


def lacks(method: str, facts: Mapping[str, Any], *, only_weights: bool = False) -> str:
    """What a method needs and the data do not give; empty if nothing."""
    needs = registry.make(method).needs()
    if needs.proxy_data and not (facts["proxy"] or facts["labels"]):
        return "needs samples without labels on the server: proxy"
    if needs.server_labels and not facts["labels"]:
        return "needs labelled samples on the server: pool"
    if only_weights and needs.extra_information:
        return f"sends {', '.join(needs.extra_information)}"
    return ""


def advise(
    config: Config, *, weights: bool = True, only_weights: bool = False, data: Federation | None = None
) -> Advice:
    """Look at the data partition that the settings give, and say which methods to try first.

    `weights`: whether they may leave a client; `only_weights`: whether nothing else may.
    """
    if only_weights and not weights:
        raise SettingError("advise: either weights alone may leave a client, or no weights; nothing else is left")
    federation = data or divide(config, load_data(config))
    facts = facts_of(federation, config, weights=weights)
    chosen: list[Suggestion] = []
    left_out: dict[str, str] = {}
    given = config.model_dump(exclude_unset=True)
    network: dict[str, Any] = {
        name: given[name] for name in ("data", "data_dir", "target", "model", "model_options") if name in given
    }
    for method, because in ranked(facts).items():
        if reason := lacks(method, facts, only_weights=only_weights):
            left_out[method] = reason
        elif len(chosen) < FIRST:
            settings = {name: value for rule in because for name, value in rule.settings.items()}
            setup = example(method, network | {"hyper": settings}, federation.dataset)
            wire = setup.method.wire(setup.task)
            down, up = (sum(part.nbytes for part in parts.values()) for parts in (wire.down, wire.up))
            time = max([1.0, *(_file()["time"].get(part, 1.0) for part in registry.split(method))])
            reveals = setup.method.needs().extra_information
            chosen.append(
                Suggestion(method, _points(method, because), tuple(because), settings, down, up, time, reveals)
            )
    return Advice(facts, tuple(chosen), left_out)
