"""The rounds' records, and what they come to."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from fedstill.building.config import Config
from fedstill.building.groups import Group
from fedstill.metrics.records import (
    VALIDATION,
    BestAndFinal,
    GroupScores,
    RoundRecord,
    Scores,
    Summary,
    headline,
    value_of,
)
from fedstill.metrics.scores import lower_is_better, short_name
from fedstill.running.evaluation import Evaluation
from fedstill.running.monitors import usual_mode
from fedstill.running.uplinks import Checked

NOT_EVALUATED: Scores = {
    "accuracy": None,
    "loss": None,
    "amp": None,
    "fm": None,
    "wlp": None,
    "local_accuracy": None,
}
QUALITY = tuple(NOT_EVALUATED)
LOWER_IS_BETTER = ("loss", "fm", "val_loss", "val_fm")
FINAL_EVALUATIONS = 5


class Tally:
    """What came back in a round, of all its regions."""

    def __init__(self) -> None:
        self.clients = self.bytes_down = self.bytes_up = self.dropped = 0
        self.server_seconds = 0.0  # of work, without waiting for clients
        self.metrics: dict[str, list[float]] = {}
        self.by_client: dict[int, Mapping[str, float]] = {}  # the same
        self.left_out: list[str] = []  # sites whose answers do not count, where they are elsewhere

    def add(self, uplinks: Checked, bytes_down: int) -> None:
        self.clients += len(uplinks.good) + len(uplinks.dropped)
        self.bytes_down += bytes_down
        self.bytes_up += uplinks.bytes_up
        self.dropped += len(uplinks.dropped)
        for name, values in uplinks.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        self.by_client |= uplinks.by_client

    def of(self, clients: Iterable[int]) -> Tally:
        """What some of the clients reported."""
        part = Tally()
        for client in clients:
            for name, value in self.by_client.get(client, {}).items():
                part.metrics.setdefault(name, []).append(value)
        return part

    @property
    def client_seconds(self) -> float:
        """Of all clients together."""
        return sum(self.metrics.get("seconds", []))

    def mean(self, metric: str) -> float | None:
        """Mean of a number that the good clients reported."""
        values = self.metrics.get(metric)
        return sum(values) / len(values) if values else None


def of_own_models(uplinks: Tally, metrics: Sequence[str] = ()) -> Scores:
    """The same numbers where there is no global model: of the active clients' own models, on average.

    The `metrics` that the settings name are those of a global model.
    """
    local = np.array(uplinks.metrics.get("local_accuracy", []))
    known = len(local) > 0
    missing = {short_name(name): "there is no global model" for name in metrics}
    if len(local) == 1:
        missing["fm"] = "only one active client has test samples"
    scores: Scores = {
        "accuracy": uplinks.mean("test_accuracy"),
        "loss": uplinks.mean("test_loss"),
        "amp": float(local.mean()) if known else None,
        "fm": float(local.var()) if len(local) > 1 else None,
        "wlp": float(local.min()) if known else None,
    }
    if held := uplinks.metrics.get("val_accuracy"):
        own = np.array(held)
        scores |= {"val_accuracy": float(own.mean()), "val_amp": float(own.mean()), "val_wlp": float(own.min())}
        scores["val_fm"] = float(own.var()) if len(own) > 1 else None
    return scores | {"unmeasured": missing} if missing else scores


def of_groups(tally: Tally, groups: Sequence[Group], found: Mapping[str, Evaluation]) -> dict[str, GroupScores]:
    """The numbers of each group of clients with one network: of its model, or of its active clients' own."""
    scored: dict[str, GroupScores] = {}
    for group in groups:
        part = tally.of(group.clients.tolist())
        own = found[group.name].record() if group.name in found else of_own_models(part)
        kept = {name: value for name, value in own.items() if name in (*QUALITY, *VALIDATION)}
        scored[group.name] = cast(
            GroupScores, {"clients": len(group.clients), **kept, "local_accuracy": part.mean("local_accuracy")}
        )
    return scored


def summarise(config: Config, records: Sequence[RoundRecord], final_exchange: Mapping[str, int]) -> Summary:
    """Best and final numbers, and the cost; `final_exchange` is what crossed after the last round."""
    scored = [r for r in records if r["evaluated"]]
    last, compared = scored[-FINAL_EVALUATIONS:], headline(scored)
    by_headline = {r["round"]: value for r in scored if compared and (value := value_of(r, compared)) is not None}
    summary: Summary = {"method": config.method, "seed": config.seed, "rounds": len(records)}
    summary |= cast(Summary, _best_and_final(scored))
    summary |= {
        "final_is_mean_of": len(last),
        "best_round": max(by_headline, key=lambda r: by_headline[r]) if by_headline else None,
        "best_round_of": compared,
        "final_per_class": last[-1].get("per_class") if last else None,
        "bytes_down": sum(r["bytes_down"] for r in records) + final_exchange.get("bytes_down", 0),
        "bytes_up": sum(r["bytes_up"] for r in records) + final_exchange.get("bytes_up", 0),
        "dropped": sum(r["dropped"] for r in records) + final_exchange.get("dropped", 0),
        "seconds": sum(r["seconds"] for r in records),
        "eval_seconds": sum(r["eval_seconds"] for r in records),
        "bytes_regions": sum(r["episode"]["bytes"] for r in records if "episode" in r),
    }
    if last and (also := last[-1].get("also")):
        summary["also"] = {name: _best_and_final([r["also"][name] for r in scored]) for name in also}
    if last and (groups := last[-1].get("groups")):
        summary["groups"] = {name: _best_and_final([r["groups"][name] for r in scored]) for name in groups}
    if config.metrics:
        summary["metric_names"] = [short_name(name) for name in config.metrics]
    if last and (unmeasured := last[-1].get("unmeasured")):
        summary["unmeasured"] = unmeasured
    if chosen := _selected(config.select, records):
        summary["selected"] = chosen
    if config.target_accuracy:
        reached = [round_ for round_, value in by_headline.items() if value >= config.target_accuracy]
        summary["rounds_to_target"] = reached[0] if reached else None
    return summary


def _selected(select: str, records: Sequence[RoundRecord]) -> dict[str, Any]:
    """The scores of the first round that is best by the number that settings select by."""
    values = {i: value for i, r in enumerate(records) if select and (value := value_of(r, select)) is not None}
    if not values:
        return {}
    best = records[(max if usual_mode(select) == "max" else min)(values, key=lambda i: values[i])]
    scores = {name: best[name] for name in (*QUALITY, *VALIDATION, "metrics", "groups") if name in best}  # type: ignore[literal-required]
    return {"round": best["round"], "by": select, **scores}


def _best_and_final(scored: Sequence[Scores]) -> BestAndFinal:
    """The best of each number, and the mean of the last five, over the rounds that were evaluated."""
    found: dict[str, Any] = {}
    validated = [name for name in VALIDATION if any(name in r for r in scored)]
    for name in (*QUALITY, *validated):
        found |= _of_one(scored, name, lower=name in LOWER_IS_BETTER)
    names = dict.fromkeys(name for r in scored for name in r.get("metrics", {}))
    metrics: dict[str, float | None] = {}
    for name in names:
        metrics |= _of_one([r.get("metrics", {}) for r in scored], name, lower=lower_is_better(name))
    return cast(BestAndFinal, found | ({"metrics": metrics} if metrics else {}))


def _of_one(scored: Sequence[Mapping[str, Any]], name: str, *, lower: bool) -> dict[str, float | None]:
    values = [value_of(r, name) for r in scored]
    known = [v for v in values if v is not None]
    final = [v for v in values[-FINAL_EVALUATIONS:] if v is not None]
    return {
        f"best_{name}": (min if lower else max)(known) if known else None,
        f"final_{name}": sum(final) / len(final) if final else None,
    }


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("fedstill", "torch", "numpy")
    }
