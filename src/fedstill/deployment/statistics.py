"""Before the first round on tables: sums over the columns, which sites send and a server puts together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fedstill.building.config import Config
from fedstill.building.data import is_declared, settled
from fedstill.core.errors import DataError
from fedstill.core.tree import Tree
from fedstill.data.dataset import Dataset
from fedstill.data.preprocessing import Column, TablePreprocessing
from fedstill.data.statistics import LONGEST_CATEGORY, MOST_CATEGORIES, ColumnSums, from_message, with_table
from fedstill.deployment.protocol import STATISTICS, SiteLink, failure_reason
from fedstill.deployment.registry import SiteRegistry
from fedstill.deployment.waiting import Refusals

log = logging.getLogger(__name__)


class StatisticsPoll:
    """Asks sites for the sums over their tables' columns, each until it has answered."""

    def __init__(self, registry: SiteRegistry, table: TablePreprocessing, config: Config) -> None:
        self._registry, self._table, self._config = registry, table, config
        self._sums: dict[str, ColumnSums] = {}
        self._refusals = Refusals()

    def poll(self, link: SiteLink, *, timeout: float) -> None:
        present = link.present()
        self._refusals.forget_pauses(present)
        asked = [name for name in self.missing if name in present and self._refusals.due(name)]
        requests: dict[str, Tree] = {
            name: self._registry.request(name, {"kind": STATISTICS}, seconds=timeout) for name in asked
        }
        for name, answer in link.send_requests(requests, timeout=timeout) if requests else ():
            try:
                self._sums[name] = _sums(answer, self._table)
            except DataError as error:
                self._refusals.add(name, str(error))

    @property
    def reported_sites(self) -> int:
        """How many sites have answered."""
        return len(self._sums)

    @property
    def missing(self) -> dict[str, str]:
        """Sites that have not answered yet, and why not if they gave a reason."""
        return {name: self._refusals.reasons.get(name, "") for name in self._registry.clients if name not in self._sums}

    def settled(self) -> TablePreprocessing:
        """The preprocessing that all answers give together, added in the order of the clients."""
        in_order = [self._sums[name] for name in self._registry.clients if name in self._sums]
        return settled(self._config, self._table, in_order)


def _sums(answer: Any, table: TablePreprocessing) -> ColumnSums:
    if not isinstance(answer, dict) or "error" in answer:
        raise DataError(failure_reason(answer))
    return from_message(answer, table)


def widest(config: Config, dataset: Dataset) -> Dataset:
    """The dataset with a preprocessing as wide as it may become, for a limit on the size of answers."""
    if dataset.table is None or is_declared(config):
        return dataset
    names = tuple(f"{number:0{LONGEST_CATEGORY}}" for number in range(MOST_CATEGORIES))
    columns: Iterable[Column] = (
        column.model_copy(update={"missing": True} if column.categories is None else {"categories": names})
        for column in dataset.table.columns
    )
    return with_table(dataset, TablePreprocessing(columns=tuple(columns)))
