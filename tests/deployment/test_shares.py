"""What sites reported when they joined is in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.core.files import write_sealed_json
from fedstill.deployment import shares


def test_counts_are_written_once_for_all_sites_that_were_asked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writes = tmp_path / "counts.json", list[Path]()

    def write(path: Path, value: dict[str, Any]) -> None:
        writes.append(path)
        write_sealed_json(path, value)

    monkeypatch.setattr(shares, "write_sealed_json", write)
    clients = {f"site{k}": np.array([k]) for k in range(50)}

    def counts() -> shares.Counts:
        return shares.Counts(clients, len(clients), 0.0, path)

    first = counts()
    for k, name in enumerate(clients):
        assert first.settle(name, [k], [1], growing=False) == ""
    first.save()
    first.save()
    assert len(writes) == 1
    again = counts()
    assert [again.samples(name) for name in clients] == list(range(50))
    assert "had 3 samples" in again.settle("site3", [4], [1], growing=False)
    again.save()
    assert len(writes) == 1
    again.forget(["site3"])
    assert again.settle("site3", [4], [1], growing=False) == ""
    again.save()
    assert len(writes) == 2
    assert counts().samples("site3") == 4
