"""The rounds' records, and what they come to."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from fedstill.building.config import Config
from fedstill.metrics.records import BestAndFinal, RoundRecord, Scores, Summary, value_of
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
LOWER_IS_BETTER = ("loss", "fm")
FINAL_EVALUATIONS = 5


class Tally:
    """What came back in a round, of all its regions."""

    def __init__(self) -> None:
        self.clients = self.bytes_down = self.bytes_up = self.dropped = 0
        self.server_seconds = 0.0  # of work, without waiting for clients
        self.metrics: dict[str, list[float]] = {}
        self.left_out: list[str] = []  # sites whose answers do not count, where they are elsewhere

    def add(self, uplinks: Checked, bytes_down: int) -> None:
        self.clients += len(uplinks.good) + len(uplinks.dropped)
        self.bytes_down += bytes_down
        self.bytes_up += uplinks.bytes_up
        self.dropped += len(uplinks.dropped)
        for name, values in uplinks.metrics.items():
            self.metrics.setdefault(name, []).extend(values)

    @property
    def client_seconds(self) -> float:
        """Of all clients together."""
        return sum(self.metrics.get("seconds", []))

    def mean(self, metric: str) -> float | None:
        """Mean of a number that the good clients reported."""
        values = self.metrics.get(metric)
        return sum(values) / len(values) if values else None


def of_own_models(uplinks: Tally) -> Scores:
    """The same numbers where there is no global model: of the active clients' own models, on average."""
    local = np.array(uplinks.metrics.get("local_accuracy", []))
    known = len(local) > 0
    return {
        "accuracy": uplinks.mean("test_accuracy"),
        "loss": uplinks.mean("test_loss"),
        "amp": float(local.mean()) if known else None,
        "fm": float(local.var()) if known else None,
        "wlp": float(local.min()) if known else None,
    }


def summarise(config: Config, records: Sequence[RoundRecord], final_exchange: Mapping[str, int]) -> Summary:
    """Best and final numbers, and the cost; `final_exchange` is what crossed after the last round."""
    scored = [r for r in records if r["evaluated"]]
    last = scored[-FINAL_EVALUATIONS:]
    summary: Summary = {"method": config.method, "seed": config.seed, "rounds": len(records)}
    summary |= cast(Summary, _best_and_final(scored))
    summary |= {
        "final_is_mean_of": len(last),
        "best_round": max(scored, key=lambda r: r["accuracy"] or 0)["round"],
        "final_per_class": last[-1].get("per_class"),
        "bytes_down": sum(r["bytes_down"] for r in records) + final_exchange.get("bytes_down", 0),
        "bytes_up": sum(r["bytes_up"] for r in records) + final_exchange.get("bytes_up", 0),
        "dropped": sum(r["dropped"] for r in records) + final_exchange.get("dropped", 0),
        "seconds": sum(r["seconds"] for r in records),
        "eval_seconds": sum(r["eval_seconds"] for r in records),
        "bytes_regions": sum(r["episode"]["bytes"] for r in records if "episode" in r),
    }
    if also := last[-1].get("also"):
        summary["also"] = {name: _best_and_final([r["also"][name] for r in scored]) for name in also}
    if config.target_accuracy:
        reached = [r["round"] for r in scored if (r["accuracy"] or 0) >= config.target_accuracy]
        summary["rounds_to_target"] = reached[0] if reached else None
    return summary


def _best_and_final(scored: Sequence[Scores]) -> BestAndFinal:
    """The best of each number, and the mean of the last five, over the rounds that were evaluated."""
    found: dict[str, float | None] = {}
    for name in QUALITY:
        values = [value_of(r, name) for r in scored]
        known = [v for v in values if v is not None]
        final = [v for v in values[-FINAL_EVALUATIONS:] if v is not None]
        pick = min if name in LOWER_IS_BETTER else max
        found[f"best_{name}"] = pick(known) if known else None
        found[f"final_{name}"] = sum(final) / len(final) if final else None
    return cast(BestAndFinal, found)


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("fedstill", "torch", "numpy")
    }
