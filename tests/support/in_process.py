"""Many runs in this process, which is quicker than one for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import Diverged
from fedstill.running.uplinks import TooFewClients
from fedstill.studies import cells, tuning
from fedstill.studies.cells import Cell, Failure


def one_by_one(todo: Sequence[Cell], **_: Any) -> dict[Path, Failure]:
    """What `try_cells` does."""
    failed = {}
    for cell in todo:
        try:
            if not cell.finished:
                cells.carry_out(cell)
        except (Diverged, TooFewClients) as error:
            failed[cell.path] = Failure(str(error), diverged=True)
    return failed


@contextmanager
def in_process() -> Iterator[None]:
    """Let tunings and comparisons run their cells one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "try_cells", one_by_one)
        patch.setattr(cells, "try_cells", one_by_one)
        yield
