"""Random streams, weighted means, fairness, files of the user's own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedstill.aggregate.mean import RunningMean, weighted_mean
from fedstill.core import custom, seeds
from fedstill.core.errors import FedstillError, SettingError
from fedstill.metrics.fairness import fairness
from support.core import few


@few
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 5)), unique=True)
)
def test_streams_of_different_seeds_purposes_rounds_and_clients_differ(places: list[tuple[int, str, int, int]]) -> None:
    assert len({seeds.key(*place) for place in places}) == len(places)


def test_round_and_client_are_not_exchangeable() -> None:
    assert seeds.key(0, "batches", 1, 2) != seeds.key(0, "batches", 2, 1)
    assert seeds.key(0, "batches", 1) != seeds.key(1, "batches", 0)


def test_streams_give_the_same_numbers_in_another_process() -> None:
    code = (
        "from fedstill.core import seeds; import torch\n"
        "print(seeds.key(3, 'cohort', 7), seeds.numpy_rng(3, 'cohort', 7).integers(0, 1000, 4).tolist(),"
        " torch.randperm(6, generator=seeds.torch_rng(3, 'batches', 7, 1)).tolist())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "12345"}
    )
    ours = (
        seeds.key(3, "cohort", 7),
        seeds.numpy_rng(3, "cohort", 7).integers(0, 1000, 4).tolist(),
        torch.randperm(6, generator=seeds.torch_rng(3, "batches", 7, 1)).tolist(),
    )
    assert other.stdout.split("\n")[0] == " ".join(map(str, ours))


def test_a_key_is_what_numpy_documents_for_the_seed_sequence() -> None:
    """0x414FA339 is the published CRC-32 of the sentence; the sequence's algorithm is fixed by NumPy's policy."""
    sentence = "The quick brown fox jumps over the lazy dog"
    state = np.random.SeedSequence([5, 0x414FA339, 2, 9]).generate_state(2, np.uint32)
    expected = (int(state[0]) | int(state[1]) << 32) >> 1
    assert seeds.key(5, sentence, 2, 9) == expected


vectors = st.integers(1, 6).flatmap(
    lambda length: st.lists(
        st.tuples(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=length, max_size=length),
            st.floats(0, 1e4, allow_subnormal=False),
        ),
        min_size=1,
        max_size=8,
    )
)


@few
@given(vectors)
def test_the_weighted_mean_is_numpys_in_float64(pairs: list[tuple[list[float], float]]) -> None:
    values = np.array([v for v, _ in pairs], np.float32).astype(np.float64)
    weights = np.array([w for _, w in pairs])
    given_ = [(torch.tensor(v, dtype=torch.float32), w) for v, w in pairs]
    if weights.sum() <= 0:
        with pytest.raises(FedstillError, match="positive weight"):
            weighted_mean(given_)
        return
    mean = weighted_mean(given_)
    expected = (weights[:, None] * values).sum(axis=0) / weights.sum()
    assert mean.dtype == torch.float32
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_a_weight_of_zero_changes_no_bit() -> None:
    a, b, c = (torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert torch.equal(weighted_mean([(a, 3), (b, 0), (c, 2)]), weighted_mean([(a, 3), (c, 2)]))


def test_the_mean_of_equal_vectors_is_that_vector() -> None:
    v = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weighted_mean([(v, n) for n in (7, 1, 300, 49)]), v)


def test_the_sum_runs_in_the_order_given() -> None:
    """1e16 + 1 + 1 + ... loses every 1, and 1 + 1 + ... + 1e16 none: the result shows the order of the sum."""
    large, ones = torch.tensor([1e16], dtype=torch.float64), [torch.ones(1, dtype=torch.float64)] * 4
    assert weighted_mean([(v, 1) for v in (large, *ones)]).item() == 1e16 / 5
    assert weighted_mean([(v, 1) for v in (*ones, large)]).item() == (1e16 + 4) / 5


def test_the_mean_takes_vectors_one_at_a_time() -> None:
    alive: list[Tensor] = []

    def stream() -> Iterable[tuple[Tensor, float]]:
        for k in range(5):
            vector = torch.full((3,), float(k))
            alive.append(vector)
            yield vector, 1.0
            vector.fill_(math.nan)  # what was added is not looked at again

    assert torch.equal(weighted_mean(stream()), torch.full((3,), 2.0))


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(FedstillError, match="nothing to average"):
        RunningMean().result()


@few
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=8))
def test_fairness_is_what_loops_over_the_clients_give(clients: list[list[bool]]) -> None:
    correct = np.array([hit for client in clients for hit in client], bool)
    offsets = np.cumsum([0, *map(len, clients)])
    found = fairness(correct, offsets)

    local = [sum(client) / len(client) if client else math.nan for client in clients]
    np.testing.assert_array_equal(found.local, local)
    known = [a for a in local if not math.isnan(a)]
    if not known:
        assert math.isnan(found.amp)
        assert math.isnan(found.fm)
        assert math.isnan(found.wlp)
        return
    mean = sum(known) / len(known)
    assert found.amp == pytest.approx(sum(map(sum, clients)) / sum(map(len, clients)))
    variance = sum((a - mean) ** 2 for a in known) / len(known) if len(known) > 1 else math.nan  # of one: no fairness
    assert found.fm == pytest.approx(variance, nan_ok=True)
    assert found.wlp == min(known)


def test_the_worst_client_is_one_that_has_test_samples() -> None:
    found = fairness(np.array([True, True, False, True]), np.array([0, 0, 2, 2, 4]))
    assert (found.wlp, found.amp, found.fm) == (0.5, 0.75, 0.0625)


def test_equal_accuracies_are_perfectly_fair() -> None:
    assert fairness(np.array([True, False] * 3), np.array([0, 2, 4, 6])).fm == 0.0


def test_a_users_file_is_run_once_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"with open({str(tmp_path / 'runs')!r}, 'a') as f: f.write('x')\nvalue = 1\n")
    assert [custom.load(f"{file}:value") for _ in range(3)] == [1, 1, 1]
    assert (tmp_path / "runs").read_text() == "x"
    file.write_text("value = 'changed'\n")
    assert custom.load(f"{file}:value") == "changed"


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "mine.py").write_text(
            f"value = {i}\ndef get(): return value, __import__('sys').modules[__name__].value\n"
        )
    first, second = (custom.load(f"{tmp_path / str(i)}/mine.py:get") for i in (1, 2))
    assert (first(), second()) == ((1, 1), (2, 2))


def test_a_file_that_cannot_be_imported_leaves_no_half_of_a_module(tmp_path: Path) -> None:
    """Else workers elsewhere, which are given every file of the user's, fail at this one in every later run."""
    before = set(sys.modules)
    (tmp_path / "mine.py").write_text("x = 1\nraise ValueError('no')\n")
    with pytest.raises(SettingError, match="cannot be imported"):
        custom.load(f"{tmp_path}/mine.py:x")
    assert not {name for name in set(sys.modules) - before if name.startswith("fedstill_user")}
