"""What a table's columns are standardised by: made of sums that each owner of rows takes of its own.

The same functions serve a simulation, where the sums of all clients are here, and sites that send theirs. What is
added, is added in the order of the clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstill.core.errors import DataError
from fedstill.data.dataset import Dataset, Split
from fedstill.data.federation import Federation
from fedstill.data.formats.labels import class_order
from fedstill.data.preprocessing import Column, TablePreprocessing

MOST_CATEGORIES = 100  # of a column; more are names, dates or numbers in disguise
LONGEST_CATEGORY = 200  # characters
_MOST = 10**8  # rows of an owner
PARTS = ("present", "missing", "sums", "squares", "counts")  # of a message
_KINDS = {"present": torch.int64, "missing": torch.int64, "sums": torch.float64, "squares": torch.float64}


@dataclass(frozen=True)
class ColumnSums:
    """Sums over the rows of one owner, for each column; of a column of categories, how often each occurs."""

    present: npt.NDArray[np.int64]  # (columns,) values that are not missing
    missing: npt.NDArray[np.int64]  # 1 where some are
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]  # of the distances from the owner's own mean: squares of the values lose digits
    counts: tuple[Mapping[str, int], ...]  # empty for numbers

    def message(self) -> dict[str, Any]:
        """The sums as a message: tensors with names, and the names of categories beside them."""
        tensors = {name: torch.from_numpy(getattr(self, name)) for name in _KINDS}
        counts = torch.tensor([count for column in self.counts for count in column.values()], dtype=torch.int64)
        return {"message": {**tensors, "counts": counts}, "categories": [list(column) for column in self.counts]}


def column_sums(table: TablePreprocessing, x: Tensor, least: int = 1) -> ColumnSums:
    """The sums of stored rows. Of fewer than `least` values nothing is told, nor of a category with fewer rows."""
    rows = np.ascontiguousarray(x.numpy())
    known = ~np.isnan(rows)
    present = known.sum(axis=0, dtype=np.int64)
    told = present >= least
    number = np.array([column.categories is None for column in table.columns]) & told
    with np.errstate(over="ignore"):  # which is noticed below
        sums = np.where(known, rows, 0.0).sum(axis=0)
        squares = (np.where(known, rows - sums / np.maximum(present, 1), 0.0) ** 2).sum(axis=0)
    if (wrong := np.flatnonzero(number & ~np.isfinite(squares))).size:
        raise DataError(f"column {table.columns[wrong[0]].name!r} has numbers that are too large to be standardised")
    counts = []
    for place, column in enumerate(table.columns):
        values = rows[known[:, place], place] if column.categories is not None else rows[:0, place]
        times = np.bincount(values.astype(np.int64), minlength=len(column.categories or ()))
        named = zip(column.categories or (), times.tolist(), strict=True)
        counts.append({name: count for name, count in named if count >= max(least, 1)})
    return ColumnSums(
        present=np.where(told, present, 0),
        missing=(~known).any(axis=0).astype(np.int64),
        sums=np.where(number, sums, 0.0),
        squares=np.where(number, squares, 0.0),
        counts=tuple(counts),
    )


def from_message(answer: Any, table: TablePreprocessing) -> ColumnSums:
    """The sums in a message from elsewhere; DataError if they are none of this table's."""
    width, wrong = len(table.columns), DataError("these are no sums over the run's columns")
    tensors, categories = (answer.get(key) if isinstance(answer, dict) else None for key in ("message", "categories"))
    if not isinstance(tensors, dict) or tensors.keys() != set(PARTS) or not isinstance(categories, list):
        raise wrong
    if not all(isinstance(part, Tensor) and part.dim() == 1 for part in tensors.values()) or len(categories) != width:
        raise wrong
    kinds = {name: (width, kind) for name, kind in _KINDS.items()}
    if any((len(tensors[name]), tensors[name].dtype) != kind for name, kind in kinds.items()):
        raise wrong
    if not all(
        isinstance(names, list)
        and len(names) <= (0 if column.categories is None else MOST_CATEGORIES)
        and all(isinstance(name, str) and 0 < len(name) <= LONGEST_CATEGORY and name.isprintable() for name in names)
        and len(set(names)) == len(names)
        for names, column in zip(categories, table.columns, strict=True)
    ):
        raise wrong
    counts = tensors["counts"].tolist()
    if tensors["counts"].dtype != torch.int64 or len(counts) != sum(map(len, categories)):
        raise wrong
    found = {name: tensors[name].numpy() for name in _KINDS}
    amounts = [*counts, *found["present"].tolist()]
    if not all(0 <= amount <= _MOST for amount in amounts) or not np.isin(found["missing"], (0, 1)).all():
        raise wrong
    if not (np.isfinite(found["sums"]).all() and np.isfinite(found["squares"]).all() and (found["squares"] >= 0).all()):
        raise wrong
    each = iter(counts)
    return ColumnSums(**found, counts=tuple({name: next(each) for name in names} for names in categories))


def merged(table: TablePreprocessing, owners: Sequence[ColumnSums]) -> TablePreprocessing:
    """The table with the means, deviations and categories that all owners' rows have together."""
    columns = []
    for place, column in enumerate(table.columns):
        if column.categories is not None:
            names = class_order({name for owner in owners for name in owner.counts[place]})
            if len(names) > MOST_CATEGORIES:
                raise DataError(
                    f"column {column.name!r} has {len(names)} categories over all clients, and {MOST_CATEGORIES} are "
                    "the most; set drop_columns to leave it out"
                )
            columns.append(Column(name=column.name, categories=tuple(names)))
            continue
        mean, std = _moments(owners, place)
        missing = any(bool(owner.missing[place]) for owner in owners)
        columns.append(Column(name=column.name, mean=mean, std=std or 1.0, missing=missing))
    return TablePreprocessing(columns=tuple(columns))


def constant(table: TablePreprocessing, owners: Sequence[ColumnSums]) -> list[str]:
    """The columns that are the same in all rows, and so tell nothing."""
    return [
        column.name
        for place, column in enumerate(table.columns)
        if (_moments(owners, place)[1] == 0 if column.categories is None else len(column.categories) < 2)
    ]


def _moments(owners: Sequence[ColumnSums], place: int) -> tuple[float, float]:
    """Mean and population standard deviation of a column; 0 if it is constant but for rounding."""
    known = [owner for owner in owners if owner.present[place]]
    count = sum(int(owner.present[place]) for owner in known)
    if not count:
        return 0.0, 0.0
    mean = sum(float(owner.sums[place]) for owner in known) / count
    squares = sum(
        float(owner.squares[place])
        + int(owner.present[place]) * (float(owner.sums[place] / owner.present[place]) - mean) ** 2
        for owner in known
    )
    variance, rounding = squares / count, (count * mean * np.finfo(np.float64).eps) ** 2
    return mean, math.sqrt(variance) if variance > rounding else 0.0


def own_columns(dataset: Dataset, table: TablePreprocessing) -> TablePreprocessing:
    """The columns as the dataset has them; DataError if they are not those of the `table` of a run."""
    own = dataset.table
    if own is None:
        raise DataError("the run is about a table, and these data are none; a table has a target column (--target)")
    for column, other in zip(own.columns, table.columns, strict=False):
        if (column.name, column.categories is None) != (other.name, other.categories is None):
            wanted = "numbers" if other.categories is None else "categories"
            raise DataError(f"column {column.name!r} stands where the run has {other.name!r}, {wanted}")
    if len(own.columns) != len(table.columns):
        raise DataError(f"there are {len(own.columns)} columns here, and the run has {len(table.columns)}")
    return own


def with_table(dataset: Dataset, table: TablePreprocessing) -> Dataset:
    """The dataset with another preprocessing of the same columns."""
    own = own_columns(dataset, table)

    def recoded(split: Split) -> Split:
        x = split.x
        for place, (column, other) in enumerate(zip(own.columns, table.columns, strict=True)):
            if column.categories is None or column.categories == other.categories:
                continue
            x = x.clone() if x is split.x else x
            numbers = {name: float(number) for number, name in enumerate(other.categories or ())}
            new = torch.tensor([*(numbers.get(name, torch.nan) for name in column.categories), torch.nan])
            x[:, place] = new.double()[x[:, place].nan_to_num(len(column.categories)).long()]
        return replace(split, x=x)

    return replace(dataset, train=recoded(dataset.train), test=recoded(dataset.test), table=table)


def client_sums(federation: Federation) -> list[ColumnSums]:
    """The sums of each client's training samples."""
    dataset = federation.dataset
    assert dataset.table is not None
    indices = (torch.from_numpy(federation.train(client)) for client in range(federation.clients))
    return [column_sums(dataset.table, dataset.train.x[index]) for index in indices]
