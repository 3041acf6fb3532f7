"""Values that settings may take, and defaults that more than one package needs. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

AttackKind = Literal[
    "",
    "label-flip",
    "mirror-flip",
    "noise",
    "sign-flip",
    "scale",
    "count",
    "buffers",
    "extra",
    "alie",
    "ipm",
    "min-max",
    "adaptive",
]
BufferPolicy = Literal["average", "local", "drop"]
Precision = Literal["float32", "bfloat16"]
Sampling = Literal["poisson", "fixed"]  # of cohorts

ALPHA = 0.1  # Dirichlet concentration
SMALLEST_VOCABULARY = 3 + 256  # padding, the marks of a text's start and end, and every byte
Format = Literal["table", "markdown", "latex", "csv"]  # of tables
