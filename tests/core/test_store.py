"""What clients keep between rounds, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import DataError
from fedstill.core.store import Store
from support.core import same


def versions(store: Store, client: int) -> list[int]:
    return sorted(int(p.name.split(".")[1]) for p in store.root.rglob(f"{client}.*.safetensors"))


def test_a_client_that_was_never_active_has_no_state_and_no_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients")
    assert store.read(3, before=10) is None
    assert not store.root.exists()


def test_a_round_reads_what_the_newest_earlier_round_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round_ in (1, 4, 12):
        store.write(7, round_, {"written": round_, "w": torch.full((2,), float(round_))})
    store.write(70, 5, {"written": "by another"})
    expected = {1: None, 2: 1, 4: 1, 5: 4, 12: 4, 13: 12, 100: 12}
    for before, written in expected.items():
        state = store.read(7, before=before)
        assert (state and state["written"]) == written
    assert same(store.read(7, before=13), {"written": 12, "w": torch.full((2,), 12.0)})


def test_a_repeated_round_replaces_what_its_first_attempt_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(0, 3, {"attempt": 1})
    store.write(0, 3, {"attempt": 2})
    assert store.read(0, before=4) == {"attempt": 2}
    assert versions(store, 0) == [3]


def test_rollback_forgets_the_rounds_after(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for client in (1, 250):
        for round_ in (2, 3, 4, 5):
            store.write(client, round_, {"written": round_})
    store.rollback(3)
    for client in (1, 250):
        assert versions(store, client) == [2, 3]
        assert store.read(client, before=10**9) == {"written": 3}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=8), st.integers(1, 3))
def test_pruning_keeps_what_the_last_two_checkpoints_need(cohorts: list[set[int]], every: int) -> None:
    """Whatever rounds clients were active in, going back to either checkpoint finds the state of that moment."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store, kept, active = Store(Path(folder)), [0], set[int]()
        for round_, cohort in enumerate(cohorts, start=1):
            for client in cohort:
                store.write(client, round_, {"written": round_})
            active |= cohort
            if round_ % every == 0:
                kept = [*kept, round_][-2:]
                store.prune(sorted(active), needed=kept[0])
                active.clear()
        for checkpoint in reversed(kept):
            store.rollback(checkpoint)
            for client in range(4):
                rounds = [r for r, cohort in enumerate(cohorts, start=1) if client in cohort and r <= checkpoint]
                expected = {"written": max(rounds)} if rounds else None
                assert store.read(client, before=checkpoint + 1) == expected


def test_pruning_deletes_what_no_checkpoint_needs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round_ in range(1, 7):
        store.write(2, round_, {})
    store.prune([2], needed=5)
    assert versions(store, 2) == [5, 6]


def test_damaged_state_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(2, 1, {"w": torch.ones(3)})
    file = next(tmp_path.rglob("2.1.safetensors"))
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(DataError, match=r"2\.1\.safetensors.*damaged"):
        store.read(2, before=2)
