"""Datasets: what one is, where they come from, how they are read, kept and augmented."""

from fedstill.data.dataset import Dataset, Split
from fedstill.data.formats.arrays import from_arrays
from fedstill.data.formats.pytorch import from_torch
from fedstill.data.formats.table import TableSettings, from_frame
from fedstill.data.huggingface import from_huggingface
from fedstill.data.sources import Description, describe, load, names
from fedstill.data.sources import load as load_dataset
from fedstill.data.tokens import TextSettings

__all__ = [
    "Dataset",
    "Description",
    "Split",
    "TableSettings",
    "TextSettings",
    "describe",
    "from_arrays",
    "from_frame",
    "from_huggingface",
    "from_torch",
    "load",
    "load_dataset",
    "names",
]
