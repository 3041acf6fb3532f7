"""An audit catches a model that has learnt its samples by heart, and does not accuse one that has never seen them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.core.weights import FlatNet
from fedstill.data.dataset import Split
from fedstill.running.callbacks import Callback, RunView
from fedstill.studies import audit as audits
from fedstill.studies.audit import Audit, pairs, shadow_federation
from fedstill.studies.wire_leaks import Exchanged, on_the_wire
from fedstill.train.task import classifier
from support.commandline import SHORT
from support.commandline import fedstill as command

Settings = dict[str, Any]
BY_HEART: Settings = {"rounds": 2, "epochs": 40, "batch_size": 30, "lr": 0.5, "participation": 1.0, "model": "mlp"}
BY_HEART |= {"engine": "inline", "eval_every": 0}


def federation(seed: int) -> fedstill.Federation:
    """Three clients whose labels follow no rule: all that can be learnt is which sample has which."""
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> tuple[Any, Any]:
        return rng.normal(size=(count, 20)).astype(np.float32), np.arange(count) % 2

    return fedstill.from_clients([drawn(60) for _ in range(3)], drawn(40), test_fraction=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audit") / "run"
    fedstill.run("fedavg", data=federation(0), out=out, **BY_HEART)
    return out


def found(result: Audit, attack: str) -> Any:
    return next(leak.advantage for leak in result.leaks if leak.attack == attack)


def test_samples_that_were_learnt_by_heart_are_found(run: Path) -> None:
    result = fedstill.audit(run, data=federation(0), inversion_steps=0)
    assert found(result, "loss").interval[0] > 0.5  # with 95 % confidence better than a guess
    assert found(result, "loss against the sent model's").interval[0] > 0.5
    given = federation(0)
    train, test = given.dataset.train.y[given.train_index], given.test_split.y[given.test_index]
    assert result.leaks[0].members == sum(min(int((train == c).sum()), int((test == c).sum())) for c in (0, 1))
    saved = json.loads((run / "audit" / "audit.json").read_text())
    assert saved["leaks"][0]["auc"] == found(result, "loss").auc
    again = fedstill.audit(run, data=federation(0), inversion_steps=0)
    assert again.leaks == result.leaks


def test_a_model_that_was_trained_on_other_data_is_not_accused(run: Path, tmp_path: Path) -> None:
    result = fedstill.audit(run, data=federation(1), inversion_steps=0, out=tmp_path)
    low, high = found(result, "loss").interval
    assert low < 0.5 < high
    assert found(result, "loss").epsilon == 0


class Killed(Exception):
    pass


class Kill(Callback):
    """Counts rounds, and dies in the third."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.rounds = 0

    def on_round_end(self, run: RunView, record: Any) -> None:
        self.rounds += 1
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.mark.slow
def test_shadow_runs_go_on_where_they_stopped_and_lira_finds_members(run: Path, tmp_path: Path) -> None:
    settings: Settings = {"shadows": 4, "inversion_steps": 0, "clients": 1, "data": federation(0)}
    with pytest.raises(fedstill.CallbackError):
        fedstill.audit(run, out=tmp_path / "a", callbacks=[Kill(after=5)], **settings)
    rest = Kill(after=10**6)
    result = fedstill.audit(run, out=tmp_path / "a", callbacks=[rest], **settings)
    assert rest.rounds == 4 * BY_HEART["rounds"] - 5
    assert found(result, "LiRA").interval[0] > 0.5
    assert not [path for path in (tmp_path / "a").iterdir() if path.is_dir()]


def test_a_shadow_has_just_the_samples_that_are_included() -> None:
    given = federation(0)
    members, others, owners = pairs(given, 20, seed=0)
    assert (given.dataset.train.y[members] == given.test_split.y[others]).all()
    assert np.isin(members, given.train_index).all()
    assert not np.isin(others, given.train_index).any()
    split = Split(
        torch.cat([given.dataset.train.x[members], given.test_split.x[others]]),
        torch.cat([given.dataset.train.y[members], given.test_split.y[others]]),
    )
    included = np.arange(40) % 3 == 0
    shadow = shadow_federation(given, members, owners, split, included)
    rows = {row.tobytes() for row in shadow.dataset.train.x[shadow.train_index].numpy()}
    assert [row.tobytes() in rows for row in split.x.numpy()] == included.tolist()
    assert len(shadow.train_index) == len(given.train_index) - 20 + included.sum()


@pytest.mark.slow
def test_a_single_sample_is_rebuilt_from_its_gradient(tmp_path: Path) -> None:
    """The gradient of a first layer on one sample is that sample, up to a factor for each neuron: it must come out."""
    settings = BY_HEART | {"rounds": 1, "epochs": 1}
    fedstill.run("fedprox", data=federation(0), out=tmp_path / "run", **settings)
    result = fedstill.audit(tmp_path / "run", data=federation(0), samples=20, clients=1, inversion_steps=60)
    one, _ = result.inversions
    assert (one.batch, one.labels) == (1, 1.0)
    assert one.recovered > 0.8


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    fedstill.run("feddistill-plus", **SHORT | {"rounds": 1, "out": tmp_path / "run"})
    answer = command("audit", tmp_path / "run", "--samples", 40, "--inversion-steps", 0)
    assert answer.code == 0
    assert "final model" in answer.out
    assert "distance from the class mean" in answer.out
    assert "'known'" in answer.out
    assert (tmp_path / "run" / "audit" / "audit.png").stat().st_size > 1000
    assert command("verify", tmp_path / "run").code == 0
    assert "no config.toml" in command("audit", tmp_path).err


def test_a_discriminator_knows_the_samples_that_it_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of noise, so that all that tells members from others is that a client's discriminator has seen them."""
    rng = np.random.default_rng(0)

    def drawn(count: int) -> tuple[Any, Any]:
        return rng.normal(size=(count, 1, 16, 16)).astype(np.float32), np.arange(count) % 2

    data = fedstill.from_clients([drawn(60) for _ in range(3)], drawn(40), test_fraction=0.5)
    quick = {"lr": 0.1, "rounds": 1, "z_dim": 3, "batches": 1, "server_batch": 8, "server_epochs": 1}
    fedstill.run("dafkd", data=data, out=tmp_path / "run", **BY_HEART | quick)
    crossed: list[tuple[Exchanged, Split, Any]] = []

    def noting(exchanged: Exchanged, samples: Split, owners: Any) -> Any:
        crossed.append((exchanged, samples, owners))
        return on_the_wire(exchanged, samples, owners)

    monkeypatch.setattr(audits, "on_the_wire", noting)
    result = fedstill.audit(tmp_path / "run", data=data, inversion_steps=0)
    assert found(result, "taken for real").interval[0] > 0.5
    ((exchanged, samples, owners),) = crossed
    scores = np.full((2, len(owners)), np.nan)  # of members and of others, by plain layers
    for client, message in exchanged.up.items():
        net, judge = exchanged.task.build(), FlatNet(torch.nn.Linear(exchanged.task.feature_dim, 1))
        net.load(message["model"])
        judge.load(message["discriminator"])
        for half, row in enumerate(scores):
            places = np.flatnonzero(owners == client)
            x = exchanged.task.dataset.normalise(samples.x[places + half * len(owners)])
            with torch.no_grad():
                row[places] = judge.module(classifier(net).features(x)).flatten().numpy()
    members, others = scores
    above = (members[:, None] > others).mean() + 0.5 * (members[:, None] == others).mean()
    assert found(result, "taken for real").auc == pytest.approx(above, abs=1e-3)
